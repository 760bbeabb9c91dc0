"""The image formats that dmljax reads, and decoding to `uint8 [h w 3]`.

`simplejpeg` (installed by the extra `fast`) decodes JPEGs about twice as fast as Pillow, to bitwise
the same pixels. Pillow decodes all other formats, and JPEGs that simplejpeg does not support.
"""

import io
import os
import re
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

try:
    import simplejpeg
except ImportError:
    simplejpeg = None


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


_ORIENTATION = 0x0112
_TINY = 8  # the sides of images that simplejpeg may make at 3/8 where Pillow makes them at 1/2


class UnreadableImage(ValueError):
    """An image that is empty, truncated, damaged or missing, or a file without read permission."""


def decode(
    data: bytes,
    *,
    picture: Image.Image | None = None,
    least_side: int | None = None,
    keep_gray: bool = False,
) -> np.ndarray:
    """Decodes an image to RGB pixels, `uint8 [h w 3]`.

    Grayscale is repeated or, with `keep_gray`, kept: `uint8 [h w 1]`. Alpha is dropped, CMYK and
    palettes are converted. The EXIF orientation is applied. 16-bit grayscale keeps its high byte;
    Pillow's own conversion would clip nearly all of it to white. `picture` is the same data as
    opened by Pillow, where the caller has read its header; by default it is opened here.

    With `least_side`, a JPEG in color or gray is decoded at 1/2, 1/4 or 1/8 of its size (DCT
    scaling), which takes a fraction of the time and of the memory. The size is the smallest one
    whose shorter side still has `least_side` pixels.
    """
    if not data:
        raise UnreadableImage("it has zero bytes")
    if data[:2] == b"\xff\xd8" and simplejpeg is not None and not _may_be_rotated(data):
        # Pillow handles rotated JPEGs. It also decides whether a damaged JPEG is readable, so that
        # this does not depend on the decoders that are installed.
        try:
            h, w, space, _ = simplejpeg.decode_jpeg_header(data)
            if space in ("YCbCr", "Gray"):
                divisor = _divisor(h, w, least_side)
                if divisor > 1 and max(h, w) <= _TINY:
                    return _pillow(data, picture, least_side, keep_gray)
                sides = {"min_height": -(-h // divisor), "min_width": -(-w // divisor)}
                color = "GRAY" if keep_gray and space == "Gray" else "RGB"
                return simplejpeg.decode_jpeg(data, color, **sides)
        except ValueError:
            pass
    return _pillow(data, picture, least_side, keep_gray)


def _divisor(height: int, width: int, least_side: int | None) -> int:
    """Returns by what the sides of a JPEG are divided: 1, 2, 4 or 8, as in Pillow's `draft`."""
    if least_side is None:
        return 1
    return max(n for n in (1, 2, 4, 8) if n <= max(1, min(height, width) // least_side))


def _may_be_rotated(data: bytes) -> bool:
    """Tells whether the file has EXIF or XMP metadata that may contain an orientation."""
    head = data[:65536]
    return b"Exif\0" in head or b"tiff:Orientation" in head


def _pillow(
    data: bytes,
    picture: Image.Image | None = None,
    least_side: int | None = None,
    keep_gray: bool = False,
) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            # Ignore warnings about corrupt EXIF, and about large images as a possible attack.
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(data)) if picture is None else picture
            if least_side is not None and picture.mode in ("L", "RGB"):
                picture.draft(None, (least_side, least_side))  # JPEGs alone have drafts
            if picture.getexif().get(_ORIENTATION, 1) != 1:
                picture = ImageOps.exif_transpose(picture)
            if picture.mode.startswith("I"):
                high = np.asarray(picture) >> 8
                picture = Image.fromarray(np.clip(high, 0, 255, out=high).astype(np.uint8))
            if keep_gray and picture.mode == "L":
                return np.asarray(picture)[:, :, None]
            # Pillow would copy a picture that is RGB already.
            return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's message ends with the address of a memory buffer.
        raise UnreadableImage(str(error).split(" <_io")[0]) from error


def read(
    record: str | os.PathLike | bytes | np.ndarray, *, least_side: int | None = None
) -> np.ndarray:
    """Reads the pixels of a record: a path, encoded bytes, or an array (returned unchanged).

    `least_side` is as in `decode`.
    """
    if isinstance(record, np.ndarray):
        return record
    if isinstance(record, bytes):
        return decode(record, least_side=least_side)
    try:
        with open(record, "rb") as file:
            data = file.read()
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from error
    return decode(data, least_side=least_side)


def encode(image: np.ndarray, *, quality: int) -> bytes:
    """Encodes a JPEG with 4:2:0 chroma, always by Pillow, so that hashes agree everywhere."""
    return file_bytes(to_pil(image), "JPEG", quality=quality, subsampling="4:2:0")


def to_pil(image: np.ndarray) -> Image.Image:
    """Converts an array of one or three channels to a Pillow image."""
    return Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)


def file_bytes(picture: Image.Image, format: str, **options) -> bytes:
    """Returns the bytes of the file that Pillow writes."""
    out = io.BytesIO()
    picture.save(out, format, **options)
    return out.getvalue()
