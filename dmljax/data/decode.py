"""Encoded images to `uint8 [h w 3]`: the same pixels whichever decoder is installed.

`simplejpeg` (the extra `fast`) decodes plain JPEGs about twice as fast as Pillow, bit for bit
alike; what it does not take, and every other format, goes to Pillow.
"""

from __future__ import annotations

import io
import os
import warnings

import numpy as np
from PIL import Image, ImageOps

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

__all__ = ["UnreadableImage", "decode", "encode", "mode", "read"]

_ORIENTATION = 0x0112


class UnreadableImage(ValueError):
    """An image file that is empty, truncated, damaged, missing or not allowed to be read."""


def decode(data: bytes) -> np.ndarray:
    """RGB pixels, upright. Grey is repeated; alpha is dropped; CMYK and palettes are converted.

    16-bit grey keeps its high byte (a plain `convert` would clip nearly all of it to white), and
    the orientation of EXIF is applied, as viewers do.
    """
    if not data:
        raise UnreadableImage("it has zero bytes")
    if data[:2] == b"\xff\xd8" and simplejpeg is not None and not _may_be_turned(data):
        # A camera's JPEG may be rotated; Pillow reads that. Damage is Pillow's to judge as well,
        # so that an image is readable or not whichever decoder is installed.
        try:
            _, _, space, _ = simplejpeg.decode_jpeg_header(data)
            if space in ("YCbCr", "Gray"):
                return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:
            pass
    return _pillow(data)


def _may_be_turned(data: bytes) -> bool:
    """Whether there may be an orientation, in EXIF or XMP."""
    head = data[:65536]
    return b"Exif\0" in head or b"tiff:Orientation" in head


def _pillow(data: bytes) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            # Corrupt EXIF warns; a picture of 90 megapixels is large, not an attack.
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(data))
            if picture.getexif().get(_ORIENTATION, 1) != 1:
                picture = ImageOps.exif_transpose(picture)
            if picture.mode.startswith("I"):
                high = np.asarray(picture, np.int64) >> 8
                picture = Image.fromarray(np.clip(high, 0, 255).astype(np.uint8))
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow names the memory buffer in its message, which is of no use to anyone.
        raise UnreadableImage(str(error).split(" <_io")[0]) from error


def mode(data: bytes) -> str:
    """Pillow's name for how the pixels are stored: L, RGB, RGBA, CMYK, P, ..."""
    with Image.open(io.BytesIO(data)) as picture:
        return picture.mode


def read(record: str | os.PathLike | bytes | np.ndarray) -> np.ndarray:
    """The pixels of a record. Arrays come back as they are, whatever their channels."""
    if isinstance(record, np.ndarray):
        return record
    if isinstance(record, bytes):
        return decode(record)
    try:
        with open(record, "rb") as file:
            data = file.read()
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from error
    return decode(data)


def encode(image: np.ndarray, *, quality: int) -> bytes:
    """JPEG bytes with 4:2:0 colour; the encoder is always Pillow's, so that hashes agree."""
    out = io.BytesIO()
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture.save(out, "JPEG", quality=quality, subsampling="4:2:0")
    return out.getvalue()
