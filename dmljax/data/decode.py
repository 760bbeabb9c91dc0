"""Decodes images to `uint8 [h w 3]`.

`simplejpeg` (installed by the extra `fast`) decodes JPEGs about twice as fast as Pillow, to bitwise
the same pixels. Pillow decodes all other formats, and JPEGs that simplejpeg does not support.
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
    """An image that is empty, truncated, damaged or missing, or a file without read permission."""


def decode(data: bytes, *, picture: Image.Image | None = None) -> np.ndarray:
    """RGB pixels of an encoded image, `uint8 [h w 3]`.

    Grayscale is repeated, alpha is dropped, CMYK and palettes are converted. The EXIF orientation
    is applied. 16-bit grayscale keeps its high byte; Pillow's own conversion would clip nearly all
    of it to white. `picture` is the same data as opened by Pillow, where the caller has read its
    header; by default it is opened here.
    """
    if not data:
        raise UnreadableImage("it has zero bytes")
    if data[:2] == b"\xff\xd8" and simplejpeg is not None and not _may_be_rotated(data):
        # Pillow handles rotated JPEGs. It also decides whether a damaged JPEG is readable, so that
        # this does not depend on the decoders that are installed.
        try:
            _, _, space, _ = simplejpeg.decode_jpeg_header(data)
            if space in ("YCbCr", "Gray"):
                return simplejpeg.decode_jpeg(data, "RGB")
        except ValueError:
            pass
    return _pillow(data, picture)


def _may_be_rotated(data: bytes) -> bool:
    """Whether the file has EXIF or XMP metadata that may contain an orientation."""
    head = data[:65536]
    return b"Exif\0" in head or b"tiff:Orientation" in head


def _pillow(data: bytes, picture: Image.Image | None = None) -> np.ndarray:
    try:
        with warnings.catch_warnings():
            # Ignore warnings about corrupt EXIF, and about large images as a possible attack.
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(data)) if picture is None else picture
            if picture.getexif().get(_ORIENTATION, 1) != 1:
                picture = ImageOps.exif_transpose(picture)
            if picture.mode.startswith("I"):
                high = np.asarray(picture, np.int64) >> 8
                picture = Image.fromarray(np.clip(high, 0, 255).astype(np.uint8))
            return np.asarray(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's message ends with the address of a memory buffer.
        raise UnreadableImage(str(error).split(" <_io")[0]) from error


def mode(data: bytes) -> str:
    """Pillow's name of the pixel format: L, RGB, RGBA, CMYK, P, ..."""
    with Image.open(io.BytesIO(data)) as picture:
        return picture.mode


def read(record: str | os.PathLike | bytes | np.ndarray) -> np.ndarray:
    """The pixels of a record: a path, encoded bytes, or an array, which is returned as it is."""
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
    """JPEG bytes with 4:2:0 chroma. Always by Pillow, so that hashes agree between machines."""
    out = io.BytesIO()
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    picture.save(out, "JPEG", quality=quality, subsampling="4:2:0")
    return out.getvalue()
