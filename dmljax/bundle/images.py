"""Images from outside, checked before they are decoded.

Images are decoded by `dmljax.data.decode`, as in training. Before that, the header must name one
of `FORMATS` and a size within the limits, so that a small file cannot fill the memory.
"""

import io
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from dmljax.bundle import headers
from dmljax.bundle.errors import BadImage
from dmljax.bundle.preprocessing import Preprocessing
from dmljax.data import decode
from dmljax.files import image_formats

FORMATS = tuple(sorted(row.name for row in image_formats.FORMATS))
MAX_BYTES = 64 << 20
# Cameras store a preview beside the photograph as a second "frame" of a JPEG.
_MAY_HAVE_FRAMES = ("MPO",)


class _NotSmall(Exception):
    pass


def prepare(image: bytes | str | os.PathLike | np.ndarray, preprocess: Preprocessing) -> np.ndarray:
    """The input of a net, `uint8 [height width channels]`, from an image as `pixels` takes it."""
    return preprocess(
        pixels(image, check_size_fn=preprocess.check_size, least_side=preprocess.least_side)
    )


def prepare_small(
    image: bytes, preprocess: Preprocessing, *, most_pixels: int
) -> np.ndarray | None:
    """As `prepare`, but None for an image of more pixels, which is not decoded."""

    def check_size(height: int, width: int) -> None:
        if height * width > most_pixels:
            raise _NotSmall
        preprocess.check_size(height, width)

    try:
        least_side = preprocess.least_side
        return preprocess(pixels(image, check_size_fn=check_size, least_side=least_side))
    except _NotSmall:
        return None


def pixels(
    image: bytes | str | os.PathLike | np.ndarray,
    *,
    check_size_fn: Callable[[int, int], None],
    max_bytes: int = MAX_BYTES,
    least_side: int | None = None,
) -> np.ndarray:
    """The pixels of an encoded image or a path; arrays are returned as they are.

    They are `uint8 [h w 1]` of an image in gray, and `uint8 [h w 3]` of any other.

    `check_size_fn(height, width)` raises for an image that is too large, before it is decoded.
    `least_side` is as in `data.decode.decode`.
    """
    if isinstance(image, np.ndarray):
        return image
    data = bytes(image) if isinstance(image, bytes | bytearray | memoryview) else _read(image)
    if not data:
        raise BadImage("the image has zero bytes", kind="unreadable")
    if len(data) > max_bytes:
        raise BadImage(
            f"the image has {len(data):,} bytes: the limit is {max_bytes:,}", kind="too_large"
        )
    if problem := headers.problem(data):
        raise BadImage(problem, kind="format")
    with opened(data) as picture:
        check_size_fn(picture.height, picture.width)
        try:
            # `n_frames` would read the whole file: a small one can list millions of frames.
            if getattr(picture, "is_animated", False) and picture.format not in _MAY_HAVE_FRAMES:
                raise BadImage(
                    f"the {picture.format} file has several frames: an image must have one",
                    kind="format",
                )
            return decode.decode(data, picture=picture, least_side=least_side, keep_gray=True)
        except BadImage:
            raise
        except Exception as error:  # damaged data raises almost anything
            raise _unreadable(error) from error


def _read(path: Any) -> bytes:
    if not isinstance(path, str | os.PathLike):
        # An image of Pillow may have another scale or orientation than its file gives here.
        raise BadImage(
            f"an image is a path, the bytes of a file, or pixels uint8 [h w c], not of type "
            f"{type(path).__name__}: of an image of Pillow, give np.asarray(image.convert('RGB'))",
            kind="format",
        )
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadImage(f"the image cannot be read: {reason}", kind="unreadable") from error


def opened(data: bytes) -> Image.Image:
    """The image with its header read, and no pixels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.UnidentifiedImageError as error:
        raise BadImage(
            f"this is no image in one of the formats {', '.join(FORMATS)}", kind="format"
        ) from error
    except Image.DecompressionBombError as error:
        raise BadImage("the image has too many pixels", kind="too_large") from error
    except Exception as error:  # a damaged header raises almost anything
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> BadImage:
    """The refusal for an error of a decoder, without the address of a buffer in its message."""
    message = " ".join(str(error).split(" <_io")[0].split()) or type(error).__name__
    return BadImage(f"the image cannot be read: {message}", kind="unreadable")
