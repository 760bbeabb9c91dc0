"""Nets of several Linen modules, as pure functions over plain trees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from dmljax.nets import heads, pools
from dmljax.nets.layers import Dense

__all__ = ["Modules", "encoder", "modules", "pooling", "with_backbone"]

Variables = Mapping[str, Any]


class Modules(NamedTuple):
    """Linen modules that run one after another, as two functions over plain trees.

    * `init(key, images) -> (params, model_state, outputs)`
    * `apply(params, model_state, images, *, train, key=None) -> (outputs, model_state)`. Without a
      key nothing random happens: no dropout, no samples.
    """

    init: Callable[..., tuple[Variables, Variables, Any]]
    apply: Callable[..., tuple[Any, Variables]]


def modules(forward_fn: Callable, **linen: nn.Module) -> Modules:
    """The functions of several modules that `forward_fn` connects.

    `forward_fn(run, images)` calls `run["name"](inputs)` for every module of `linen`, in whatever
    way the method needs, and returns the outputs. Variables are stored under the same names:
    `params["name"]` and `model_state["batch_stats"]["name"]`.
    """

    def init(key, images):
        params, batch_stats = {}, {}

        def init_module(name, *args, **kwargs):
            module_key = jax.random.fold_in(key, len(params))
            outputs, variables = linen[name].init_with_output(
                module_key, *args, train=True, **kwargs
            )
            params[name] = variables.get("params", {})
            if "batch_stats" in variables:
                batch_stats[name] = variables["batch_stats"]
            return outputs

        outputs = forward_fn({name: functools.partial(init_module, name) for name in linen}, images)
        return params, {"batch_stats": batch_stats} if batch_stats else {}, outputs

    def apply(params, model_state, images, *, train, key=None):
        batch_stats = dict(model_state.get("batch_stats", {}))

        def apply_module(name, *args, **kwargs):
            variables = {"params": params[name]}
            if name in batch_stats:
                variables["batch_stats"] = batch_stats[name]
            rngs = None
            if key is not None:
                module_key = jax.random.fold_in(key, list(linen).index(name))
                rngs = {"dropout": module_key, "sample": jax.random.fold_in(module_key, 1)}
            outputs, updates = linen[name].apply(
                variables, *args, train=train, rngs=rngs, mutable=["batch_stats"], **kwargs
            )
            if name in batch_stats:
                batch_stats[name] = updates["batch_stats"]
            return outputs

        outputs = forward_fn(
            {name: functools.partial(apply_module, name) for name in linen}, images
        )
        if train and batch_stats:
            model_state = {**model_state, "batch_stats": batch_stats}
        return outputs, model_state

    return Modules(init, apply)


def encoder(
    net: nn.Module,
    *,
    dim: int | None,
    pool_fn: Callable | None = None,
    dense_fn: Callable = Dense,
) -> Modules:
    """A backbone "net" and a head "head" (`heads.Head`): pool, linear layer, unit vectors.

    * `dim`: width of the linear layer; None leaves it out.
    * `pool_fn`: a function of `nets.pools`, or any function of the last feature map [b h w c] -> [b
      c]. None takes what the backbone pools itself: the mean, or the class token of a `vit`.
    * `dense_fn` makes the linear layer, see `heads.Head`.
    """
    output, pool_fn = pooling(pool_fn)
    head = heads.Head(features=dim, pool_fn=pool_fn, dense_fn=dense_fn)
    return modules(lambda run, images: run["head"](run["net"](images)[output]), net=net, head=head)


def pooling(pool_fn: Callable | None) -> tuple[str, Callable | None]:
    """The output of a backbone that a head reads, and the `pool_fn` that is left for the head."""
    if pool_fn is None:
        return "pooled", None
    # A backbone returns its maximum, too. XLA computes only the outputs that are used.
    return ("max_pooled", None) if pool_fn is pools.global_max else ("features", pool_fn)


def with_backbone(
    params: Variables, model_state: Variables, backbone: Variables | None
) -> tuple[Variables, Variables]:
    """`params` and `model_state` with the variables of a pretrained backbone under "net".

    `backbone` is `{"params": ..., "batch_stats": ...}`, the latter optional; None changes nothing.
    """
    if backbone is None:
        return params, model_state
    params = {**params, "net": backbone["params"]}
    if backbone.get("batch_stats"):
        batch_stats = {**model_state.get("batch_stats", {}), "net": backbone["batch_stats"]}
        model_state = {**model_state, "batch_stats": batch_stats}
    return params, model_state
