"""Resizing, cropping and flipping."""

import math

import numpy as np

from dmljax.data.transforms import resampling
from dmljax.data.transforms.plan import operation

_Rng = np.random.Generator


def unchanged(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """Returns the image itself, for data sets whose images are small and have one size."""
    return image


def resize(
    image: np.ndarray,
    rng: _Rng,
    *,
    size: int = 256,
    antialias: bool = True,
    filter: str = "bilinear",
) -> np.ndarray:
    """Resizes the shorter side to `size`. The longer side is rounded down, as in torchvision."""
    h, w = image.shape[:2]
    shorter = min(h, w)
    height, width = int(size * h / shorter), int(size * w / shorter)
    return resampling.scale(image, height, width, antialias=antialias, filter=filter)


def squash(
    image: np.ndarray,
    rng: _Rng,
    *,
    size: int = 256,
    antialias: bool = False,
    filter: str = "bilinear",
) -> np.ndarray:
    """Resizes both sides to `size`, whatever the aspect ratio."""
    return resampling.scale(image, size, size, antialias=antialias, filter=filter)


def pad(image: np.ndarray, rng: _Rng, *, size: int = 256, fill: int = 0) -> np.ndarray:
    """Resizes the longer side to `size`, then pads the shorter one on both ends to a square."""
    h, w = image.shape[:2]
    longer = max(h, w)
    h, w = max(1, round(h * size / longer)), max(1, round(w * size / longer))
    top, left = (size - h) // 2, (size - w) // 2
    return paste(resampling.scale(image, h, w), top, left, size=size, fill=fill)


@operation(lambda shape, top, left, *, size, fill: (size, size, *shape[2:]))
def paste(image: np.ndarray, top: int, left: int, *, size: int, fill: int) -> np.ndarray:
    """The image with its upper left corner at `top`, `left` of a square of one gray."""
    h, w = image.shape[:2]
    square = np.full((size, size, image.shape[2]), fill, np.uint8)
    square[top : top + h, left : left + w] = image
    return square


def center_crop(image: np.ndarray, rng: _Rng, *, size: int = 227) -> np.ndarray:
    """Cuts the central square. Offsets that end in .5 are rounded to even, as in torchvision."""
    h, w = image.shape[:2]
    return crop(image, round((h - size) / 2), round((w - size) / 2), size)


def random_crop(image: np.ndarray, rng: _Rng, *, size: int = 227) -> np.ndarray:
    """Cuts a square at a uniformly random offset, without resizing."""
    _check_fits(image, size)
    h, w = image.shape[:2]
    return crop(image, int(rng.integers(h - size + 1)), int(rng.integers(w - size + 1)), size)


def random_flip(image: np.ndarray, rng: _Rng, *, probability: float = 0.5) -> np.ndarray:
    """Mirrors the image left to right with the given probability."""
    return mirror(image, rng.random() < probability)


@operation(lambda shape, is_mirrored: shape)
def mirror(image: np.ndarray, is_mirrored: bool) -> np.ndarray:
    """The image, left to right if it `is_mirrored`."""
    if not is_mirrored:
        return image
    if resampling.cv2 is not None:
        return resampling.cv2.flip(image, 1).reshape(image.shape)
    flipped = np.empty_like(image)
    for c in range(image.shape[2]):  # one channel at a time is ten times as fast as all together
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
    filter: str = "bilinear",
) -> np.ndarray:
    """Cuts a box of random area and aspect ratio and resizes it to a square (Szegedy et al., 2015).

    As in torchvision, the relative area is uniform and the ratio log-uniform. After ten boxes that
    do not fit, the box is the largest central one with an allowed ratio. The box is cut before it
    is resized, so pixels outside of it have no influence.
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
    box = image[top : top + height, left : left + width]
    return resampling.scale(box, size, size, antialias=antialias, filter=filter)


def crop(image: np.ndarray, top: int, left: int, size: int) -> np.ndarray:
    """The square of side `size` whose upper left corner is at `top`, `left`."""
    _check_fits(image, size)
    return image[top : top + size, left : left + size]


def _check_fits(image: np.ndarray, size: int) -> None:
    if min(image.shape[:2]) < size:
        h, w = image.shape[:2]
        raise ValueError(f"a crop of {size} does not fit a {w}x{h} image: resize or pad it first")
