"""Normalizations that several published nets expect, as values of a config's `normalize`.

`nets` and `weights` both read them, so that `weights` need not import `nets` for a few numbers.
"""

from typing import Any

HALF: dict[str, Any] = {"name": "rgb", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP: dict[str, Any] = {
    "name": "rgb",
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
# EfficientNet-lite: (x - 127) / 128 of pixels from 0 to 255.
LITE: dict[str, Any] = {"name": "rgb", "mean": [127 / 255] * 3, "std": [128 / 255] * 3}
