"""From an image to the pixels that a net takes, as a list of named operations.

A bundle holds the list as JSON, never as code. The operations are those of
`dmljax.data.transforms` that draw nothing, so pixels are bitwise as in the evaluation. Imports no
jax.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from dmljax.bundle.errors import BadBundle, BadImage
from dmljax.data import transforms
from dmljax.data.decode import to_pil
from dmljax.data.transforms import transform as transform_lib
from dmljax.data.transforms.operations import OPERATIONS, Operation
from dmljax.files import schema

_RNG = np.random.default_rng(0)  # these operations take a generator and ignore it
MAX_PIXELS = 50_000_000
_MAX_SIDE = 20_000
_FILTERS = {
    ("bilinear", True): "bilinear, antialiased (Pillow's BILINEAR)",
    ("bilinear", False): "bilinear, not antialiased (OpenCV's INTER_LINEAR_EXACT)",
    ("bicubic", True): "bicubic with a = -0.5, antialiased (Pillow's BICUBIC)",
}


@dataclasses.dataclass(frozen=True)
class _Input:
    """The input of the program."""

    height: Annotated[int, schema.between(1, _MAX_SIDE)]
    width: Annotated[int, schema.between(1, _MAX_SIDE)]
    channels: Annotated[int, schema.Limit((1, 3).__contains__, "1 or 3")]
    dtype: Annotated[str, schema.Limit("uint8".__eq__, "'uint8'")]
    layout: str
    color: str


@dataclasses.dataclass(frozen=True)
class _Stored:
    """The JSON of `Preprocessing`; fields of text are for readers without dmljax."""

    format: int
    input: _Input
    decode: str
    filters: dict[str, str]
    operations: tuple[dict[str, Any], ...]
    normalization: str


class Preprocessing(NamedTuple):
    """A function from the pixels of a decoded image to `uint8 [height width channels]`."""

    height: int
    width: int
    channels: int
    operations: tuple[Operation, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels

    @property
    def least_side(self) -> int | None:
        """The argument of `data.decode.decode`; None decodes all pixels."""
        return self.operations[0].least_side if self.operations else None

    def check_size(self, height: int, width: int) -> None:
        """Raises `BadImage` if an image of this size is refused, before it is decoded."""
        if height * width > MAX_PIXELS or max(height, width) > _MAX_SIDE:
            raise BadImage(
                f"an image of {width:,} x {height:,} pixels is too large: the limit is "
                f"{MAX_PIXELS:,} pixels, and {_MAX_SIDE:,} on a side",
                kind="too_large",
            )
        h, w = height, width
        for operation in self.operations:
            h, w = operation.shape((h, w))
            if h * w > MAX_PIXELS:
                raise BadImage(
                    f"an image of {width:,} x {height:,} pixels is too long for its width: "
                    f"{type(operation).__name__} would make it {w:,} x {h:,}",
                    kind="too_large",
                )

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Returns `uint8 [height width channels]` of an image `uint8 [h w]` or `[h w 1 or 3]`."""
        if pixels.dtype != np.uint8:
            raise BadImage(f"pixels must be uint8, not {pixels.dtype}", kind="format")
        image = pixels[:, :, None] if pixels.ndim == 2 else pixels
        if image.ndim != 3 or image.shape[2] not in (1, 3) or not image.size:
            raise BadImage(
                f"an image must be [height width 3] or [height width 1], not {list(pixels.shape)}",
                kind="format",
            )
        self.check_size(*image.shape[:2])
        image = _with_channels(image, self.channels)
        for operation in self.operations:
            try:
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
        filters = {str(flag).lower(): _FILTERS["bilinear", flag] for flag in (True, False)}
        if any("filter" in operation for operation in operations):
            filters["bicubic"] = _FILTERS["bicubic", True]
        decode = (
            "EXIF orientation applied, alpha dropped, palettes and CMYK converted, 16-bit gray "
            "keeps its high byte, the first frame"
        )
        if self.least_side is not None:
            decode += (
                ", JPEGs in color or gray at 1/2, 1/4 or 1/8 of their size (DCT scaling): the "
                f"smallest one whose shorter side has {self.least_side} pixels or more"
            )
        return {
            "format": 1,
            "input": {
                "height": self.height,
                "width": self.width,
                "channels": self.channels,
                "dtype": "uint8",
                "layout": "height, width, channels",
                "color": "RGB" if self.channels == 3 else "gray",
            },
            "decode": decode,
            "filters": filters,
            "operations": operations,
            "normalization": "inside the program, which takes uint8",
        }


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return np.asarray(to_pil(image).convert("L"))[:, :, None]


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
    if (operations := _stored_operations(name, **options)) is None:
        choices = ", ".join(x for x in transforms.__all__ if _stored_operations(x) is not None)
        raise ValueError(
            f"eval_transform {name!r} cannot be written into a bundle, which holds no code and "
            f"draws nothing: choose one of {choices}"
        )
    resize = transforms.resize(height=height, width=width)
    return Preprocessing(height, width, channels, operations or (resize,))


def _stored_operations(name: str, **options: Any) -> tuple[Operation, ...] | None:
    """Returns the operations of a transform; None if one of them draws, or is not of dmljax."""
    if name not in transforms.__all__:
        return None
    bound = transform_lib.bind(getattr(transforms, name), **options).operations
    operations = tuple(x for x in bound if isinstance(x, Operation) and not x.is_random)
    return operations if len(operations) == len(bound) else None


def parse(data: Any) -> Preprocessing:
    """Returns the `Preprocessing` of `to_json`; raises `BadBundle` for any other JSON."""
    try:
        stored = schema.parse(_Stored, data)
        operations = tuple(map(_operation, stored.operations))
        if any(operation.least_side for operation in operations[1:]):
            raise ValueError("scaled_decode is for the first operation only")
    except ValueError as error:
        raise BadBundle(f"the preprocessing of the bundle cannot be used: {error}") from error
    return Preprocessing(stored.input.height, stored.input.width, stored.input.channels, operations)


def _operation(data: dict[str, Any]) -> Operation:
    known = {name: kind for name, kind in OPERATIONS.items() if not kind.is_random}
    name, values = data.get("name"), {k: v for k, v in data.items() if k != "name"}
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{name!r} is not an operation. Choose one of {', '.join(known)}")
    operation = schema.parse(known[name], values, name)
    for key, value in values.items():
        low, high = (0, 255) if key == "fill" else (0 if key in ("top", "left") else 1, 16384)
        if type(value) is int and not low <= value <= high:
            raise ValueError(f"{name}.{key} must be a number from {low} to {high}, got {value}")
    if operation.to_json() != data:
        raise ValueError(f"{name} must have the fields {', '.join(operation.to_json())}")
    return operation
