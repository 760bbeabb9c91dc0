"""Color jitter and random erasing."""

import functools
import math

import numpy as np
from PIL import Image, ImageEnhance

from dmljax.data.decode import to_pil
from dmljax.data.transforms.plan import operation

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
    if image.shape[2] != 3:
        raise ValueError(f"color_jitter needs three channels, not {image.shape[2]}")
    amounts = (brightness, contrast, saturation)
    bright, contrasted, saturated = (rng.uniform(max(0.0, 1 - x), 1 + x) for x in amounts)
    hue_shift = int(rng.uniform(-hue, hue) * 255) % 256
    order = rng.permutation(4).tolist()
    return recolor(image, bright, contrasted, saturated, hue_shift, *order, changes_hue=hue > 0)


@operation(lambda shape, *_, **__: shape)
def recolor(
    image: np.ndarray,
    brightness: float,
    contrast: float,
    saturation: float,
    hue_shift: int,
    *order: int,
    changes_hue: bool,
) -> np.ndarray:
    """The image after three of Pillow's enhancers and a shift of its hue, 0 to 255, in an order."""
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
        elif changes_hue:
            hsv = np.array(picture.convert("HSV"))
            hsv[:, :, 0] += np.uint8(hue_shift)  # hue is an angle: 255 + 1 is 0
            picture = Image.fromarray(hsv, "HSV").convert("RGB")
    return np.asarray(picture)


@functools.cache
def hues() -> np.ndarray:
    """Pillow's hue, uint8 `[256]`, of colors whose hue is exactly 0 to 255: for some, one less."""
    place, rising = np.divmod(4 * np.arange(256) % 1020, 170)  # a sixth of the circle has 170
    falling, none, full = 170 - rising, 0 * rising, 0 * rising + 170
    channels = [
        (full, falling, none, none, rising, full),
        (rising, full, full, falling, none, none),
        (none, none, rising, full, full, falling),
    ]
    colors = np.stack([np.choose(place, choices) for choices in channels], axis=1)
    picture = Image.fromarray(colors[None].astype(np.uint8)).convert("HSV")
    return np.asarray(picture)[0, :, 0]


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
    return erase(image, *_erased_box(image.shape, rng, probability, area, ratio), fill=fill)


def _erased_box(
    shape: tuple[int, ...],
    rng: _Rng,
    probability: float,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[int, int, int, int]:
    """`(top, left, height, width)` of the box, which is empty if nothing is erased."""
    h, w = shape[:2]
    if rng.random() >= probability:
        return 0, 0, 0, 0
    for _ in range(100):
        target, aspect = h * w * rng.uniform(*area), rng.uniform(*ratio)
        height, width = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if width < w and height < h:
            top, left = int(rng.integers(h - height + 1)), int(rng.integers(w - width + 1))
            return top, left, height, width
    return 0, 0, 0, 0


@operation(lambda shape, *_, **__: shape)
def erase(
    image: np.ndarray, top: int, left: int, height: int, width: int, *, fill: tuple[int, ...]
) -> np.ndarray:
    """The image with a box of one color."""
    if not height * width:
        return image
    erased = image.copy()
    erased[top : top + height, left : left + width] = fill[: image.shape[2]]
    return erased
