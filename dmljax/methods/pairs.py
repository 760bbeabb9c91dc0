"""Any pair or ranking loss, any miner, and optionally a memory of earlier batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from dmljax import losses
from dmljax.methods import base

__all__ = ["pairs"]


def pairs(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    dim: int | None = 128,
    pool: Any = "mean",
    normalized: bool = True,
    unit: bool = True,
    memory: int = 0,
    memory_start: int = 0,
) -> base.Method:
    """Backbone, pool, linear layer to `dim`, and `loss_fn(embeddings, labels)`.

    `dim=None` takes the pooled features as they are. `normalized=False` hands the loss the features
    before normalisation, and `unit=False` evaluates these too: unit vectors of two dimensions would
    lie on a circle. With `memory` rows of earlier batches (Wang et al., CVPR 2020), counted in
    from step `memory_start` on, when embeddings drift slowly enough.
    """
    del classes
    encoder = base.encoder(net, dim=dim, pool=pool)
    output = "embeddings" if normalized else "features"
    loss_fn = base.with_miner(loss_fn, mine_fn)
    bank = losses.cross_batch_memory(loss_fn, size=memory) if memory else None

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        params, model_state = base.with_backbone(params, model_state, backbone)
        if bank is not None:
            model_state = {**model_state, "memory": bank.init(outputs[output].shape[1])}
        return params, model_state

    def criterion(params, model_state, outputs, batch, *, key, step):
        del params
        x, labels = outputs[output], batch["labels"]
        metrics = base.diagnostics(x, labels)
        value = loss_fn(x, labels, key=key)
        if bank is not None:
            remembered, new = bank.loss(model_state["memory"], x, labels, key=key)
            metrics["memory_loss"] = remembered
            value = value + jnp.where(step >= memory_start, remembered, 0)
            model_state = {**model_state, "memory": new}
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return base.unit_vectors(outputs[output]) if unit else outputs["features"]

    loss, split_loss = base.split_loss(encoder, criterion)
    return base.Method(init, loss, embed, split_loss)
