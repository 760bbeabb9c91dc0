"""Initial values of parameters: `initializer(key, shape, dtype) -> array`, as Flax takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dmljax.kernels.initial_draws import draw

__all__ = [
    "Initializer",
    "caffe_xavier",
    "fan_in_uniform",
    "glorot_uniform",
    "kaiming_normal",
    "normal",
    "truncated_normal",
    "uniform",
]

Initializer = Callable[..., jax.Array]


def normal(std: float) -> Initializer:
    """Normal with mean 0 and this standard deviation."""
    return _scaled("standard_normal", std)


def truncated_normal(std: float) -> Initializer:
    """Normal with this standard deviation before values beyond two of them are drawn again."""
    return _scaled("standard_truncated", std)


def uniform(bound: float) -> Initializer:
    """Uniform between -bound and bound."""
    return _scaled("standard_uniform", bound)


def fan_in_uniform(fan_in: int) -> Initializer:
    """Uniform within 1 / sqrt(fan_in): PyTorch's default for weights and biases."""
    return uniform(1 / math.sqrt(fan_in))


def kaiming_normal(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Normal with variance 2 / fan_out (He et al., 2015), as torchvision draws its convolutions."""
    fan_out = math.prod(shape[:-2]) * shape[-1]
    return normal(math.sqrt(2 / fan_out))(key, shape, dtype)


def glorot_uniform(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Uniform with variance 2 / (fan_in + fan_out) (Glorot & Bengio, 2010)."""
    fans = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    return uniform(math.sqrt(6 / fans))(key, shape, dtype)


def caffe_xavier(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Uniform with variance 1 / fan_in, which Caffe calls "xavier"."""
    return uniform(math.sqrt(3 / math.prod(shape[:-1])))(key, shape, dtype)


def _scaled(kind: str, scale: float) -> Initializer:
    def init(key, shape, dtype=jnp.float32):
        return scale * draw(kind, key, shape).astype(dtype)

    return init
