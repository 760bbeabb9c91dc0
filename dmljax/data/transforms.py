"""Augmentation and evaluation geometry: pure functions of an image and a generator.

Every function takes `image`, `uint8 [h w c]`, and `rng`, a `numpy.random.Generator`, and returns an
image of the same kind; those of evaluation ignore `rng`. The mean and the deviation are taken off
on the device (`dmljax.data.normalization`), so that a batch crosses to it in one byte a value.

First come the pieces, then the recipes of the published systems, which a config names:
`graph_train`, `graph_eval`, `dvml_train`, ... Resizing is Pillow's antialiased bilinear filter,
as in torchvision on PIL images; `squash`, and whatever has `antialias=False`, is the plain bilinear
one of OpenCV, which is several times as fast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageEnhance

try:  # the extra `fast`, for the same pixels; not later, since the import changes the environment
    import cv2
except ImportError:
    cv2 = None

__all__ = [
    "abe_eval",
    "abe_train",
    "center_crop",
    "color_jitter",
    "distort",
    "dvml_eval",
    "dvml_train",
    "glyphs_train",
    "graph_eval",
    "graph_train",
    "pad",
    "random_crop",
    "random_erasing",
    "random_flip",
    "random_resized_crop",
    "resize",
    "small_eval",
    "small_train",
    "squash",
    "standard_eval",
    "standard_train",
    "unchanged",
]

_Rng = np.random.Generator


def _pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)


def _array(picture: Image.Image) -> np.ndarray:
    array = np.asarray(picture)
    return array[:, :, None] if array.ndim == 2 else array


def _scale(image: np.ndarray, height: int, width: int, *, antialias: bool = True) -> np.ndarray:
    if image.shape[:2] == (height, width):
        return image
    if not antialias:
        return _bilinear(image, height, width)
    return _array(_pil(image).resize((width, height), Image.Resampling.BILINEAR))


def _bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Between the two pixels nearest on each axis: OpenCV's INTER_LINEAR_EXACT, bit for bit.

    Its shares are rounded to 1/256, everything after them is exact.
    """
    if cv2 is not None:
        out = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)
        return out.reshape(height, width, image.shape[2])
    (top, bottom, down), (left, right, along) = (
        _neighbours(n, m) for n, m in zip(image.shape, (height, width), strict=False)
    )
    down, along = down[:, None, None], along.astype(np.uint32)
    # A pixel times 256 just fits into 16 bits.
    rows = image[top] * (256 - down) + image[bottom] * down
    out = np.empty((height, width, image.shape[2]), np.uint8)
    for c in range(image.shape[2]):  # channel by channel is twice as fast as all at once
        row = np.ascontiguousarray(rows[:, :, c])
        total = row.take(left, axis=1) * (256 - along) + row.take(right, axis=1) * along
        out[:, :, c] = (total + 32768) >> 16
    return out


