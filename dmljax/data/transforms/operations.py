"""The table of operations. A transform is a list of them.

An operation has its form for the host, the size of its result, its random numbers and its JSON in
one place, and everything else reads them here: the pipeline, the devices (`train.augment` has a
function of the same name for most), bundles, titles and cache keys. Operations have names in lower
case because configs name them like functions.

Images are `uint8 [h w c]`. Drawing is separated from changing pixels: `draw` needs only the shape
of an image, so that the host can draw for pixels that lie on a device.
"""

import dataclasses
import math
import typing
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageEnhance

from dmljax.data.decode import to_pil
from dmljax.data.transforms import resampling

Shape = tuple[int, ...]
Rng = np.random.Generator

OPERATIONS: dict[str, type["Operation"]] = {}
# Fields that JSON leaves out if they have these values.
_USUAL = {"filter": "bilinear", "scaled_decode": False}


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
class Operation:
    """One step of a transform: a frozen dataclass, whose fields a config can set."""

    is_random: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)
        if not cls.__name__.startswith("_"):
            OPERATIONS[cls.__name__] = cls

    def __call__(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        return self.apply(image, rng, *self.draw(image.shape, rng))

    def shape(self, shape: Shape) -> Shape:
        """Returns the shape of the result for an image of a shape."""
        return shape

    def draw(self, shape: Shape, rng: Rng) -> tuple[Any, ...]:
        """Computes the numbers that `apply` takes, always the same count of them."""
        return ()

    def apply(self, image: np.ndarray, rng: Rng, *numbers: Any) -> np.ndarray:
        """Changes the pixels of an image. Only noise is drawn from `rng` here."""
        raise NotImplementedError

    @property
    def least_side(self) -> int | None:
        """The argument of `decode.decode` if this is the first operation of a transform."""
        return None

    def to_json(self) -> dict[str, Any]:
        """Returns the name and the fields; `transform.of_json` reads them."""
        data: dict[str, Any] = {"name": type(self).__name__}
        for name, value in vars(self).items():
            if name not in _USUAL or value != _USUAL[name]:
                data[name] = list(value) if isinstance(value, tuple) else value
        return data


class _Resampled(Operation):
    """The fields of operations that resize.

    `filter` is 'bilinear' or 'bicubic', both Pillow's, which average all pixels. With
    `antialias=False`, the filter is OpenCV's plain bilinear one, which is several times as fast.
    `scaled_decode` lets the decoder make large JPEGs at a fraction of their size.
    """

    antialias: bool = True
    filter: str = "bilinear"
    scaled_decode: bool = False

    def __post_init__(self) -> None:
        if self.filter not in resampling.FILTERS:
            choices = " or ".join(map(repr, resampling.FILTERS))
            raise ValueError(f"`filter` must be {choices}, got {self.filter!r}")
        if not self.antialias and (self.filter != "bilinear" or self.scaled_decode):
            raise ValueError(
                "antialias=False takes pixels one by one, so it needs filter='bilinear' and "
                "scaled_decode=False: change them, or set antialias=True"
            )

    def _scale(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        antialias, filter = self.antialias, self.filter
        return resampling.scale(image, height, width, antialias=antialias, filter=filter)

    def _twice(self, side: int) -> int | None:
        """Returns twice a side, so that the filter has pixels to average, if it may be decoded."""
        return 2 * side if self.scaled_decode else None


class resize_shorter_side(_Resampled):
    """Resizes the shorter side to `size`. The longer side is rounded down, as in torchvision."""

    size: int = 256

    def shape(self, shape):
        h, w = shape[:2]
        shorter = min(h, w)
        return (int(self.size * h / shorter), int(self.size * w / shorter), *shape[2:])

    def apply(self, image, rng):
        return self._scale(image, *self.shape(image.shape)[:2])

    @property
    def least_side(self):
        return self._twice(self.size)


class resize(_Resampled):
    """Resizes an image to `height` and `width`, whatever its aspect ratio."""

    height: int = 256
    width: int = 256

    def shape(self, shape):
        return (self.height, self.width, *shape[2:])

    def apply(self, image, rng):
        return self._scale(image, self.height, self.width)

    @property
    def least_side(self):
        return self._twice(max(self.height, self.width))


class pad_to_square(Operation):
    """Resizes the longer side to `size`, then pads the shorter one on both ends with `fill`."""

    size: int = 256
    fill: int = 0

    def shape(self, shape):
        return (self.size, self.size, *shape[2:])

    def draw(self, shape, rng):
        h, w = shape[:2]
        longer = max(h, w)
        h, w = max(1, round(h * self.size / longer)), max(1, round(w * self.size / longer))
        return (self.size - h) // 2, (self.size - w) // 2, h, w

    def apply(self, image, rng, top, left, height, width):
        square = np.full(self.shape(image.shape), self.fill, np.uint8)
        scaled = resampling.scale(image, height, width)
        square[top : top + height, left : left + width] = scaled
        return square


class _Cut(Operation):
    """Cuts a square of side `size`, without resizing."""

    size: int = 227

    def shape(self, shape):
        return (self.size, self.size, *shape[2:])

    def draw(self, shape, rng):
        h, w = shape[:2]
        if min(h, w) < self.size:
            raise ValueError(
                f"a crop of {self.size} does not fit a {w}x{h} image: resize or pad it first"
            )
        return self._corner(h - self.size, w - self.size, rng)

    def _corner(self, rows: int, columns: int, rng: Rng) -> tuple[int, int]:
        """Returns top and left of the square, where `rows` and `columns` of pixels are left out."""
        raise NotImplementedError

    def apply(self, image, rng, top, left):
        return image[top : top + self.size, left : left + self.size]


class center_crop(_Cut):
    """Cuts the central square. Offsets that end in .5 are rounded to even, as in torchvision."""

    def _corner(self, rows, columns, rng):
        return round(rows / 2), round(columns / 2)


class crop(_Cut):
    """Cuts the square of side `size` whose upper left corner is at `top`, `left`."""

    top: int = 0
    left: int = 0

    def _corner(self, rows, columns, rng):
        return self.top, self.left


class random_crop(_Cut):
    """Cuts a square at a uniformly random offset."""

    is_random = True

    def _corner(self, rows, columns, rng):
        return int(rng.integers(rows + 1)), int(rng.integers(columns + 1))


class random_resized_crop(_Resampled):
    """Cuts a box of random area and aspect ratio and resizes it to a square (Szegedy et al., 2015).

    As in torchvision, the relative area is uniform and the ratio log-uniform. After ten boxes that
    do not fit, the box is the largest central one with an allowed ratio. The box is cut before it
    is resized, so pixels outside of it have no influence.
    """

    size: int = 227
    area: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    is_random = True

    def shape(self, shape):
        return (self.size, self.size, *shape[2:])

    def draw(self, shape, rng):
        h, w = shape[:2]
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            target = h * w * rng.uniform(*self.area)
            aspect = math.exp(rng.uniform(low, high))
            width, height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if 0 < width <= w and 0 < height <= h:
                top, left = int(rng.integers(h - height + 1)), int(rng.integers(w - width + 1))
                return top, left, height, width
        width, height = w, h
        if w < h * self.ratio[0]:
            height = round(w / self.ratio[0])
        elif w > h * self.ratio[1]:
            width = round(h * self.ratio[1])
        return (h - height) // 2, (w - width) // 2, height, width

    def apply(self, image, rng, top, left, height, width):
        return self._scale(image[top : top + height, left : left + width], self.size, self.size)

    @property
    def least_side(self):
        # The smallest crop has sides as 3 to 4. This is the ratio of its shorter side to the
        # image's; the crop still has twice the pixels of the result.
        fraction = math.sqrt(max(self.area[0], 1e-4) * 3 / 4)
        return self._twice(math.ceil(self.size / fraction))


class random_flip(Operation):
    """Mirrors the image left to right with the given probability."""

    probability: float = 0.5
    is_random = True

    def draw(self, shape, rng):
        return (rng.random() < self.probability,)

    def apply(self, image, rng, is_mirrored):
        return resampling.mirror(image) if is_mirrored else image


class color_jitter(Operation):
    """Changes brightness, contrast, saturation and hue in random order.

    Equal to torchvision's ColorJitter for PIL images.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    is_random = True

    def draw(self, shape, rng):
        if shape[2] != 3:
            raise ValueError(f"color_jitter needs three channels, not {shape[2]}")
        amounts = (self.brightness, self.contrast, self.saturation)
        factors = [rng.uniform(max(0.0, 1 - x), 1 + x) for x in amounts]
        hue_shift = int(rng.uniform(-self.hue, self.hue) * 255) % 256
        return (*factors, hue_shift, *rng.permutation(4).tolist())

    def apply(self, image, rng, brightness, contrast, saturation, hue_shift, *order):
        picture = to_pil(image)
        enhancers = (
            (ImageEnhance.Brightness, brightness),
            (ImageEnhance.Contrast, contrast),
            (ImageEnhance.Color, saturation),
        )
        for i in order:
            if i < 3:
                enhance_fn, factor = enhancers[i]
                picture = enhance_fn(picture).enhance(factor)
            elif self.hue > 0:
                hsv = np.array(picture.convert("HSV"))
                hsv[:, :, 0] += np.uint8(hue_shift)  # hue is an angle: 255 + 1 is 0
                picture = Image.fromarray(hsv, "HSV").convert("RGB")
        return np.asarray(picture)


class random_erasing(Operation):
    """Fills a random box with one color (Zhong et al., 2020), as the graph system does.

    The aspect ratio is uniform, not log-uniform. The box is smaller than the image on both axes;
    after 100 boxes that are not, the image stays unchanged. Grayscale images use `fill[0]`.
    """

    probability: float = 0.5
    area: tuple[float, float] = (0.02, 0.4)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    fill: tuple[int, ...] = (125, 123, 114)
    is_random = True

    def draw(self, shape, rng):
        h, w = shape[:2]
        if rng.random() >= self.probability:
            return 0, 0, 0, 0
        for _ in range(100):
            target, aspect = h * w * rng.uniform(*self.area), rng.uniform(*self.ratio)
            height, width = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
            if width < w and height < h:
                top, left = int(rng.integers(h - height + 1)), int(rng.integers(w - width + 1))
                return top, left, height, width
        return 0, 0, 0, 0

    def apply(self, image, rng, top, left, height, width):
        if not height * width:
            return image
        erased = image.copy()
        erased[top : top + height, left : left + width] = self.fill[: image.shape[2]]
        return erased


class distort(Operation):
    """Rotates (degrees), shears, scales and shifts (pixels), then inverts and adds noise.

    Each of the first four is uniform up to its bounds, about the center. Pixels that the map brings
    in from outside of the image get the median color of its border (`outside='median'`) or the
    color of the nearest pixel ('nearest'). `invert` is the probability of inversion, and `noise`
    the standard deviation of the noise in gray levels.
    """

    rotation: float = 15.0
    shear: float = 0.25
    scale: tuple[float, float] = (0.75, 1.15)
    shift: float = 3.0
    invert: float = 0.5
    noise: float = 20.0
    outside: str = "median"
    is_random = True

    def __post_init__(self) -> None:
        if self.outside not in resampling.OUTSIDE:
            choices = " or ".join(map(repr, resampling.OUTSIDE))
            raise ValueError(f"`outside` must be {choices}, got {self.outside!r}")

    def draw(self, shape, rng):
        """Computes the affine map, six numbers, and whether to invert."""
        maps, is_inverted = self._maps(shape, rng.random(6)[None])
        return (*maps[0].tolist(), bool(is_inverted[0]))

    def apply(self, image, rng, *numbers):
        noise = rng.standard_normal(image.shape, np.float32)[None] if self.noise else None
        maps, is_inverted = np.array([numbers[:6]]), np.array(numbers[6:])
        return self._distorted(image[None], maps, is_inverted, noise)[0]

    def batch(self, images: np.ndarray, rngs: Iterable[Rng]) -> np.ndarray:
        """Distorts images of one size, each with its own generator.

        For small images, most of the time of an operation is the overhead of its numpy calls, which
        a batch shares. The pixels are the same.
        """
        draws = np.empty((len(images), 6))
        noise = np.empty(images.shape, np.float32) if self.noise else None
        # `rngs` may yield the same object with a new state, so each is used before the next one.
        for i, rng in enumerate(rngs):
            rng.random(out=draws[i])
            if noise is not None:
                rng.standard_normal(dtype=np.float32, out=noise[i])
        return self._distorted(images, *self._maps(images.shape[1:], draws), noise)

    def _maps(self, shape: Shape, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes affine maps `[n 6]`, and which images are inverted `[n]`."""
        h, w = shape[:2]
        low = (-self.rotation, -self.shear, self.scale[0], -self.shift, -self.shift, 0)
        high = (self.rotation, self.shear, self.scale[1], self.shift, self.shift, 1)
        angle, slant, zoom, dx, dy, coin = (low + np.subtract(high, low) * draws).T
        angle = np.radians(angle)
        cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
        a, b, c, d = cos, cos * slant - sin, sin, sin * slant + cos  # rotation times shear
        x, y = w / 2 + dx, h / 2 + dy
        maps = np.stack([a, b, w / 2 - a * x - b * y, c, d, h / 2 - c * x - d * y], axis=1)
        return maps, coin < self.invert

    def _distorted(
        self,
        images: np.ndarray,
        maps: np.ndarray,
        is_inverted: np.ndarray,
        noise: np.ndarray | None,
    ) -> np.ndarray:
        """Maps and inverts images and adds standard normal `noise`, which is overwritten."""
        warped = resampling.affine(images, maps, self.outside)
        warped[is_inverted] ^= 255
        if noise is None:
            return warped
        noise *= self.noise
        noise += warped
        return np.clip(np.rint(noise, out=noise), 0, 255, out=noise).astype(np.uint8)


__all__ = [*OPERATIONS]
