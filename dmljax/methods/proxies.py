"""Losses against learned vectors, one or several for each class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import losses
from dmljax.methods import base

__all__ = ["proxies"]


def proxies(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    dim: int | None = 128,
    pool: Any = "mean",
    centers: int = 0,
    sparsity: float = 0.0,
    multiple: int = 1,
) -> base.Method:
    """Backbone, pool, linear layer to `dim`, and `loss_fn(features, labels, params['proxies'])`.

    `centers` proxies for each class where the loss takes several. `sparsity` times
    `losses.sparse_centers` draws those of one class together (Qian et al., ICCV 2019: 0.2). Give
    the proxies their own learning rate with `optimizer.groups`, such as
    `[dict(path='^proxies', factor=100.0)]`.

    For very many classes `runtime.sharded=['^proxies']` gives each device an equal share of them:
    then their number is filled up to a `multiple` of the number of devices, with rows of zeros that
    no loss sees.
    """
    encoder = base.encoder(net, dim=dim, pool=pool)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        params, model_state = base.with_backbone(params, model_state, backbone)
        d = outputs["features"].shape[1]
        rows = (classes, centers, d) if centers else (classes, d)
        drawn = jax.random.normal(jax.random.fold_in(key, 1000), rows)
        drawn = jnp.pad(drawn, [(0, -classes % multiple), *((0, 0) for _ in rows[1:])])
        return {**params, "proxies": drawn}, model_state

    def criterion(params, model_state, outputs, batch, *, key, step):
        del key, step
        learned = params["proxies"][:classes]
        value = loss_fn(outputs["features"], batch["labels"], learned)
        metrics = base.diagnostics(outputs["embeddings"], batch["labels"])
        if sparsity:
            metrics["sparsity"] = losses.sparse_centers(learned)
            value = value + sparsity * metrics["sparsity"]
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return outputs["embeddings"]

    loss, split_loss = base.split_loss(encoder, criterion)
    return base.Method(init, loss, embed, split_loss)
