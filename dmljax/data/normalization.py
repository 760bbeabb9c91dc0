"""Mean and deviation of the published nets, for the device: `uint8 [b h w c]` to float32.

Plain arithmetic on whatever array comes in, numpy or JAX; call it inside the compiled step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["caffe", "caffe_bn", "imagenet", "unit"]


def _constant(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(1, 1, 1, -1)


def imagenet(images: Any, *, red_std: float = 0.229) -> Any:
    """Torchvision's constants. `red_std=0.299` is the graph system's slip of the pen."""
    mean, std = _constant(0.485, 0.456, 0.406), _constant(red_std, 0.224, 0.225)
    return (images.astype(np.float32) / np.float32(255) - mean) / std


def caffe(images: Any, *, red: float = 123.0) -> Any:
    """BGR minus (104, 117, red), range 0..255: Caffe's GoogLeNet, used by DVML and ABE.

    BN-Inception's weights want `red=128`.
    """
    return images[..., ::-1].astype(np.float32) - _constant(104, 117, red)


def caffe_bn(images: Any) -> Any:
    """The same with 128 for red: the published weights of BN-Inception."""
    return images[..., ::-1].astype(np.float32) - _constant(104, 117, 128)


def unit(images: Any) -> Any:
    """To 0..1."""
    return images.astype(np.float32) / np.float32(255)
