"""Resizes images, and maps them by affine maps: the pixels of an image at other positions."""

import numpy as np
from PIL import Image

from dmljax.data.decode import to_pil

# The extra `fast` installs OpenCV, which is quicker and gives the same pixels. Its import changes
# the environment, so it must not happen later, while JAX computes.
try:
    import cv2
except ImportError:
    cv2 = None  # type: ignore[assignment]

# Pillow's filters are antialiased. Its bicubic one has the coefficient a = -0.5.
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
OUTSIDE = ("median", "nearest")


def scale(
    image: np.ndarray, height: int, width: int, *, antialias: bool = True, filter: str = "bilinear"
) -> np.ndarray:
    """Resizes an image. `antialias=False` requires the bilinear filter."""
    if image.shape[:2] == (height, width):
        return image
    if not antialias:
        return _bilinear(image, height, width)
    pixels = np.asarray(to_pil(image).resize((width, height), FILTERS[filter]))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def mirror(image: np.ndarray) -> np.ndarray:
    """Flips an image left to right."""
    if cv2 is not None:
        return cv2.flip(image, 1).reshape(image.shape)
    flipped = np.empty_like(image)
    for c in range(image.shape[2]):  # one channel at a time is ten times as fast as all together
        flipped[:, :, c] = image[:, ::-1, c]
    return flipped


def _bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Interpolates between the two nearest pixels on each axis, without antialiasing.

    Bitwise equal to OpenCV's INTER_LINEAR_EXACT: weights are rounded to 1/256, all other
    arithmetic is exact.
    """
    if cv2 is not None:
        out = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR_EXACT)
        return out.reshape(height, width, image.shape[2])
    top, bottom, row_weights = _nearest_two(image.shape[0], height)
    left, right, column_weights = _nearest_two(image.shape[1], width)
    row_weights, column_weights = row_weights[:, None, None], column_weights.astype(np.uint32)
    # uint16 is enough: a pixel times 256 is below 2 ** 16.
    rows = image[top] * (256 - row_weights) + image[bottom] * row_weights
    out = np.empty((height, width, image.shape[2]), np.uint8)
    for c in range(image.shape[2]):  # one channel at a time is twice as fast as all together
        row = np.ascontiguousarray(rows[:, :, c])
        total = row.take(left, axis=1) * (256 - column_weights)
        total = total + row.take(right, axis=1) * column_weights
        out[:, :, c] = (total + 32768) >> 16
    return out


def _nearest_two(n: int, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each of `m` outputs, the nearest two of `n` inputs and the second's weight.

    The weight is a multiple of 1/256, returned as an integer.
    """
    ratio = 1 / (m / n)  # OpenCV rounds twice as well
    centers = np.clip((np.arange(m) + 0.5) * ratio - 0.5, 0, n - 1)
    first = np.floor(centers).astype(np.intp)
    second = np.minimum(first + 1, n - 1)
    return first, second, np.rint((centers - first) * 256).astype(np.uint16)


def affine(images: np.ndarray, maps: np.ndarray, outside: str) -> np.ndarray:
    """Applies affine maps `(a, b, c, d, e, f)`, `[n 6]`, to the images, with bilinear weights.

    The pixel centered at (x, y) gets the color at (a x + b y + c, d x + e y + f). Outside of the
    image, colors are the median of its border (`outside='median'`) or of the nearest pixel.
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
    """Returns the index before the position a x + b y + c in the padded image, and the distance."""
    xs, ys = centers
    a, b, c = maps.T[:, :, None]
    along_y = b * ys + (c + 0.5)  # index = position - 0.5 + margin of 1
    position = (a * xs)[:, None] + along_y[:, :, None]
    np.clip(position, 1 - margin, side + margin, out=position)
    index = np.floor(position)  # stays float32: subtracting integers would compute in float64
    position -= index
    return index.astype(np.int32), position


def _interpolate(source: np.ndarray, index: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Interpolates between `source[index]` and the value after it."""
    first, second = source.take(index), source[1:].take(index)
    second -= first
    second *= weight
    first += second
    return first
