"""Resizing with Pillow's antialiased filters or OpenCV's plain one."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from dmljax.data.decode import to_pil
from dmljax.data.transforms.plan import operation

# The extra `fast` installs OpenCV, which is quicker and gives the same pixels. Its import changes
# the environment, so it must not happen later, while JAX computes.
try:
    import cv2
except ImportError:
    cv2 = None  # type: ignore[assignment]

# Pillow's filters are antialiased. Its bicubic one has the coefficient a = -0.5.
FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@operation(lambda shape, height, width, **_: (height, width, *shape[2:]))
def scale(
    image: np.ndarray, height: int, width: int, *, antialias: bool = True, filter: str = "bilinear"
) -> np.ndarray:
    """The image in another size. `antialias=False` is for the bilinear filter alone."""
    if filter not in FILTERS:
        raise ValueError(f"filter must be {' or '.join(map(repr, FILTERS))}, not {filter!r}")
    if not antialias and filter != "bilinear":
        raise ValueError(f"the filter {filter!r} is always antialiased: set antialias=True")
    if image.shape[:2] == (height, width):
        return image
    if not antialias:
        return _bilinear(image, height, width)
    pixels = np.asarray(to_pil(image).resize((width, height), FILTERS[filter]))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


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
    """For each of `m` outputs, the nearest two of `n` inputs and 256 times the second's weight."""
    ratio = 1 / (m / n)  # OpenCV rounds twice as well
    centers = np.clip((np.arange(m) + 0.5) * ratio - 0.5, 0, n - 1)
    first = np.floor(centers).astype(np.intp)
    second = np.minimum(first + 1, n - 1)
    return first, second, np.rint((centers - first) * 256).astype(np.uint16)


class Taps(NamedTuple):
    """From which pixels of an axis, and with which weights, each pixel of the result is made.

    Output pixel i is the sum of `weights[i, k]` times input pixel `starts[i] + k`, over
    `2 ** bits`. Weights are whole numbers, so that every device computes the same sums.
    """

    starts: np.ndarray  # int32 [target]
    weights: np.ndarray  # int32 [target taps]
    bits: int


def taps(length: int, target: int, *, antialias: bool = True, filter: str = "bilinear") -> Taps:
    """The weights by which `scale` makes `target` pixels of `length` pixels on an axis.

    Pillow's weights are rounded to 1 / 2 ** 22, those without antialiasing to 1 / 256.
    """
    if not antialias:
        first, _, second_weight = _nearest_two(length, target)
        weights = np.stack([256 - second_weight.astype(np.int32), second_weight], axis=1)
        return Taps(first.astype(np.int32), weights.astype(np.int32), 8)
    radius, kernel_fn = _KERNELS[filter]
    stretch = max(length / target, 1.0)
    centers = (np.arange(target) + 0.5) * (length / target)
    starts = np.maximum((centers - radius * stretch + 0.5).astype(np.int64), 0)
    stops = np.minimum((centers + radius * stretch + 0.5).astype(np.int64), length)
    positions = starts[:, None] + np.arange(math.ceil(radius * stretch) * 2 + 1)
    weights = kernel_fn(np.abs(positions - centers[:, None] + 0.5) * (1 / stretch))
    weights[positions >= stops[:, None]] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    integers = np.trunc(weights * 2**_BITS + np.copysign(0.5, weights)).astype(np.int32)
    count = np.flatnonzero(integers.any(axis=0))[-1] + 1  # the last columns may be zeros
    return Taps(starts.astype(np.int32), integers[:, :count], _BITS)


def columns_first(height: Any, width: Any, new_height: Any, new_width: Any) -> Any:
    """Whether Pillow changes the height of an image before its width; it rounds in between.

    Older versions never do. The arguments are numbers or arrays.
    """
    return (
        _may_begin_with_columns()
        & (new_height < height)
        & (2 * (width - new_width) < height - new_height)
    )


@functools.cache
def _may_begin_with_columns() -> bool:
    """Whether the installed Pillow gives other pixels than the width, then the height."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 30), np.uint8))
    width_first = image.resize((20, 60), FILTERS["bicubic"]).resize((20, 20), FILTERS["bicubic"])
    return image.resize((20, 20), FILTERS["bicubic"]).tobytes() != width_first.tobytes()


_BITS = 22


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((x - 5) * x + 8) * x * -0.5 + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


# The radius and the values of each filter of `FILTERS`.
_KERNELS = {"bilinear": (1.0, _triangle), "bicubic": (2.0, _cubic)}
