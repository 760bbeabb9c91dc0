"""Nets of several Linen modules, as pure functions over plain trees."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax.nets import heads, pools
from dmljax.nets.layers import Dense

__all__ = [
    "FeaturesOrImages",
    "Modules",
    "backbone_features",
    "encoder",
    "modules",
    "output_of",
    "pooling",
    "with_backbone",
]

Variables = Mapping[str, Any]
_OUTPUTS = {pools.global_max: "max_pooled", pools.class_and_mean: "class_and_mean"}


class Modules(NamedTuple):
    """Linen modules that run one after another, as two functions over plain trees.

    * `init(key, images) -> (params, model_state, outputs)`
    * `apply(params, model_state, images, *, train, key=None) -> (outputs, model_state)`. Without a
      key nothing random happens: no dropout.
    """

    init: Callable[..., tuple[Variables, Variables, Any]]
    apply: Callable[..., tuple[Any, Variables]]


def modules(forward_fn: Callable, **linen: nn.Module) -> Modules:
    """Builds the functions of several modules that `forward_fn` connects.

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
                rngs = {"dropout": module_key}
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
    """Connects a backbone "net" and a head "head" (`heads.Head`): pool, linear layer, unit vectors.

    * `dim`: width of the linear layer; None leaves it out.
    * `pool_fn`: a function of `nets.pools`, or any function of the last feature map [b h w c] -> [b
      c]. None takes what the backbone pools itself: the mean, or the class token of a `vit`.
    * `dense_fn` makes the linear layer, or an MLP in its place, see `heads.Head`.
    """
    output, pool_fn = pooling(pool_fn)
    head = heads.Head(features=dim, pool_fn=pool_fn, dense_fn=dense_fn)
    return modules(
        lambda run, images: run["head"](output_of(run["net"](images), output)), net=net, head=head
    )


def pooling(pool_fn: Callable | None) -> tuple[str, Callable | None]:
    """Returns the output of a backbone that a head reads, and the head's own `pool_fn`."""
    # A backbone returns several pooled vectors. XLA computes only the outputs that are used.
    if pool_fn is None:
        return "pooled", None
    output = _OUTPUTS.get(pool_fn)
    return ("features", pool_fn) if output is None else (output, None)


def output_of(outputs: Mapping[str, Any], name: str) -> Any:
    """Returns the output `name` of a backbone; raises if it is missing."""
    if name not in outputs:
        raise ValueError(
            f"pool_fn: this net has no output {name!r}; only nets with a class token have "
            "'class_and_mean', such as vit_s16 and dinov2_s14: leave pool_fn out"
        )
    return outputs[name]


class FeaturesOrImages(nn.Module):
    """A backbone that takes images, or the features that it would give for them.

    Features `[b d]` are returned as its `output`. It has the parameters of `net`.
    """

    net: nn.Module
    output: str

    def setup(self):
        nn.share_scope(self, self.net)

    def __call__(self, images: jax.Array, *, train: bool) -> dict[str, jax.Array]:
        return {self.output: images} if images.ndim == 2 else self.net(images, train=train)


def backbone_features(
    net: nn.Module, params: Any, model_state: Any, images: jax.Array, *, output: str = "pooled"
) -> jax.Array:
    """Computes the features of "net" as float32 `[b d]`; features pass unchanged."""
    if images.ndim == 2:
        return images
    variables = {"params": params["net"]}
    if "net" in (statistics := model_state.get("batch_stats", {})):
        variables["batch_stats"] = statistics["net"]
    outputs: Any = net.apply(variables, images, train=False)
    return output_of(outputs, output).astype(jnp.float32)


def with_backbone(
    params: Variables, model_state: Variables, backbone: Variables | None
) -> tuple[Variables, Variables]:
    """Replaces the variables under "net" by those of a pretrained backbone.

    `backbone` is `{"params": ..., "batch_stats": ...}`, the latter optional; None changes nothing.
    """
    if backbone is None:
        return params, model_state
    params = {**params, "net": backbone["params"]}
    if backbone.get("batch_stats"):
        batch_stats = {**model_state.get("batch_stats", {}), "net": backbone["batch_stats"]}
        model_state = {**model_state, "batch_stats": batch_stats}
    return params, model_state
