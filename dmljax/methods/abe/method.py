"""The method ABE: learners that look at different things."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.methods import base
from dmljax.methods.abe import nets as ensembles
from dmljax.methods.abe.losses import divergence
from dmljax.ops import Array

__all__ = ["abe"]


def _min_max(logits: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """Every channel of every image from 0 to 1 over space; a flat one is 0."""
    low = jnp.min(logits, axis=(1, 2), keepdims=True)
    high = jnp.max(logits, axis=(1, 2), keepdims=True)
    return (logits - low) / jnp.where(high > low, high - low, 1)


_MASKS = {"sigmoid": jax.nn.sigmoid, "min_max": _min_max}


def abe(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    learners: int = 8,
    dim: int = 512,
    lambda_div: float = 1.0,
    margin_div: float = 1.0,
    divergence_pairs: str = "sum",
    pairs: str = "all",
    heads: bool = False,
    split: Sequence[str] = ("pool3", "4a"),
    attention: str = "4e",
    mask: str = "sigmoid",
    pool: Any = "mean",
) -> base.Method:
    """ABE-M: sum_m `loss_fn`(B_m) + lambda_div `divergence`; of `dim` features, dim / M each.

    `heads=True` is the paper's control, M heads without attention: of one learner, a plain net. The
    divergence does nothing for them, the paper says, and had no weight in its rows.

    `split` names the last stage of `net` that all share and the first that follows, `attention` the
    last stage of the attention's copy. Defaults are for Caffe's GoogLeNet; any backbone that has
    `start` and `stop` does, such as `convnet`: `split=('conv3', 'conv4'), attention='conv4'`.

    `pairs='drawn'` compares only rows i and i + b/2, which `sampling.abe_pairs` draws as positive
    or negative pairs; the paper does not say whether its loss goes over these or over 'all'.
    The paper's text does not tell the masks' activation. `mask='sigmoid'` is what a port says it to
    be and another has; 'min_max' is that first port's replacement for it. `pool` is how a learner's
    last map becomes the features of its linear layer; the mean, in the paper.

    `embed` is the learners' unit vectors beside each other over sqrt(M): ranking by it is ranking
    by the mean of their squared distances. `parts` are the learners.
    """
    del classes
    if pairs not in ("all", "drawn"):
        raise ValueError(f"pairs is 'all' or 'drawn', not {pairs!r}")
    if mask not in _MASKS:
        raise ValueError(f"mask is one of {', '.join(_MASKS)}, not {mask!r}")
    options = {"learners": learners, "features": dim, "net": _like(net), "split": tuple(split)}
    options |= dict(zip(("output", "pool"), base.pooling(pool), strict=True))
    options |= {"remat": net.remat, "dtype": net.dtype}
    if heads:
        ensemble = ensembles.multi_head(**options)
    else:
        ensemble = ensembles.abe(**options, attention=attention, mask_fn=_MASKS[mask])
    whole = base.modules(lambda run, images: run["net"](images), net=ensemble)
    loss_fn = base.with_miner(loss_fn, mine_fn)

    def init(key, batch, *, backbone=None):
        params, model_state, _ = whole.init(key, batch["images"])
        if backbone is None:
            return params, model_state
        variables = {"params": params["net"]}
        if "batch_stats" in model_state:
            variables["batch_stats"] = model_state["batch_stats"]["net"]
        filled = ensembles.fill_backbone(variables, backbone)
        return base.with_backbone(params, model_state, filled)

    def loss(params, model_state, batch, *, key, step):
        del step
        outputs, model_state = whole.apply(
            params, model_state, batch["images"], train=True, key=jax.random.fold_in(key, 0)
        )
        x = outputs["learners"]  # [b m d]
        labels = batch["labels"] if pairs == "all" else _drawn(batch["labels"])
        keys = jax.random.split(jax.random.fold_in(key, 1), learners)
        each = jax.vmap(lambda x, key: loss_fn(x, labels, key=key), in_axes=(1, 0))(x, keys)
        metrics = base.diagnostics(outputs["embeddings"], batch["labels"])
        metrics["metric"] = jnp.sum(each)
        metrics["divergence"] = divergence(x, margin=margin_div, pairs=divergence_pairs)
        if learners > 1:
            metrics["self_cosine"] = _self_cosine(jax.lax.stop_gradient(x))
        return metrics["metric"] + lambda_div * metrics["divergence"], (model_state, metrics)

    def look(params, model_state, images):
        return whole.apply(params, model_state, images, train=False)[0]

    def embed(params, model_state, images):
        return base.unit_vectors(look(params, model_state, images)["embeddings"])

    def parts(params, model_state, images):
        found = look(params, model_state, images)["learners"]
        return {f"learner_{m}": found[:, m] for m in range(learners)}

    def spatial_masks(params, model_state, images):
        return {"masks": look(params, model_state, images)["masks"]}

    inspect = base.Inspect(
        parts=parts if learners > 1 else None, spatial_masks=None if heads else spatial_masks
    )
    return base.Method(init, loss, embed, inspect=inspect)


def _like(net: nn.Module) -> Callable[..., nn.Module]:
    """Makes nets like this one, of other stages and names."""
    fields = {f.name: getattr(net, f.name) for f in dataclasses.fields(net)}
    if not {"start", "stop"} <= set(fields):
        raise ValueError(
            f"abe needs a net that runs from any stage to any other, and {type(net).__name__} does "
            "not (it has no start and stop): take googlenet, resnet50, convnet, ..."
        )
    ours = ("parent", "name", "remat", "dtype")
    return functools.partial(type(net), **{k: v for k, v in fields.items() if k not in ours})


def _drawn(labels: Array) -> ops.Pairs:
    """Only rows i and i + b/2 as pairs."""
    b = len(labels)
    if b % 2:
        raise ValueError(f"pairs='drawn' needs two halves of a batch, not {b} rows: see abe_pairs")
    rows = jnp.arange(b)
    partner = rows[None, :] == ((rows + b // 2) % b)[:, None]
    positives, negatives = ops.pairs(labels)
    return ops.Pairs(positives & partner, negatives & partner)


def _self_cosine(learners: Float[Array, "b m d"]) -> Float[Array, ""]:
    """Mean cosine between two learners of one image."""
    m = learners.shape[1]
    together = jnp.sum(learners, axis=1)  # |sum of unit vectors|^2 = m + 2 sum_{p<q} cos
    return jnp.mean(jnp.sum(together * together, axis=1) - m) / (m * (m - 1))