def _neighbours(n: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of `n` pixels, the two around the centre of each of `m`, and 256 times the second's share."""
    scale = 1 / (m / n)  # rounded twice, as OpenCV's
    at = np.clip((np.arange(m) + 0.5) * scale - 0.5, 0, n - 1)
    first = np.floor(at).astype(np.intp)
    return first, np.minimum(first + 1, n - 1), np.rint((at - first) * 256).astype(np.uint16)


def _crop(image: np.ndarray, top: int, left: int, size: int) -> np.ndarray:
    return image[top : top + size, left : left + size]


def _check_crop(image: np.ndarray, size: int) -> None:
    if min(image.shape[:2]) < size:
        h, w = image.shape[:2]
        raise ValueError(f"a crop of {size} does not fit a {w}x{h} image: resize or pad it first")


def unchanged(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """The image as it is, for sets that are small and of one size."""
    return image


def resize(image: np.ndarray, rng: _Rng, *, size: int = 256, antialias: bool = True) -> np.ndarray:
    """The shorter side to `size`; the longer is rounded down, as torchvision does."""
    h, w = image.shape[:2]
    shorter = min(h, w)
    return _scale(image, int(size * h / shorter), int(size * w / shorter), antialias=antialias)


def squash(image: np.ndarray, rng: _Rng, *, size: int = 256) -> np.ndarray:
    """Both sides to `size`, the aspect ratio lost; bilinear without antialiasing, as OpenCV's."""
    return _scale(image, size, size, antialias=False)


def pad(image: np.ndarray, rng: _Rng, *, size: int = 256, fill: int = 0) -> np.ndarray:
    """The longer side to `size`, then `fill` on both ends of the other up to a square."""
    h, w = image.shape[:2]
    longer = max(h, w)
    h, w = max(1, round(h * size / longer)), max(1, round(w * size / longer))
    top, left = (size - h) // 2, (size - w) // 2
    square = np.full((size, size, image.shape[2]), fill, np.uint8)
    square[top : top + h, left : left + w] = _scale(image, h, w)
    return square


def center_crop(image: np.ndarray, rng: _Rng, *, size: int = 227) -> np.ndarray:
    """The middle; an odd remainder is rounded to even offsets, as torchvision does."""
    _check_crop(image, size)
    h, w = image.shape[:2]
    return _crop(image, round((h - size) / 2), round((w - size) / 2), size)


def random_crop(image: np.ndarray, rng: _Rng, *, size: int = 227) -> np.ndarray:
    """A square of the image's own scale, every offset equally likely."""
    _check_crop(image, size)
    h, w = image.shape[:2]
    return _crop(image, int(rng.integers(h - size + 1)), int(rng.integers(w - size + 1)), size)


def random_flip(image: np.ndarray, rng: _Rng, *, probability: float = 0.5) -> np.ndarray:
    """Left and right exchanged."""
    if rng.random() >= probability:
        return image
    if cv2 is not None:
        return cv2.flip(image, 1).reshape(image.shape)
    flipped = np.empty_like(image)
    for c in range(image.shape[2]):  # channel by channel is ten times as fast as all at once
        flipped[:, :, c] = image[:, ::-1, c]
    return flipped


def random_resized_crop(
    image: np.ndarray,
    rng: _Rng,
    *,
    size: int = 227,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    antialias: bool = True,
) -> np.ndarray:
    """A box of random area and shape, resized to a square (Szegedy et al., 2015).

    As torchvision: uniform area, log-uniform ratio, ten tries, then the largest box in the middle
    whose ratio is allowed. The box is cut before it is resized, so nothing outside bleeds in.
    """
    h, w = image.shape[:2]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        target = h * w * rng.uniform(*area)
        shape = math.exp(rng.uniform(low, high))
        width, height = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if 0 < width <= w and 0 < height <= h:
            top, left = int(rng.integers(h - height + 1)), int(rng.integers(w - width + 1))
            break
    else:
        width, height = w, h
        if w < h * ratio[0]:
            height = round(w / ratio[0])
        elif w > h * ratio[1]:
            width = round(h * ratio[1])
        top, left = (h - height) // 2, (w - width) // 2
    return _scale(image[top : top + height, left : left + width], size, size, antialias=antialias)


def color_jitter(
    image: np.ndarray,
    rng: _Rng,
    *,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
) -> np.ndarray:
    """Four changes of colour in random order, as torchvision's ColorJitter on PIL images."""
    picture = _pil(image)
    if picture.mode != "RGB":
        raise ValueError(f"color_jitter needs three channels, not {image.shape[2]}")
    enhancers = (
        (ImageEnhance.Brightness, brightness),
        (ImageEnhance.Contrast, contrast),
        (ImageEnhance.Color, saturation),
    )
    factors = [rng.uniform(max(0.0, 1 - amount), 1 + amount) for _, amount in enhancers]
    turn = rng.uniform(-hue, hue)
    for which in rng.permutation(4):
        if which < 3:
            picture = enhancers[which][0](picture).enhance(factors[which])
        elif hue:
            hsv = np.array(picture.convert("HSV"))
            hsv[:, :, 0] += np.uint8(int(turn * 255) % 256)  # a circle: 255 + 1 is 0
            picture = Image.fromarray(hsv, "HSV").convert("RGB")
    return np.asarray(picture)


def random_erasing(
    image: np.ndarray,
    rng: _Rng,
    *,
    probability: float = 0.5,
    area: tuple[float, float] = (0.02, 0.4),
    ratio: tuple[float, float] = (0.3, 1 / 0.3),
    fill: tuple[int, int, int] = (125, 123, 114),
) -> np.ndarray:
    """A box of constant colour (Zhong et al., 2020), as the graph system draws it.

    The ratio is plainly uniform, there are up to 100 tries, and the box never spans a whole side.
    """
    if rng.random() >= probability:
        return image
    h, w = image.shape[:2]
    for _ in range(100):
        target, shape = h * w * rng.uniform(*area), rng.uniform(*ratio)
        height, width = round(math.sqrt(target * shape)), round(math.sqrt(target / shape))
        if width < w and height < h:
            top, left = int(rng.integers(h - height + 1)), int(rng.integers(w - width + 1))
            erased = image.copy()
            erased[top : top + height, left : left + width] = fill[: image.shape[2]]
            return erased
    return image


def distort(
    image: np.ndarray,
    rng: _Rng,
    *,
    rotation: float = 15.0,
    shear: float = 0.25,
    scale: tuple[float, float] = (0.75, 1.15),
    shift: float = 3.0,
    invert: float = 0.5,
    noise: float = 20.0,
    outside: str = "median",
) -> np.ndarray:
    """Rotation (degrees), shear, scale and shift (pixels) about the centre, inversion, noise.

    What the affine map brings in from `outside` has the border's 'median' colour, or that of the
    'nearest' pixel. `noise` is the standard deviation in grey levels, `invert` the probability.
    """
    options = dict(rotation=rotation, shear=shear, scale=scale, shift=shift, outside=outside)
    return _distort_all(image[None], [rng], **options, invert=invert, noise=noise)[0]


def _distort_all(
    images: np.ndarray,
    rngs: Iterable[_Rng],
    *,
    rotation: float,
    shear: float,
    scale: tuple[float, float],
    shift: float,
    invert: float,
    noise: float,
    outside: str,
) -> np.ndarray:
    """`distort` of each image with its own generator, in order."""
    if outside not in ("median", "nearest"):
        raise ValueError(f"outside is 'median' or 'nearest', not {outside!r}")
    n, h, w, _ = images.shape
    draws = np.empty((n, 6))
    grain = np.empty(images.shape if noise else (n, 0), np.float32)
    for i, rng in enumerate(rngs):  # each is done with before the next is asked for
        rng.random(out=draws[i])
        if noise:
            rng.standard_normal(dtype=np.float32, out=grain[i])
    low = np.array((-rotation, -shear, scale[0], -shift, -shift, 0))
    high = np.array((rotation, shear, scale[1], shift, shift, 1))
    turn, slant, zoom, dx, dy, coin = (low + (high - low) * draws).T
    turn = np.radians(turn)
    cos, sin = np.cos(turn) / zoom, np.sin(turn) / zoom
    a, b, c, d = cos, cos * slant - sin, sin, sin * slant + cos  # rotation times shear
    x, y = w / 2 + dx, h / 2 + dy
    maps = np.stack([a, b, w / 2 - a * x - b * y, c, d, h / 2 - c * x - d * y], axis=1)
    moved = _affine(images, maps, outside)
    moved[coin < invert] ^= 255
    if not noise:
        return moved
    grain *= noise
    grain += moved
    return np.clip(np.rint(grain, out=grain), 0, 255, out=grain).astype(np.uint8)


def _affine(images: np.ndarray, maps: np.ndarray, outside: str) -> np.ndarray:
    """The pixel centred at (x, y) has the colour at (a x + b y + c, d x + e y + f), bilinearly."""
    n, h, w, channels = images.shape
    # Channel by channel; two more pixels at the far ends, so that every pixel has a next one.
    wide = np.zeros((channels, n, h + 3, w + 3), np.float32)
    if outside == "median":
        sides = [images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]]
        middle = h + w  # of 2 (h + w) in order
        border = np.partition(np.concatenate(sides, axis=1), middle, axis=1)[:, middle]
        wide[:] = border.T[:, :, None, None]
    wide[:, :, 1 : h + 1, 1 : w + 1] = np.moveaxis(images, 3, 0)
    margin = int(outside == "median")  # how far beyond the last pixel a place may be
    centers = [np.arange(side, dtype=np.float32) + 0.5 for side in (w, h)]
    maps = maps.astype(np.float32)
    out = np.empty_like(images)
    step = max(1, (1 << 15) // (h * w))  # images whose arrays stay in the cache
    for start in range(0, n, step):
        part = slice(start, start + step)
        column, right = _place(maps[part, :3], centers, w, margin)
        row, down = _place(maps[part, 3:], centers, h, margin)
        row *= w + 3
        row += column
        row += (np.arange(len(row), dtype=np.int32) * ((h + 3) * (w + 3)))[:, None, None]
        corner = row.astype(np.intp)
        for channel in range(channels):
            source = wide[channel, part].reshape(-1)
            upper = _between(source, corner, right)
            lower = _between(source[w + 3 :], corner, right)
            lower -= upper
            lower *= down
            upper += lower
            out[part, :, :, channel] = np.rint(upper, out=upper)
    return out


def _place(maps, centers, side, margin) -> tuple[np.ndarray, np.ndarray]:
    """Index before a x + b y + c, in an image with one more pixel around, and how far beyond it."""
    xs, ys = centers
    a, b, c = maps.T[:, :, None]
    at = (a * xs)[:, None] + (b * ys + (c + 0.5))[:, :, None]  # 0.5: from centre to index
    np.clip(at, 1 - margin, side + margin, out=at)
    index = np.floor(at)  # a difference of two types would be one of doubles, which is slower
    at -= index
    return index.astype(np.int32), at


def _between(source, index, share) -> np.ndarray:
    near, far = source.take(index), source[1:].take(index)
    far -= near
    far *= share
    near += far
    return near


# `pipeline` calls this once for a batch: calls of numpy are what small images cost.
distort.stacked = functools.partial(_distort_all, **distort.__kwdefaults__)


def standard_train(
    image: np.ndarray, rng: _Rng, *, size: int = 224, antialias: bool = True
) -> np.ndarray:
    """Random resized crop and flip: the usual ImageNet recipe, for own photographs."""
    return random_flip(random_resized_crop(image, rng, size=size, antialias=antialias), rng)


def standard_eval(
    image: np.ndarray, rng: _Rng, *, size: int = 224, shorter: int = 256, antialias: bool = True
) -> np.ndarray:
    """The shorter side to `shorter`, then the middle."""
    return center_crop(resize(image, rng, size=shorter, antialias=antialias), rng, size=size)


def graph_train(
    image: np.ndarray, rng: _Rng, *, size: int = 227, red_std: float = 0.229
) -> np.ndarray:
    """Graph attention over the batch, `GL_orig_RE`: resized crop, flip, erasing.

    The system erases after normalising, with CIFAR's mean colour as it stands, so the colour in
    pixels depends on the deviation used: `red_std=0.299` is the published code's slip of the pen
    (then `normalization.imagenet` must have it as well).
    """
    mean, std, value = (0.485, 0.456, 0.406), (red_std, 0.224, 0.225), (0.4914, 0.4822, 0.4465)
    fill = tuple(round(255 * (v * s + m)) for v, s, m in zip(value, std, mean, strict=True))
    return random_erasing(standard_train(image, rng, size=size), rng, fill=fill)


def graph_eval(image: np.ndarray, rng: _Rng, *, size: int = 227, shorter: int = 256) -> np.ndarray:
    """Graph attention over the batch: shorter side 256, the middle 227."""
    return standard_eval(image, rng, size=size, shorter=shorter)


def dvml_train(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """DVML (Lin et al., 2018): squashed to 256, a random 227 crop, flip."""
    return random_flip(random_crop(squash(image, rng, size=256), rng, size=227), rng)


def dvml_eval(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """DVML: squashed to 256, the middle 227 at offset 15 of 29 (not torchvision's 14)."""
    return _crop(squash(image, rng, size=256), 15, 15, 227)


def abe_train(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """ABE (Kim et al., 2018): longer side 256 and padded, a random 224 crop, flip."""
    return random_flip(random_crop(pad(image, rng, size=256), rng, size=224), rng)


def abe_eval(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """ABE: longer side 256 and padded, the middle 224."""
    return center_crop(pad(image, rng, size=256), rng, size=224)


def small_train(image: np.ndarray, rng: _Rng, *, size: int = 64) -> np.ndarray:
    """The metric-learning review on TinyImageNet: a resized crop of 0.16 to 1 of the area, flip."""
    image = resize(image, rng, size=size)
    return random_flip(random_resized_crop(image, rng, size=size, area=(0.16, 1.0)), rng)


def small_eval(image: np.ndarray, rng: _Rng, *, size: int = 64) -> np.ndarray:
    """The metric-learning review on TinyImageNet: shorter side `size`, the middle."""
    return center_crop(resize(image, rng, size=size), rng, size=size)


def glyphs_train(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """A fresh distortion on top of each glyph's own; milder, as the two add up. Never a flip."""
    return distort(image, rng, **_MILD)


_MILD = dict(rotation=10, shear=0.15, scale=(0.85, 1.15), shift=2, noise=10)
glyphs_train.stacked = functools.partial(distort.stacked, **_MILD)
