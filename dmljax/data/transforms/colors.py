"""Color jitter and random erasing."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageEnhance

from dmljax.data.transforms import resampling

__all__ = ["color_jitter", "random_erasing"]

_Rng = np.random.Generator


def color_jitter(
    image: np.ndarray,
    rng: _Rng,
    *,
    brightness: float = 0.4,
    contrast: float = 0.4,
    saturation: float = 0.4,
    hue: float = 0.1,
) -> np.ndarray:
    """Changes brightness, contrast, saturation and hue in random order.

    Equal to torchvision's ColorJitter for PIL images.
    """
    picture = resampling.to_pil(image)
    if picture.mode != "RGB":
        raise ValueError(f"color_jitter needs three channels, not {image.shape[2]}")
    enhancers = (
        (ImageEnhance.Brightness, brightness),
        (ImageEnhance.Contrast, contrast),
        (ImageEnhance.Color, saturation),
    )
    factors = [rng.uniform(max(0.0, 1 - amount), 1 + amount) for _, amount in enhancers]
    hue_shift = rng.uniform(-hue, hue)
    for i in rng.permutation(4):
        if i < 3:
            picture = enhancers[i][0](picture).enhance(factors[i])
        elif hue:
            hsv = np.array(picture.convert("HSV"))
            hsv[:, :, 0] += np.uint8(int(hue_shift * 255) % 256)  # hue is an angle: 255 + 1 is 0
            picture = Image.fromarray(hsv, "HSV").convert("RGB")
    return np.asarray(picture)


def random_erasing(
    image: np.ndarray,
    rng: _Rng,
    *,
    probability: float = 0.5,
    area: tuple[float, float] = (0.02, 0.4),
    ratio: tuple[float, float] = (0.3, 1 / 0.3),
    fill: tuple[int, ...] = (125, 123, 114),
) -> np.ndarray:
    """Fills a random box with one color (Zhong et al., 2020), as the graph system does.

    The aspect ratio is uniform, not log-uniform. The box is smaller than the image on both axes;
    after 100 boxes that are not, the image stays unchanged. Grayscale images use `fill[0]`.
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
