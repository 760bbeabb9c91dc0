"""From an image to the pixels that a net takes, as a list of named operations.

A bundle holds the list as JSON, never as code: `OPERATIONS` has every operation that exists. They
are the functions of `dmljax.data.transforms`, so that pixels are bitwise as in the evaluation.
Imports no jax.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.bundle.errors import BadBundle, BadImage
from dmljax.data import transforms
from dmljax.data.decode import to_pil
from dmljax.data.transforms import geometry, resampling
from dmljax.data.transforms.recipes import shorter_of

_RNG = np.random.default_rng(0)  # transforms for evaluation take a generator and ignore it
MAX_PIXELS = 50_000_000
_MAX_SIDE = 20_000


class Operation(NamedTuple):
    """The fields of an operation with their types, the size it results in, and what it does.

    An operation with the field `antialias` may also have `filter`; without it, it is bilinear. If
    it is the first one, it may have `scaled_decode`, which is for the decoder (`least_side`).
    """

    fields: Mapping[str, type]
    size_fn: Callable[..., tuple[int, int]]
    run_fn: Callable[..., np.ndarray]


def _shorter_size(h, w, *, size, **_):
    return int(size * h / min(h, w)), int(size * w / min(h, w))


OPERATIONS: Mapping[str, Operation] = {
    # The shorter side becomes `size`; the longer one keeps the ratio and is rounded down.
    "resize_shorter_side": Operation(
        {"size": int, "antialias": bool},
        _shorter_size,
        lambda image, **fields: geometry.resize(image, _RNG, **fields),
    ),
    # Both sides, whatever the ratio. Images of this size stay as they are.
    "resize": Operation(
        {"height": int, "width": int, "antialias": bool},
        lambda h, w, *, height, width, **_: (height, width),
        resampling.scale,
    ),
    # The longer side becomes `size`; both ends of the shorter one are filled up to a square.
    "pad_to_square": Operation(
        {"size": int, "fill": int},
        lambda h, w, *, size, fill: (size, size),
        lambda image, **fields: geometry.pad(image, _RNG, **fields),
    ),
    "center_crop": Operation(
        {"size": int},
        lambda h, w, *, size: (size, size),
        lambda image, **fields: geometry.center_crop(image, _RNG, **fields),
    ),
    "crop": Operation(
        {"top": int, "left": int, "size": int},
        lambda h, w, *, top, left, size: (size, size),
        lambda image, **fields: geometry.crop(image, **fields),
    ),
}
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
    operations: tuple[dict[str, Any], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.height, self.width, self.channels

    @property
    def least_side(self) -> int | None:
        """The argument of `data.decode.decode`; None decodes all pixels."""
        first = self.operations[0] if self.operations else {}
        if not first.get("scaled_decode"):
            return None
        return 2 * max(first[name] for name in ("size", "height", "width") if name in first)

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
            h, w = OPERATIONS[operation["name"]].size_fn(h, w, **_fields(operation))
            if h * w > MAX_PIXELS:
                raise BadImage(
                    f"an image of {width:,} x {height:,} pixels is too long for its width: "
                    f"{operation['name']} would make it {w:,} x {h:,}",
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
                image = OPERATIONS[operation["name"]].run_fn(image, **_fields(operation))
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
        """The content of `preprocess.json`; `parse` reads it."""
        filters = {str(flag).lower(): _FILTERS["bilinear", flag] for flag in (True, False)}
        if any("filter" in operation for operation in self.operations):
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
            "operations": list(self.operations),
            "normalization": "inside the program, which takes uint8",
        }


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return np.asarray(to_pil(image).convert("L"))[:, :, None]


def from_transform(spec: str | Mapping[str, Any], shape: Sequence[int]) -> Preprocessing:
    """The operations of the transform that a config names as `eval_transform`.

    `shape` is the shape of the net's images, `[height width channels]`. Where the
    transform is `unchanged`, images of another size are resized to it.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name")
    height, width, channels = shape
    if channels not in (1, 3):
        raise ValueError(f"a bundle holds nets for gray or RGB images, not for {channels} channels")
    if name not in _COMPOSITIONS:
        raise ValueError(
            f"eval_transform {name!r} cannot be written into a bundle, which holds no code: choose "
            f"one of {', '.join(sorted(_COMPOSITIONS))}"
        )
    parameters = inspect.signature(getattr(transforms, name)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    if name == "unchanged":
        defaults = {"height": height, "width": width}
    operations = tuple(_COMPOSITIONS[name](**defaults | options))
    return Preprocessing(height, width, channels, operations)


def _named(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, **fields}


def _resized(
    name: str,
    *,
    antialias: bool = True,
    filter: str = "bilinear",
    scaled_decode: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Fields at their default are left out, so that digests of older bundles stay."""
    special: dict[str, Any] = {} if filter == "bilinear" else {"filter": filter}
    special |= {"scaled_decode": True} if scaled_decode else {}
    return _named(name, **fields, antialias=antialias, **special)


def _standard(*, size, shorter, **options):
    shorter = shorter_of(size) if shorter is None else shorter
    yield _resized("resize_shorter_side", size=shorter, **options)
    yield _named("center_crop", size=size)


def _squashed(*, size, **options):
    yield _resized("resize", height=size, width=size, **options)


def _small(*, size):
    yield from _standard(size=size, shorter=size)


def _dvml(*, size):
    side = shorter_of(size)
    offset = (side - size + 1) // 2
    yield _named("resize", height=side, width=side, antialias=False)
    yield _named("crop", top=offset, left=offset, size=size)


def _abe(*, size):
    yield _named("pad_to_square", size=shorter_of(size), fill=0)
    yield _named("center_crop", size=size)


_COMPOSITIONS: Mapping[str, Callable[..., Any]] = {
    "abe_eval": _abe,
    "center_crop": lambda *, size: [_named("center_crop", size=size)],
    "dvml_eval": _dvml,
    "graph_eval": _standard,
    "pad": lambda *, size, fill: [_named("pad_to_square", size=size, fill=fill)],
    "resize": lambda **fields: [_resized("resize_shorter_side", **fields)],
    "small_eval": _small,
    "squash": _squashed,
    "squash_eval": _squashed,
    "standard_eval": _standard,
    "unchanged": lambda *, height, width: [
        _named("resize", height=height, width=width, antialias=True)
    ],
}


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
    if not isinstance(operations, list) or len(operations) > 16:
        raise BadBundle("preprocess.json: operations must be a list of at most 16")
    parsed = tuple(_operation(data, is_first=i == 0) for i, data in enumerate(operations))
    return Preprocessing(height, width, channels, parsed)


def _operation(data: Any, *, is_first: bool) -> dict[str, Any]:
    name = data.get("name") if isinstance(data, dict) else data
    if not isinstance(data, dict) or not isinstance(name, str) or name not in OPERATIONS:
        raise BadBundle(
            f"preprocess.json: there is no operation {name!r}. It has: {', '.join(OPERATIONS)}"
        )
    fields = OPERATIONS[data["name"]].fields
    optional = {"filter", "scaled_decode"} if "antialias" in fields else set()
    if set(data) - optional != {"name", *fields}:
        raise BadBundle(f"preprocess.json: {data['name']} takes {', '.join(fields)}")
    for name, type_ in fields.items():
        if type_ is bool and not isinstance(data[name], bool):
            raise BadBundle(f"preprocess.json: {data['name']}.{name} must be true or false")
        if type_ is int:
            low, high = (0, 255) if name == "fill" else (0 if name in ("top", "left") else 1, 16384)
            _integer(f"{data['name']}.{name}", data[name], low, high)
    if "filter" in data and (data["filter"], data["antialias"]) not in _FILTERS:
        raise BadBundle(
            f"preprocess.json: {data['name']}.filter is {data['filter']!r} with antialias "
            f"{data['antialias']}: there is no such filter"
        )
    if "scaled_decode" in data and not (
        data["scaled_decode"] is True and data["antialias"] and is_first
    ):
        raise BadBundle(
            f"preprocess.json: {data['name']}.scaled_decode must be true, of the first operation, "
            "with antialias"
        )
    return dict(data)


def _fields(operation: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of its functions."""
    return {k: v for k, v in operation.items() if k not in ("name", "scaled_decode")}


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadBundle(f"preprocess.json: {name} must be {low} to {high}, not {value!r}")
    return value
