"""From an image to the pixels that a net takes, as a list of named operations.

A bundle holds the list as JSON, never as code. The operations are those of
`dmljax.data.transforms` that draw nothing, so pixels are bitwise as in the evaluation. Imports no
jax.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.bundle.errors import BadBundle, BadImage
from dmljax.data import transforms
from dmljax.data.decode import to_pil
from dmljax.data.transforms import transform as transform_lib
from dmljax.data.transforms.operations import OPERATIONS, Operation

_RNG = np.random.default_rng(0)  # these operations take a generator and ignore it
MAX_PIXELS = 50_000_000
_MAX_SIDE = 20_000
_MOST_OPERATIONS = 16
_FILTERS = {
    ("bilinear", True): "bilinear, antialiased (Pillow's BILINEAR)",
    ("bilinear", False): "bilinear, not antialiased (OpenCV's INTER_LINEAR_EXACT)",
    ("bicubic", True): "bicubic with a = -0.5, antialiased (Pillow's BICUBIC)",
}


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
        """`uint8 [height width channels]` of a decoded image `uint8 [h w]` or `[h w 1 or 3]`."""
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

    @property
    def _listed(self) -> list[dict[str, Any]]:
        return [operation.to_json() for operation in self.operations]

    def to_json(self) -> dict[str, Any]:
        """The content of `preprocess.json`; `parse` reads it."""
        filters = {str(flag).lower(): _FILTERS["bilinear", flag] for flag in (True, False)}
        if any("filter" in operation for operation in self._listed):
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
            "operations": self._listed,
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
    if not _is_stored(name):
        choices = ", ".join(filter(_is_stored, transforms.__all__))
        raise ValueError(
            f"eval_transform {name!r} cannot be written into a bundle, which holds no code and "
            f"draws nothing: choose one of {choices}"
        )
    operations = transform_lib.bind(getattr(transforms, name), **options).operations
    if not operations:
        operations = (transforms.resize(height=height, width=width),)
    return Preprocessing(height, width, channels, operations)


def _is_stored(name: str) -> bool:
    """Tells whether a recipe or an operation draws nothing, so that a bundle can hold it."""
    if name not in transforms.__all__:
        return False
    operations = transform_lib.bind(getattr(transforms, name)).operations
    return not any(operation.is_random for operation in operations)


def parse(data: Any) -> Preprocessing:
    """The `Preprocessing` of the JSON of a bundle. Unknown operations and fields are refused."""
    if not isinstance(data, dict) or data.get("format") != 1:
        raise BadBundle("preprocess.json has another format: this program reads format 1")
    sizes = data.get("input")
    if not isinstance(sizes, dict):
        raise BadBundle("preprocess.json has no input")
    height, width, channels = (
        _integer(f"input.{name}", sizes.get(name), 1, _MAX_SIDE)
        for name in ("height", "width", "channels")
    )
    if channels not in (1, 3) or sizes.get("dtype") != "uint8":
        raise BadBundle("preprocess.json: the input must be uint8 with 1 or 3 channels")
    operations = data.get("operations")
    if not isinstance(operations, list) or len(operations) > _MOST_OPERATIONS:
        raise BadBundle(f"preprocess.json: operations must be a list of at most {_MOST_OPERATIONS}")
    parsed = tuple(_operation(item) for item in operations)
    if any(operation.least_side for operation in parsed[1:]):
        raise BadBundle("preprocess.json: scaled_decode is for the first operation only")
    return Preprocessing(height, width, channels, parsed)


def _operation(data: Any) -> Operation:
    name = data.get("name") if isinstance(data, dict) else data
    known = {name: item for name, item in OPERATIONS.items() if not item.is_random}
    if not isinstance(data, dict) or not isinstance(name, str) or name not in known:
        raise BadBundle(
            f"preprocess.json: there is no operation {name!r}. It has: {', '.join(known)}"
        )
    fields = {field.name: field for field in dataclasses.fields(known[name])}
    optional = {"filter", "scaled_decode"} & set(fields)
    values = {k: v for k, v in data.items() if k != "name"}
    if set(values) - optional != set(fields) - optional:
        raise BadBundle(f"preprocess.json: {name} takes {', '.join(fields)}")
    for key, value in values.items():
        if fields[key].type is int:
            low, high = (0, 255) if key == "fill" else (0 if key in ("top", "left") else 1, 16384)
            _integer(f"{name}.{key}", value, low, high)
        elif not isinstance(value, fields[key].type):
            kind = "true or false" if fields[key].type is bool else "text"
            raise BadBundle(f"preprocess.json: {name}.{key} must be {kind}, got {value!r}")
    try:
        return known[name](**values)
    except ValueError as error:
        raise BadBundle(f"preprocess.json: {name}: {error}") from error


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadBundle(f"preprocess.json: {name} must be {low} to {high}, not {value!r}")
    return value
