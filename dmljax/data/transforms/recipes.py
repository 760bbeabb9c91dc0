"""Transforms for training and for evaluation, as published systems compose them."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from dmljax.data.transforms.colors import color_jitter, random_erasing
from dmljax.data.transforms.distortion import distort, distort_batch
from dmljax.data.transforms.geometry import (
    center_crop,
    crop,
    pad,
    random_crop,
    random_flip,
    random_resized_crop,
    resize,
    squash,
)

_Rng = np.random.Generator
# Milder than the distortion that each glyph already has, since both add up.
_GLYPHS_DISTORTION: dict[str, Any] = dict(
    rotation=10,
    shear=0.15,
    scale=(0.85, 1.15),
    shift=2,
    noise=10,
)


def standard_train(
    image: np.ndarray,
    rng: _Rng,
    *,
    size: int = 224,
    shorter: int | None = None,
    area: tuple[float, float] = (0.08, 1.0),
    flip: float = 0.5,
    color: float = 0.0,
    antialias: bool = True,
    filter: str = "bilinear",
    scaled_decode: bool = False,
) -> np.ndarray:
    """Random resized crop and flip, as usual for ImageNet. The default for photographs.

    `area`: the least and the largest share of the image that the crop takes. `flip`: how probable a
    mirror image is. `color`: by which share brightness, contrast and saturation may change, and the
    hue by a quarter of it. `shorter` first resizes the shorter side, as the code of the
    multi-similarity loss does. `scaled_decode` is for readers: they may decode large JPEGs at a
    fraction of their size (`SHORTER_SIDES`).
    """
    for name, value in {"flip": flip, "color": color}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"standard_train: {name}={value} must be between 0 and 1")
    if shorter is not None:
        image = resize(image, rng, size=shorter, antialias=antialias, filter=filter)
    image = random_resized_crop(
        image, rng, size=size, area=area, antialias=antialias, filter=filter
    )
    image = random_flip(image, rng, probability=flip)
    if not color:
        return image
    shares = dict.fromkeys(("brightness", "contrast", "saturation"), color)
    return color_jitter(image, rng, **shares, hue=color / 4)


def shorter_of(size: int) -> int:
    """The shorter side from which a square of side `size` is cut, unless a config sets `shorter`.

    It is 256 / 224 times `size`, rounded to the nearest multiple of 8: 256 for crops of 224 and of
    227, 128 for 112, 72 for 64.

    >>> [shorter_of(size) for size in (64, 112, 224, 227, 288)]
    [72, 128, 256, 256, 328]
    """
    return max(size, 8 * round(size / 7))


def standard_eval(
    image: np.ndarray,
    rng: _Rng,
    *,
    size: int = 224,
    shorter: int | None = None,
    antialias: bool = True,
    filter: str = "bilinear",
    scaled_decode: bool = False,
) -> np.ndarray:
    """Resizes the shorter side to `shorter`, then cuts the central square of side `size`.

    By default, `shorter` is `shorter_of(size)`, so that the crop shows seven eighths of a side.
    `scaled_decode` is as in `standard_train`.
    """
    if shorter is None:
        shorter = shorter_of(size)
    image = resize(image, rng, size=shorter, antialias=antialias, filter=filter)
    return center_crop(image, rng, size=size)


def squash_eval(
    image: np.ndarray,
    rng: _Rng,
    *,
    size: int = 224,
    filter: str = "bilinear",
    scaled_decode: bool = False,
) -> np.ndarray:
    """Resizes both sides to `size`, whatever the aspect ratio, as SigLIP and DINOv3 do.

    `scaled_decode` is as in `standard_train`.
    """
    return squash(image, rng, size=size, antialias=True, filter=filter)


def graph_train(
    image: np.ndarray, rng: _Rng, *, size: int = 227, red_std: float = 0.229
) -> np.ndarray:
    """Graph attention over the batch (`GL_orig_RE`): random resized crop, flip, erasing.

    The published code erases after normalization, with the mean color of CIFAR in normalized
    units. So the color in pixels depends on the standard deviations. `red_std=0.299` is a typing
    error of the published code; give the same value to `preprocessing.imagenet`.
    """
    mean, std, cifar_mean = (0.485, 0.456, 0.406), (red_std, 0.224, 0.225), (0.4914, 0.4822, 0.4465)
    fill = tuple(round(255 * (v * s + m)) for v, s, m in zip(cifar_mean, std, mean, strict=True))
    return random_erasing(standard_train(image, rng, size=size), rng, fill=fill)


def graph_eval(
    image: np.ndarray, rng: _Rng, *, size: int = 227, shorter: int | None = None
) -> np.ndarray:
    """Graph attention over the batch: shorter side 256, central crop of 227."""
    return standard_eval(image, rng, size=size, shorter=shorter)


def dvml_train(image: np.ndarray, rng: _Rng, *, size: int = 227) -> np.ndarray:
    """DVML (Lin et al., 2018): squashed to 256, random crop of 227, flip."""
    return random_flip(random_crop(squash(image, rng, size=shorter_of(size)), rng, size=size), rng)


def dvml_eval(image: np.ndarray, rng: _Rng, *, size: int = 227) -> np.ndarray:
    """DVML: squashed to 256, central crop of 227 at offset 15 (torchvision would use 14)."""
    side = shorter_of(size)
    offset = (side - size + 1) // 2
    return crop(squash(image, rng, size=side), offset, offset, size)


def abe_train(image: np.ndarray, rng: _Rng, *, size: int = 224) -> np.ndarray:
    """ABE (Kim et al., 2018): longer side 256, padded to a square, random crop of 224, flip."""
    return random_flip(random_crop(pad(image, rng, size=shorter_of(size)), rng, size=size), rng)


def abe_eval(image: np.ndarray, rng: _Rng, *, size: int = 224) -> np.ndarray:
    """ABE: longer side 256, padded to a square, central crop of 224."""
    return center_crop(pad(image, rng, size=shorter_of(size)), rng, size=size)


def small_train(image: np.ndarray, rng: _Rng, *, size: int = 64) -> np.ndarray:
    """The metric-learning review on TinyImageNet: random resized crop of area 0.16 to 1, flip."""
    image = resize(image, rng, size=size)
    return random_flip(random_resized_crop(image, rng, size=size, area=(0.16, 1.0)), rng)


def small_eval(image: np.ndarray, rng: _Rng, *, size: int = 64) -> np.ndarray:
    """The metric-learning review on TinyImageNet: shorter side `size`, central crop."""
    return center_crop(resize(image, rng, size=size), rng, size=size)


def glyphs_train(image: np.ndarray, rng: _Rng) -> np.ndarray:
    """A mild random distortion, different at every step. Never a flip, which changes characters."""
    return distort(image, rng, **_GLYPHS_DISTORTION)


def glyphs_train_batch(images: np.ndarray, rngs: Iterable[_Rng]) -> np.ndarray:
    """`glyphs_train` of each image with its own generator."""
    return distort_batch(images, rngs, **_GLYPHS_DISTORTION)


def _shorter_side_of_train(*, size, shorter, area, **_) -> int:
    if shorter is not None:
        return shorter
    # The smallest crop has sides as 3 to 4. This is the ratio of its shorter side to the image's.
    share = math.sqrt(max(area[0], 1e-4) * 3 / 4)
    return math.ceil(size / share)


def _shorter_side_of_eval(*, size, shorter, **_) -> int:
    return shorter_of(size) if shorter is None else shorter


# Of transforms with the argument `scaled_decode`: the shorter side to which they resize the whole
# image. For `standard_train` it is the side whose smallest crop has `size` pixels.
SHORTER_SIDES: Mapping[Callable[..., np.ndarray], Callable[..., int]] = {
    squash_eval: lambda *, size, **_: size,
    standard_eval: _shorter_side_of_eval,
    standard_train: _shorter_side_of_train,
}
