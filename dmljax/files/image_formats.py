"""The image formats that dmljax reads, in one table; imports neither Pillow nor jax."""

import re
from typing import NamedTuple


class Format(NamedTuple):
    """A format of image files.

    `name` is Pillow's name, `suffixes` are lower case (new files get the first one), and `magic`
    matches the first bytes of every file of the format.
    """

    name: str
    suffixes: tuple[str, ...]
    magic: re.Pattern[bytes]


FORMATS = (
    Format("JPEG", (".jpg", ".jpeg"), re.compile(rb"\xff\xd8\xff")),
    Format("PNG", (".png",), re.compile(rb"\x89PNG\r\n\x1a\n")),
    Format("BMP", (".bmp",), re.compile(rb"BM")),
    Format("GIF", (".gif",), re.compile(rb"GIF8[79]a")),
    Format("TIFF", (".tif", ".tiff"), re.compile(rb"II[*+]\0|MM\0[*+]")),
    Format("WEBP", (".webp",), re.compile(rb"RIFF.{4}WEBP", re.DOTALL)),
    # P1 to P3 write numbers as text: a decoder takes minutes for some small files.
    Format("PPM", (".ppm", ".pgm"), re.compile(rb"P[4-6]\s")),
)
SUFFIXES = tuple(suffix for row in FORMATS for suffix in row.suffixes)
# Formats of phones and cameras that dmljax does not read.
UNREAD_SUFFIXES = (".heic", ".heif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw")


def format_of(data: bytes) -> Format | None:
    """Returns the format of an image file by its first bytes; None if it has none of `FORMATS`."""
    return next((row for row in FORMATS if row.magic.match(data)), None)
