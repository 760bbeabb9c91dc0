"""One file per family of published nets.

`PUBLISHED` of a file is its part of the table of published files, with preprocessing and license;
`NAME_MAPS` has the names of its files. A new file of a family is a row of `PUBLISHED`.
"""
