"""Optimizers and groups of parameters, as optax transforms.

A group is `{"path": regex, "factor": 1.0, "decay": None, "l2": None, "frozen": False, "from": 0}`.
For each parameter, the first group whose `path` is found in the parameter's path, such as
'net/layer4/0/conv1/kernel', sets its learning-rate factor, its weight decay, whether it is frozen,
and the step from which on it learns.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmljax import adapt
from dmljax.adapt.depth import is_spared_from_decay
from dmljax.adapt.trees import path_of, paths_of, paths_under
from dmljax.train.schedules import Schedule

# Directions, which the learning rate then scales.


def sgd(*, momentum: float = 0.9, nesterov: bool = False) -> optax.GradientTransformation:
    """Follows the gradient, or its running sum."""
    return optax.trace(momentum, nesterov) if momentum else optax.identity()


def adam(*, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Computes Adam (Kingma & Ba, 2015): AdamW with `decay` of `build`, PyTorch's with `l2`."""
    return optax.scale_by_adam(b1, b2, eps)


def radam(*, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> optax.GradientTransformation:
    """Computes RAdam (Liu et al., 2020) as its authors' code: plain momentum while rho < 5.

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


def rmsprop(
    *, alpha: float = 0.99, momentum: float = 0.9, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Computes RMSprop (Tieleman & Hinton, 2012) as PyTorch: g / (sqrt(v) + eps), then momentum.

    `alpha` is the fraction of v that remains at each step. `optax.rmsprop` adds `eps` inside the
    root, and applies the momentum to steps that the learning rate has already scaled.
    """

    scaled = optax.scale_by_rms(alpha, eps, eps_in_sqrt=False)
    return optax.chain(scaled, optax.trace(momentum)) if momentum else scaled


def build(
    direction: optax.GradientTransformation,
    *,
    rate: float,
    schedule: Schedule,
    decay: float = 0.0,
    l2: float = 0.0,
    clip: float | None = None,
    clip_value: float | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    accumulate: int = 1,
    average: float = 0.0,
    layer_decay: float = 1.0,
    backbone: Sequence[str] = ("net",),
) -> optax.GradientTransformation:
    """Builds the optimizer: clipping, direction, weight decay, learning rate by step and group.

    * `decay` is decoupled from the direction, as in AdamW: a step also takes rate x decay of a
      parameter away. It applies to matrices and kernels. Vectors (biases, norms, LayerScale),
      tokens and learned positions decay only if a group asks.
    * `l2` is coupled: it adds l2 x parameter to the gradient, after clipping and before the
      direction, as `weight_decay` of PyTorch's SGD, Adam and RMSprop and Caffe's weight decay do.
      It applies to every parameter, vectors too, unless a group says otherwise.
    * `clip` bounds the global norm of the gradient, `clip_value` the size of each of its numbers.
    * `groups`: see the docstring of this module. A group with `from` keeps its parameters, and what
      the direction remembers of them, unchanged until that step, counted from 0.
    * `accumulate` updates once in this many steps, by the mean of their gradients. The schedule
      still counts steps.
    * `average` keeps an exponential moving average of the parameters, updated once per update;
      `averaged` returns it.
    * `layer_decay` multiplies the rate of a parameter of the backbone, besides the factor of its
      group, by layer_decay ** (number of layers above it): see `adapt.layer_factors`. The head has
      the factor 1. `backbone` are the paths of the backbone.
    """
    for name, value, fits, range_ in (
        ("rate", rate, rate >= 0, "0 or more"),
        ("decay", decay, decay >= 0, "0 or more"),
        ("l2", l2, l2 >= 0, "0 or more"),
        ("clip", clip, clip is None or clip > 0, "above 0, or None"),
        ("clip_value", clip_value, clip_value is None or clip_value > 0, "above 0, or None"),
        ("accumulate", accumulate, accumulate >= 1, "1 or more"),
        ("average", average, 0 <= average < 1, "at least 0 and below 1"),
        ("layer_decay", layer_decay, 0 < layer_decay <= 1, "above 0 and at most 1"),
    ):
        if not fits:
            raise ValueError(f"optimizer: {name} must be {range_}, not {value}")
    rules = [_rule(group) for group in groups]

    def per_leaf(fn):
        def map_tree(tree):
            def of_leaf(keys, x):
                return fn(_match(rules, path := path_of(keys)), path, x)

            return jax.tree_util.tree_map_with_path(of_leaf, tree)

        return map_tree

    # Parameters with the same first step form a part with its own moments and step count, so that
    # Adam corrects the bias of a part from the step at which the part starts to learn.
    first_steps = sorted({rule["from"] for rule in rules if not rule["frozen"]} | {0})
    # Update u happens at step (u + 1) accumulate - 1, counted from 0.
    updates_before = {first: first // accumulate for first in first_steps}
    part_of = per_leaf(lambda rule, *_: f"from {rule['from']}")
    part = optax.chain(
        _added(per_leaf, lambda rule, *_: l2 if rule["l2"] is None else rule["l2"]),
        direction,
        _added(per_leaf, functools.partial(_decay_of, decay=decay)),
    )
    has_frozen = any(rule["frozen"] for rule in rules)
    chain = []
    if len(first_steps) > 1:
        chain.append(_only_learning(per_leaf(lambda rule, *_: updates_before[rule["from"]])))
    chain += [] if clip is None else [optax.clip_by_global_norm(clip)]
    chain += [] if clip_value is None else [optax.clip(clip_value)]
    if len(first_steps) == 1:
        chain.append(part)
    else:
        parts = {f"from {n}": _after(part, updates_before[n]) for n in first_steps}
        chain.append(optax.multi_transform(parts, part_of))

    def factors(tree):
        # Adapters lie at the paths of their parameters, under 'adapters/'.
        folders = [*backbone, *(f"adapters/{folder}" for folder in backbone)]
        of_layer = {}
        if layer_decay != 1:
            paths = paths_under(folders, paths_of(tree))
            of_layer = adapt.layer_factors(paths, layer_decay)
        return per_leaf(lambda rule, path, x: rule["factor"] * of_layer.get(path, 1.0))(tree)

    chain.append(_scale(factors, rate, schedule, accumulate))
    transform = optax.chain(*chain)
    if average:
        transform = optax.chain(transform, _keep_average(average))
    if accumulate > 1:
        transform = optax.MultiSteps(transform, accumulate).gradient_transformation()
    if not has_frozen:
        return transform
    kinds = per_leaf(lambda rule, *_: "frozen" if rule["frozen"] else "learns")
    # Frozen parameters need no optimizer state.
    return optax.multi_transform({"learns": transform, "frozen": optax.set_to_zero()}, kinds)


def _rule(group: Mapping[str, Any]) -> dict[str, Any]:
    rule = {**_NO_GROUP, **group}
    with contextlib.suppress(KeyError, TypeError, re.error):
        rule["path"] = re.compile(rule["path"])
        if rule["from"] >= 0 and len(rule) == len(_NO_GROUP) + 1:
            return rule
    raise ValueError(
        f"the group {dict(group)} needs a path, a regular expression such as '^head/', and may "
        f"have {', '.join(_NO_GROUP)}; from must be 0 or more"
    )


_NO_GROUP = {"factor": 1.0, "decay": None, "l2": None, "frozen": False, "from": 0}


def _match(rules, path: str) -> Mapping[str, Any]:
    return next((rule for rule in rules if rule["path"].search(path)), _NO_GROUP)


def _decay_of(rule, path: str, x, *, decay: float) -> float:
    if rule["decay"] is not None:
        return rule["decay"]
    return 0.0 if is_spared_from_decay(path, x.ndim) else decay


def _added(per_leaf, amount_fn: Callable) -> optax.GradientTransformation:
    """Returns `optax.add_decayed_weights` with an amount for each parameter."""
    amounts = per_leaf(amount_fn)

    def update(updates, state, params=None):
        added = jax.tree.map(
            lambda u, p, amount: u + amount * p if amount else u, updates, params, amounts(params)
        )
        return added, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _only_learning(wait: Callable) -> optax.GradientTransformation:
    """Replaces gradients of parameters that still wait by zeros, so that no norm counts them.

    `wait(tree)` has the number of updates for which a parameter waits.
    """

    def update(gradients, state, params=None):
        del params
        kept = jax.tree.map(
            lambda g, n: jnp.where(state.count >= n, g, 0) if n else g, gradients, wait(gradients)
        )
        return kept, optax.ScaleByScheduleState(state.count + 1)

    return optax.GradientTransformation(_zero_count, update)


def _after(transform: optax.GradientTransformation, wait: int) -> optax.GradientTransformation:
    """Delays `transform` by `wait` updates, which are 0."""
    return optax.conditionally_mask(transform, lambda step: step >= wait) if wait else transform


def _zero_count(params: Any) -> optax.ScaleByScheduleState:
    del params
    return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))


def _scale(
    factors: Callable, rate: float, schedule: Schedule, accumulate: int
) -> optax.GradientTransformation:
    """Scales by the learning rate, with a factor for each parameter; counts steps."""

    def update(updates, state, params=None):
        size = rate * schedule((state.count + 1) * accumulate - 1)
        scaled = jax.tree.map(
            lambda u, f: (-size * f * u).astype(u.dtype), updates, factors(params)
        )
        return scaled, optax.ScaleByScheduleState(state.count + 1)

    return optax.GradientTransformation(_zero_count, update)


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
    """Returns the averaged parameters if the optimizer keeps them, else `params`."""
    states = jax.tree.leaves(opt_state, is_leaf=lambda state: isinstance(state, _Average))
    averages = [state.average for state in states if isinstance(state, _Average)]
    return adapt.joined(averages[0], params) if averages else params
