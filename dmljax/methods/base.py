"""What a method is: three pure functions. The train loop sees nothing else of it.

A factory is called as `factory(net, loss_fn, *, classes, ...)`: the backbone (a Linen module), the
loss with its hyper-parameters bound, and the number of training classes; the rest are the method's
own hyper-parameters. A `batch` is `dict(images [b h w c] normalised, labels [b])`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import losses, ops
from dmljax.nets import heads
from dmljax.ops import Array

__all__ = [
    "Method",
    "Params",
    "State",
    "backbone",
    "halves",
    "mined",
    "modules",
    "pooling",
    "stats",
    "unit",
]

_SEEN = 1024  # rows
Params = Mapping[str, Any]
State = Mapping[str, Any]
Batch = Mapping[str, Array]


class Method(NamedTuple):
    """`init`, `loss` and `embed`; what else a method may offer is None where it does not.

    init(key, batch) -> (params, model_state)
    loss(params, model_state, batch, *, key, step) -> (loss, (model_state, metrics))
    embed(params, model_state, images) -> unit embeddings [b d]
    parts(params, model_state, images) -> {name: embeddings [b d]}, scored beside `embed`
    refine(params, model_state, embeddings [n d], *, query, gallery) -> embeddings [n e]: what a
        split's embeddings, and its masks of bool [n] or None, make of each other (numpy)
    show(params, model_state, images) -> {name: array}: what goes on inside, for pictures
    draw(folder, *, labels [n], embeddings {name: [n d]}, read_fn, show_fn) -> names of the pictures
        that it has drawn of a split, whose `embed` is under '' and whose `parts` are beside it;
        `read_fn(rows) -> uint8 [k h w c]`, `show_fn` of such images is `show` (numpy)
    fill(variables, weights) -> variables: `params` or `batch_stats` with those of a pretrained
        backbone; by default they are those of 'net'
    forward(params, model_state, images, *, key) -> (outputs {name: [b ...]}, model_state) and
    criterion(params, model_state, outputs, batch, *, key, step) -> (loss, (model_state, metrics)):
        `loss` in two halves, where rows of outputs depend on their own images alone (but for batch
        norm), so that the first half may be run chunk by chunk
    """

    init: Callable[..., tuple[Params, State]]
    loss: Callable[..., tuple[Array, tuple[State, dict[str, Array]]]]
    embed: Callable[..., Array]
    parts: Callable[..., dict[str, Array]] | None = None
    refine: Callable[..., Any] | None = None
    show: Callable[..., dict[str, Array]] | None = None
    draw: Callable[..., list[str]] | None = None
    fill: Callable[[Mapping, Mapping], dict[str, Any]] | None = None
    forward: Callable[..., tuple[dict[str, Array], State]] | None = None
    criterion: Callable[..., tuple[Array, tuple[State, dict[str, Array]]]] | None = None


class Modules(NamedTuple):
    """`init(key, images) -> (params, model_state, outputs)`;
    `apply(params, model_state, images, *, train, key=None) -> (outputs, model_state)`.
    """

    init: Callable[..., tuple[Params, State, dict[str, Array]]]
    apply: Callable[..., tuple[dict[str, Array], State]]


def modules(forward: Callable, **parts: nn.Module) -> Modules:
    """Linen modules that are run one after another, as `init` and `apply` over plain trees.

    `forward(run, images)` calls `run[name](x)` for each of `parts` and returns the outputs. The
    trees are `params[name]` and `model_state['batch_stats'][name]`.
    """

    def init(key, images):
        params, stats = {}, {}

        def begin(name, *args, **kwargs):
            own = jax.random.fold_in(key, len(params))
            out, variables = parts[name].init_with_output(own, *args, train=True, **kwargs)
            params[name] = variables.get("params", {})
            if "batch_stats" in variables:
                stats[name] = variables["batch_stats"]
            return out

        outputs = forward({name: functools.partial(begin, name) for name in parts}, images)
        return params, {"batch_stats": stats} if stats else {}, outputs

    def apply(params, model_state, images, *, train, key=None):
        stats = dict(model_state.get("batch_stats", {}))

        def call(name, *args, **kwargs):
            variables = {"params": params[name]}
            if name in stats:
                variables["batch_stats"] = stats[name]
            rngs = None
            if key is not None:
                own = jax.random.fold_in(key, list(parts).index(name))
                rngs = {"dropout": own, "sample": jax.random.fold_in(own, 1)}
            out, changed = parts[name].apply(
                variables, *args, train=train, rngs=rngs, mutable=["batch_stats"], **kwargs
            )
            if name in stats:
                stats[name] = changed["batch_stats"]
            return out

        outputs = forward({name: functools.partial(call, name) for name in parts}, images)
        if train and stats:
            model_state = {**model_state, "batch_stats": stats}
        return outputs, model_state

    return Modules(init, apply)


def backbone(net: nn.Module, *, dim: int | None, pool: Any = "mean") -> Modules:
    """A backbone and `heads.Head`: pool, linear layer to `dim` (None: none), unit vectors."""
    output, pool = pooling(pool)
    head = heads.Head(features=dim, pool=pool)
    return modules(lambda run, images: run["head"](run["net"](images)[output]), net=net, head=head)


def halves(whole: Modules, criterion: Callable) -> dict[str, Callable]:
    """`forward`, which runs `whole` and keeps what a head gives out, `criterion`, and the `loss`
    that the two make."""

    def forward(params, model_state, images, *, key):
        outputs, model_state = whole.apply(params, model_state, images, train=True, key=key)
        return {name: outputs[name] for name in ("embeddings", "features")}, model_state

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = forward(params, model_state, batch["images"], key=key)
        return criterion(params, model_state, outputs, batch, key=key, step=step)

    return {"loss": loss, "forward": forward, "criterion": criterion}


def pooling(pool: Any) -> tuple[str, Any]:
    """The output of a backbone that a head takes, and the pool that is left for it to do."""
    # Backbones pool on their own; what is not asked for is never computed.
    done = {"mean": "pooled", "max": "max_pooled"}
    return (done[pool], None) if isinstance(pool, str) and pool in done else ("features", pool)


def mined(loss_fn: Callable, mine_fn: Callable | None) -> Callable:
    """`loss_fn(embeddings, labels, *, key, ...)` with the miner, which gets the key if it draws."""
    if mine_fn is None:
        return lambda *args, key, **kwargs: loss_fn(*args, **kwargs)
    if "key" not in inspect.signature(mine_fn).parameters:
        return lambda *args, key, **kwargs: loss_fn(*args, mine_fn=mine_fn, **kwargs)

    def with_key(*args, key, **kwargs):
        return loss_fn(*args, mine_fn=functools.partial(mine_fn, key=key), **kwargs)

    return with_key


def stats(embeddings: Array, labels: Array, *, where: Array | None = None) -> dict[str, Array]:
    """What tells a loss that has collapsed from one that is solved; of a very large batch the first
    rows do, and their pairs fit into the memory that a chunk has."""
    first = slice(None) if len(embeddings) <= _SEEN else slice(_SEEN)
    where = where if where is None else where[first]
    found = losses.stats(embeddings[first], labels[first], where=where)
    return {k: jax.lax.stop_gradient(v) for k, v in found.items()}


def unit(embeddings: Array) -> Array:
    """What is evaluated: float32 unit vectors."""
    return ops.normalize(jnp.asarray(embeddings, jnp.promote_types(embeddings.dtype, jnp.float32)))
