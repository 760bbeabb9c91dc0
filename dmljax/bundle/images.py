"""Images from outside, checked before they are decoded.

`dmljax.data.decode` decodes them, as in training. Before that, the first bytes must belong to a
format of `image_formats`, and the header must name a size within the limits, so that a small file
cannot fill the memory. The decoding time is not limited here: the service decodes in processes
that it can kill.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from dmljax.bundle.errors import BadImage
from dmljax.bundle.preprocessing import Preprocessing
from dmljax.data import decode
from dmljax.files import image_formats

MAX_BYTES = 64 << 20
# Cameras store a preview after the photograph as a second "frame" of a JPEG.
_MAY_HAVE_FRAMES = ("MPO",)


def prepare(image: bytes | str | os.PathLike | np.ndarray, preprocess: Preprocessing) -> np.ndarray:
    """Returns the input of a net, `uint8 [height width channels]`, for an image as in `pixels`."""
    return preprocess(
        pixels(image, check_size_fn=preprocess.check_size, least_side=preprocess.least_side)
    )


def pixels(
    image: bytes | str | os.PathLike | np.ndarray,
    *,
    check_size_fn: Callable[[int, int], None],
    max_bytes: int = MAX_BYTES,
    least_side: int | None = None,
) -> np.ndarray:
    """Returns the pixels of an encoded image or a path; arrays are returned as they are.

    They are `uint8 [h w 1]` for an image in gray, and `uint8 [h w 3]` for any other.

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
    with opened(data) as picture, _refusing():
        check_size_fn(picture.height, picture.width)
        # `n_frames` would read the whole file: a small one can list millions of frames.
        if getattr(picture, "is_animated", False) and picture.format not in _MAY_HAVE_FRAMES:
            raise BadImage(
                f"the {picture.format} file has several frames: an image must have one",
                kind="format",
            )
        return decode.decode(data, picture=picture, least_side=least_side, keep_gray=True)


def _read(path: Any) -> bytes:
    if not isinstance(path, str | os.PathLike):
        # An image of Pillow may have another scale or orientation than its file gives here.
        raise BadImage(
            f"an image is a path, the bytes of a file, or pixels uint8 [h w c], not of type "
            f"{type(path).__name__}: of an image of Pillow, give np.asarray(image.convert('RGB'))",
            kind="format",
        )
    with _refusing(), open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def opened(data: bytes) -> Image.Image:
    """Returns the image with its header read, and no pixels."""
    known = image_formats.format_of(data)
    if known is None:
        names = ", ".join(row.name for row in image_formats.FORMATS)
        raise BadImage(f"the file is not an image in one of {names}", kind="format")
    with _refusing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Image.open(io.BytesIO(data), formats=[known.name])


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns an error of the file system or of a decoder into a `BadImage`."""
    try:
        yield
    except BadImage:
        raise
    except Image.DecompressionBombError as error:
        raise BadImage("the image has too many pixels", kind="too_large") from error
    except Exception as error:  # damaged data raises almost anything
        # A message of Pillow may end with the address of a buffer.
        text = getattr(error, "strerror", None) or str(error).split(" <_io")[0]
        text = " ".join(text.split()) or type(error).__name__
        raise BadImage(f"the image cannot be read: {text}", kind="unreadable") from error
