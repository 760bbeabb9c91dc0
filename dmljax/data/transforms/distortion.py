"""Distortion of small images: an affine map, inversion and noise; `data/glyphs.py` and, for
training, `glyphs_train` of `recipes.py` call it with numbers of their own.
"""

from collections.abc import Iterable

import numpy as np

from dmljax.data.transforms.plan import operation

_Rng = np.random.Generator


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
    """Rotation (degrees), shear, scale and shift (pixels) about the center, inversion, noise.

    Each of the first four is uniform up to its bounds. Pixels that the map brings in from outside
    of the image get the median color of its border (`outside='median'`) or the color of the nearest
    pixel ('nearest'). `invert` is the probability of inversion, and `noise` the standard deviation
    of the noise in gray levels.
    """
    maps, is_inverted, grain = _draws(
        (1, *image.shape), [rng], rotation, shear, scale, shift, invert, noise
    )
    a, b, c, d, e, f = maps[0].tolist()
    arrays = [] if grain is None else [grain[0]]
    return warp(image, a, b, c, d, e, f, bool(is_inverted[0]), *arrays, outside=outside)


@operation(lambda shape, *_, **__: shape)
def warp(
    image: np.ndarray,
    a: float,
    b: float,
    c: float,
    d: float,
    e: float,
    f: float,
    is_inverted: bool,
    grain: np.ndarray | None = None,
    *,
    outside: str,
) -> np.ndarray:
    """The image under an affine map (`affine`), then perhaps inverted, then with noise."""
    maps = np.array([[a, b, c, d, e, f]])
    return _warped(
        image[None], maps, np.array([is_inverted]), None if grain is None else grain[None], outside
    )[0]


def distort_batch(
    images: np.ndarray,
    rngs: Iterable[_Rng],
    *,
    rotation: float = 15.0,
    shear: float = 0.25,
    scale: tuple[float, float] = (0.75, 1.15),
    shift: float = 3.0,
    invert: float = 0.5,
    noise: float = 20.0,
    outside: str = "median",
) -> np.ndarray:
    """`distort` of each image with its own generator."""
    draws = _draws(images.shape, rngs, rotation, shear, scale, shift, invert, noise)
    return _warped(images, *draws, outside)


def _draws(
    shape: tuple[int, ...],
    rngs: Iterable[_Rng],
    rotation: float,
    shear: float,
    scale: tuple[float, float],
    shift: float,
    invert: float,
    noise: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Affine maps `[n 6]`, which images are inverted `[n]`, and the noise `[n h w c]`, if any."""
    n, h, w, _ = shape
    draws = np.empty((n, 6))
    grain = np.empty(shape if noise else (n, 0), np.float32)
    # `rngs` may yield the same object with a new state, so each is used before the next one.
    for i, rng in enumerate(rngs):
        rng.random(out=draws[i])
        if noise:
            rng.standard_normal(dtype=np.float32, out=grain[i])
    low = np.array((-rotation, -shear, scale[0], -shift, -shift, 0))
    high = np.array((rotation, shear, scale[1], shift, shift, 1))
    angle, slant, zoom, dx, dy, coin = (low + (high - low) * draws).T
    angle = np.radians(angle)
    cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
    a, b, c, d = cos, cos * slant - sin, sin, sin * slant + cos  # rotation times shear
    x, y = w / 2 + dx, h / 2 + dy
    maps = np.stack([a, b, w / 2 - a * x - b * y, c, d, h / 2 - c * x - d * y], axis=1)
    if not noise:
        return maps, coin < invert, None
    grain *= noise
    return maps, coin < invert, grain


def _warped(
    images: np.ndarray,
    maps: np.ndarray,
    is_inverted: np.ndarray,
    grain: np.ndarray | None,
    outside: str,
) -> np.ndarray:
    """The images under maps, inverted, and with `grain`, which is overwritten."""
    if outside not in ("median", "nearest"):
        raise ValueError(f"outside must be 'median' or 'nearest', not {outside!r}")
    warped = affine(images, maps, outside)
    warped[is_inverted] ^= 255
    if grain is None:
        return warped
    grain += warped
    return np.clip(np.rint(grain, out=grain), 0, 255, out=grain).astype(np.uint8)


def affine(images: np.ndarray, maps: np.ndarray, outside: str) -> np.ndarray:
    """The images under affine maps `(a, b, c, d, e, f)`, `[n 6]`, bilinear.

    The pixel centered at (x, y) gets the color at (a x + b y + c, d x + e y + f).
    """
    n, h, w, channels = images.shape
    # One channel at a time. The margin of one pixel before and two behind gives every position
    # that `_locate` returns two pixels on each axis.
    padded = np.zeros((channels, n, h + 3, w + 3), np.float32)
    if outside == "median":
        sides = [images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]]
        middle = h + w  # the sides have 2 (h + w) pixels
        border = np.partition(np.concatenate(sides, axis=1), middle, axis=1)[:, middle]
        padded[:] = border.T[:, :, None, None]
    padded[:, :, 1 : h + 1, 1 : w + 1] = np.moveaxis(images, 3, 0)
    margin = int(outside == "median")  # how far beyond the last pixel a position may be
    centers = [np.arange(side, dtype=np.float32) + 0.5 for side in (w, h)]
    maps = maps.astype(np.float32)
    out = np.empty_like(images)
    chunk = max(1, (1 << 15) // (h * w))  # the number of images whose arrays fit into the CPU cache
    for start in range(0, n, chunk):
        rows = slice(start, start + chunk)
        column, right = _locate(maps[rows, :3], centers, w, margin)
        row, down = _locate(maps[rows, 3:], centers, h, margin)
        row *= w + 3
        row += column
        row += (np.arange(len(row), dtype=np.int32) * ((h + 3) * (w + 3)))[:, None, None]
        corner = row.astype(np.intp)
        for channel in range(channels):
            source = padded[channel, rows].reshape(-1)
            upper = _interpolate(source, corner, right)
            lower = _interpolate(source[w + 3 :], corner, right)
            lower -= upper
            lower *= down
            upper += lower
            out[rows, :, :, channel] = np.rint(upper, out=upper)
    return out


def _locate(
    maps: np.ndarray, centers: list[np.ndarray], side: int, margin: int
) -> tuple[np.ndarray, np.ndarray]:
    """The index before the position a x + b y + c in the padded image, and the distance to it."""
    xs, ys = centers
    a, b, c = maps.T[:, :, None]
    position = (a * xs)[:, None] + (b * ys + (c + 0.5))[
        :, :, None
    ]  # index = position - 0.5 + margin of 1
    np.clip(position, 1 - margin, side + margin, out=position)
    index = np.floor(position)  # stays float32: subtracting integers would compute in float64
    position -= index
    return index.astype(np.int32), position


def _interpolate(source: np.ndarray, index: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Between `source[index]` and the value after it."""
    first, second = source.take(index), source[1:].take(index)
    second -= first
    second *= weight
    first += second
    return first
