"""What backbones share: named stages, ranges of stages, checks, shapes of variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax.nets.layers.pooling import global_max, global_mean

__all__ = ["add_pooled", "check_maps", "named", "shapes", "stage_range"]


class _Scope(nn.Module):
    fn: Callable

    @nn.compact
    def __call__(self, x):
        return self.fn(x)


def named(name: str, fn: Callable, x: Any, *, remat: bool = False) -> Any:
    """fn(x), where modules created by `fn` get `name` as one more level of their path.

    `fn` must be a function, not a method: a method would create them in its own module. With
    `remat`, its activations are recomputed for the gradient instead of being kept.
    """
    return (nn.remat(_Scope) if remat else _Scope)(fn, name=name)(x)


def add_pooled(outputs: dict[str, Any], features: Any) -> dict[str, Any]:
    """`outputs` with the last feature map as `features`, and its mean and maximum over space."""
    pooled = {"pooled": global_mean(features), "max_pooled": global_max(features)}
    return outputs | {"features": features} | pooled


def stage_range(net: str, stages: Sequence[str], start: str, stop: str) -> tuple[str, ...]:
    """The names of the stages from `start` to `stop`, both included."""
    for name in (start, stop):
        if name not in stages:
            raise ValueError(f"{net} has no stage {name!r}. It has: {', '.join(stages)}")
    first, last = stages.index(start), stages.index(stop)
    if first > last:
        raise ValueError(f"{net} reaches stage {stop!r} before {start!r}: exchange start and stop")
    return tuple(stages[first : last + 1])


def check_maps(net: str, x: Any, channels: int | Sequence[int]) -> None:
    """Raises unless `x` is float `[b h w c]`, with one of these numbers of channels."""
    allowed = (channels,) if isinstance(channels, int) else tuple(channels)
    text = " or ".join(map(str, allowed))
    if jnp.ndim(x) != 4 or x.shape[3] not in allowed or 0 in x.shape[1:3]:
        raise ValueError(f"{net} takes [b h w c] with {text} channels, not {list(jnp.shape(x))}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{net} takes normalized images as floats, not {x.dtype}")


def shapes(net: nn.Module, image_size: int, *, channels: int = 3) -> Any:
    """Shapes and types of the variables of `net` for images of this size. Computes nothing."""
    image = jax.ShapeDtypeStruct((1, image_size, image_size, channels), jnp.float32)
    return jax.eval_shape(lambda key, x: net.init(key, x, train=False), jax.random.key(0), image)
