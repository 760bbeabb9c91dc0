"""Optimizers and groups of parameters, as optax transforms.

A group is `dict(path=regex, factor=1.0, decay=None, frozen=False)`. For each parameter, the first
group whose `path` is found in the parameter's path, such as 'net/layer4/0/conv1/kernel', sets its
learning-rate factor, its weight decay, and whether it is frozen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmljax.train.devices import path_of
from dmljax.train.schedules import Schedule

__all__ = ["adam", "averaged", "build", "radam", "sgd"]


# Directions, which the learning rate then scales.


def sgd(*, momentum: float = 0.9, nesterov: bool = False) -> optax.GradientTransformation:
    """The gradient, or its running sum."""
    return optax.trace(momentum, nesterov) if momentum else optax.identity()


def adam(*, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam (Kingma & Ba, 2015). `decay` of `build` is decoupled from it: this is AdamW too."""
    return optax.scale_by_adam(b1, b2, eps)


def radam(*, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """RAdam (Liu et al., 2020) as its authors' code computes it: plain momentum while rho < 5.

    `eps` is added to the root before bias correction. `optax.radam` adds it after, and computes
    rho in a way that cancels in float32: its first rectified updates are off by a percent.
    """
    infinite = 2 / (1 - b2) - 1

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return optax.ScaleByAdamState(
            jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros)
        )

    def update(gradients, state, params=None):
        del params
        count = state.count + 1
        t = count.astype(jnp.float32)
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradients)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, gradients)
        correction1, correction2 = -jnp.expm1(t * np.log(b1)), -jnp.expm1(t * np.log(b2))  # 1 - b^t
        rho = infinite - 2 * t * (1 - correction2) / correction2
        inside = (rho - 4) * (rho - 2) * infinite / ((infinite - 4) * (infinite - 2) * rho)
        rectified = jnp.sqrt(jnp.maximum(inside, 0)) * jnp.sqrt(correction2) / correction1

        def direction(m, v):
            return jnp.where(rho >= 5, rectified * m / (jnp.sqrt(v) + eps), m / correction1)

        return jax.tree.map(direction, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def build(
    direction: optax.GradientTransformation,
    *,
    rate: float,
    schedule: Schedule,
    decay: float = 0.0,
    clip: float | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    accumulate: int = 1,
    average: float = 0.0,
) -> optax.GradientTransformation:
    """The optimizer: clipping, direction, decoupled weight decay, learning rate by step and group.

    * `decay` applies to matrices and kernels. Vectors (biases, norms) decay only if a group asks.
    * `clip` bounds the global norm of the gradient.
    * `accumulate` updates once in this many steps, by the mean of their gradients. The schedule
      still counts steps.
    * `average` keeps an exponential moving average of the parameters, updated once per update;
      `averaged` returns it.
    """
    for name, value, fits, range_ in (
        ("rate", rate, rate >= 0, "0 or more"),
        ("decay", decay, decay >= 0, "0 or more"),
        ("clip", clip, clip is None or clip > 0, "above 0, or None"),
        ("accumulate", accumulate, accumulate >= 1, "1 or more"),
        ("average", average, 0 <= average < 1, "at least 0 and below 1"),
    ):
        if not fits:
            raise ValueError(f"optimizer: {name} must be {range_}, not {value}")
    rules = [_rule(group) for group in groups]

    def per_leaf(fn):
        def map_tree(tree):
            return jax.tree_util.tree_map_with_path(lambda p, x: fn(_match(rules, p), x), tree)

        return map_tree

    frozen = per_leaf(lambda rule, x: rule["frozen"])
    chain = [] if clip is None else [optax.clip_by_global_norm(clip)]
    chain += [direction, _decay(per_leaf, decay), _scale(per_leaf, rate, schedule, accumulate)]
    transform = optax.chain(*chain)
    if any(rule["frozen"] for rule in rules):
        labels = lambda tree: jax.tree.map(lambda f: "frozen" if f else "trained", frozen(tree))  # noqa: E731
        transform = optax.multi_transform(
            {"trained": transform, "frozen": optax.set_to_zero()}, labels
        )
    if average:
        transform = optax.chain(transform, _keep_average(average))
    if accumulate > 1:
        transform = optax.MultiSteps(transform, accumulate).gradient_transformation()
    return transform


def _rule(group: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"path": None, **_NO_GROUP}
    if unknown := set(group) - set(defaults):
        raise ValueError(f"a group has {', '.join(defaults)}, not {', '.join(sorted(unknown))}")
    rule = {**defaults, **group}
    if rule["path"] is None:
        raise ValueError(f"the group {dict(group)} has no path: write dict(path='^head/', ...)")
    try:
        return {**rule, "path": re.compile(rule["path"])}
    except re.error as error:
        raise ValueError(
            f"the group's path {rule['path']!r} is no regular expression: {error}"
        ) from error


_NO_GROUP = {"factor": 1.0, "decay": None, "frozen": False}


def _match(rules, keys) -> Mapping[str, Any]:
    path = path_of(keys)
    return next((rule for rule in rules if rule["path"].search(path)), _NO_GROUP)


def _decay(per_leaf, decay: float) -> optax.GradientTransformation:
    """`optax.add_decayed_weights` with an amount for each parameter instead of one for all."""
    amounts = per_leaf(
        lambda rule, x: (decay if x.ndim > 1 else 0.0) if rule["decay"] is None else rule["decay"]
    )

    def update(updates, state, params=None):
        decayed = jax.tree.map(
            lambda u, p, d: u + d * p if d else u, updates, params, amounts(params)
        )
        return decayed, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale(
    per_leaf, rate: float, schedule: Schedule, accumulate: int
) -> optax.GradientTransformation:
    """As `optax.scale_by_learning_rate`, with a factor for each parameter; counts steps."""
    factors = per_leaf(lambda rule, x: rule["factor"])

    def update(updates, state, params=None):
        size = rate * schedule((state.count + 1) * accumulate - 1)
        scaled = jax.tree.map(
            lambda u, f: (-size * f * u).astype(u.dtype), updates, factors(params)
        )
        return scaled, optax.ScaleByScheduleState(state.count + 1)

    init = lambda params: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))  # noqa: E731
    return optax.GradientTransformation(init, update)


class _Average(NamedTuple):
    average: Any


def _keep_average(share: float) -> optax.GradientTransformation:
    """Averages the parameters; `optax.ema` averages updates."""

    def update(updates, state, params=None):
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: share * a + (1 - share) * p, state.average, new)
        return updates, _Average(average)

    return optax.GradientTransformation(lambda p: _Average(jax.tree.map(jnp.copy, p)), update)


def averaged(params: Any, opt_state: Any) -> Any:
    """The averaged parameters if the optimizer keeps them, else `params`."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda state: isinstance(state, _Average))
    return next((state.average for state in states if isinstance(state, _Average)), params)
