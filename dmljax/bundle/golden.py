"""Examples that a bundle carries, so that every machine can check its pixels and its numbers.

They are drawn, not taken from the data set: a bundle can be given away where its images cannot.
"""

import numpy as np
from PIL import Image

from dmljax.bundle.images import prepare
from dmljax.bundle.preprocessing import Preprocessing
from dmljax.data.decode import file_bytes

_ORIENTATION = 0x0112


def encoded(preprocess: Preprocessing) -> list[bytes]:
    """Four encoded images, larger than the input: PNG, JPEG, JPEG with EXIF rotation, gray PNG.

    If large JPEGs are decoded at a fraction of their size, the one with EXIF rotation is large.
    """
    shape = preprocess.shape
    side = max(shape[:2])
    if side <= 64:  # a small net's own images are encoded without loss, and have its size
        sizes = [(shape[0], shape[1])] * 4
    else:
        sizes = [(side * 5 // 4, side * 3 // 2), (side * 4 // 3, side * 5 // 4)]
        sizes += [(side * 5 // 4, side * 8 // 5), (side * 3 // 2, side * 4 // 3)]
    if preprocess.least_side is not None:
        sizes[2] = (preprocess.least_side * 2, preprocess.least_side * 5 // 2)
    pictures = [Image.fromarray(_pattern(h, w, seed)) for seed, (h, w) in enumerate(sizes)]
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    return [
        file_bytes(pictures[0], "PNG"),
        file_bytes(pictures[1], "JPEG", quality=90),
        file_bytes(pictures[2], "JPEG", quality=90, exif=exif),
        file_bytes(pictures[3].convert("L"), "PNG"),
    ]


def _pattern(h: int, w: int, seed: int) -> np.ndarray:
    """Colored waves and edges: smooth enough for a small file, with detail that resizing shows."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:h, 0:w] / max(h, w)
    waves = [np.sin(2 * np.pi * (a * x + b * y + c)) for a, b, c in rng.uniform(1, 9, (3, 3))]
    image = 127.5 + 90 * np.stack(waves, axis=-1)
    top, left = int(h * rng.uniform(0.2, 0.4)), int(w * rng.uniform(0.2, 0.4))
    image[top : top + h // 3, left : left + w // 4] = rng.uniform(0, 255, 3)
    return np.clip(image, 0, 255).astype(np.uint8)


def inputs(encoded_images: list[bytes], preprocess: Preprocessing) -> np.ndarray:
    """The inputs of the program: of the encoded images, then one all black and one all white."""
    prepared = [prepare(image, preprocess) for image in encoded_images]
    plain = [np.full(preprocess.shape, value, np.uint8) for value in (0, 255)]
    return np.stack(prepared + plain)
