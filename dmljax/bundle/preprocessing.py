"""From an image to the pixels that a net takes, by a list of named operations.

A bundle holds the list as JSON, never as code. The operations are those of
`dmljax.data.transforms` that draw nothing, so pixels are bitwise as in the evaluation.

Images come from strangers. Before they are decoded, as in training, the first bytes must belong to
a format of `decode.FORMATS`, and the header must name a size within the limits: a small file
cannot fill the memory. The decoding time is not limited here: the service decodes in processes that
it can kill. Imports no jax.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from PIL import Image

from dmljax.bundle.errors import BadBundle, BadImage
from dmljax.data import decode, transforms
from dmljax.data.transforms import transform as transform_lib
from dmljax.data.transforms.operations import OPERATIONS, Operation
from dmljax.files import schema

_RNG = np.random.default_rng(0)  # these operations take a generator and ignore it
MAX_BYTES = 64 << 20
# Cameras store a preview after the photograph as a second "frame" of a JPEG.
_MAY_HAVE_FRAMES = ("MPO",)
MAX_PIXELS = 50_000_000
_MAX_SIDE = 20_000
_Side = Annotated[int, schema.between(1, _MAX_SIDE)]


class Preprocessing(NamedTuple):
    """A function from the pixels of a decoded image to `uint8 [height width channels]`."""

    height: _Side
    width: _Side
    channels: Annotated[int, schema.Limit((1, 3).__contains__, "1 or 3")]
    operations: tuple[Any, ...]  # of `transforms.operations`

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels

    @property
    def least_side(self) -> int | None:
        """Returns `least_side` for `data.decode.decode`; None decodes all pixels."""
        return self.operations[0].least_side if self.operations else None

    def check_size(self, height: int, width: int) -> None:
        """Raises `BadImage` if an image of this size is refused, before it is decoded."""
        shape = height, width
        is_large = height * width > MAX_PIXELS or max(shape) > _MAX_SIDE
        for operation in () if is_large else self.operations:
            shape = operation.shape(shape)
            is_large = is_large or shape[0] * shape[1] > MAX_PIXELS
        if is_large:
            raise BadImage(
                f"an image of {width:,} x {height:,} pixels is too large, before or after it is "
                f"resized: the limit is {MAX_PIXELS:,} pixels, and {_MAX_SIDE:,} on a side",
                kind="too_large",
            )

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Returns `uint8 [height width channels]` of an image `uint8 [h w]` or `[h w 1 or 3]`."""
        image = pixels[:, :, None] if pixels.ndim == 2 else pixels
        is_image = image.ndim == 3 and image.shape[2] in (1, 3) and image.size
        if not is_image or pixels.dtype != np.uint8:
            raise BadImage(
                "an image must be uint8 [height width 3] or [height width 1], not "
                f"{pixels.dtype} {list(pixels.shape)}",
                kind="format",
            )
        self.check_size(*image.shape[:2])
        image = _with_channels(image, self.channels)
        try:
            for operation in self.operations:
                image = operation(image, _RNG)
        except ValueError as error:
            raise BadImage(str(error), kind="too_small") from error
        if image.shape != self.shape:
            h, w = pixels.shape[:2]
            raise BadImage(
                f"an image of {w} x {h} pixels becomes {image.shape[1]} x {image.shape[0]}, but "
                f"the net takes {self.width} x {self.height}",
                kind="too_small",
            )
        return np.ascontiguousarray(image)

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the manifest's `preprocess`; `parse` reads it."""
        operations = [operation.to_json() for operation in self.operations]
        return self._asdict() | {"operations": operations}


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return np.asarray(decode.to_pil(image).convert("L"))[:, :, None]


def from_transform(spec: str | Mapping[str, Any], shape: Sequence[int]) -> Preprocessing:
    """Returns the operations of the transform that a config names as `eval_transform`.

    `shape` is the shape of the net's images, `[height width channels]`. Where the transform is
    empty (`unchanged`), images of another size are resized to it.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name")
    height, width, channels = shape
    if channels not in (1, 3):
        raise ValueError(f"a bundle holds nets for gray or RGB images, not for {channels} channels")
    transform_fn = getattr(transforms, name) if name in transforms.__all__ else None
    bound = () if transform_fn is None else transform_lib.bind(transform_fn, **options).operations
    operations = tuple(x for x in bound if isinstance(x, Operation) and not x.is_random)
    if transform_fn is None or len(operations) < len(bound):
        raise ValueError(
            f"eval_transform {name!r} cannot be written into a bundle, which holds no code and "
            "draws nothing: choose a transform of dmljax.data.transforms for evaluation, such as "
            "standard_eval"
        )
    resize = transforms.resize(height=height, width=width)
    return Preprocessing(height, width, channels, operations or (resize,))


def parse(data: Any) -> Preprocessing:
    """Returns the `Preprocessing` of `to_json`; raises `BadBundle` for any other JSON."""
    try:
        stored = schema.parse(Preprocessing, data)
        operations = schema.parse(tuple[dict[str, Any], ...], list(stored.operations), "operations")
        return stored._replace(operations=tuple(_operation(**item) for item in operations))
    except ValueError as error:
        raise BadBundle(f"the preprocessing of the bundle cannot be used: {error}") from error


def _operation(name: Any = None, **values: Any) -> Operation:
    if not isinstance(name, str) or name not in OPERATIONS or OPERATIONS[name].is_random:
        raise ValueError(f"{name!r} is not an operation of a bundle")
    return schema.parse(OPERATIONS[name], values, name)


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
    known = decode.format_of(data)
    if known is None:
        names = ", ".join(row.name for row in decode.FORMATS)
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
