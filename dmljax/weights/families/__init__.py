"""One file per family of published nets.

`PUBLISHED` of a file is its part of the table of published files, with preprocessing and
license; the licenses are in `common.py`.
"""
