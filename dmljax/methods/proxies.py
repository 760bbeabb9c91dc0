"""A method for every loss against proxies: learned vectors, one or several for each class."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import losses
from dmljax.methods import assemble, base

__all__ = ["proxies"]


def proxies(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    dim: int | None = 128,
    pool_fn: Callable | None = None,
    centers: int = 0,
    sparsity: float = 0.0,
    multiple: int = 1,
) -> base.Method:
    """The loss `loss_fn(features, labels, proxies)` on a backbone, a pool and a linear layer.

    The proxies are `params["proxies"]`. They often need a higher learning rate than the net: in a
    config `optimizer.groups=[dict(path="^proxies", factor=100.0)]`.

    * `dim`: width of the linear layer; None compares the pooled features themselves with proxies.
    * `pool_fn`: see `assemble.encoder`.
    * `centers`: proxies for each class, for losses that take several; 0 for all other losses.
    * `sparsity`: weight of `losses.sparse_centers`, which pulls the centers of one class together
      (Qian et al., ICCV 2019, use 0.2).
    * `multiple`: the number of rows is rounded up to a multiple of this with zeros that no loss
      sees. Several devices can then share very many classes equally.
    """
    encoder = assemble.encoder(net, dim=dim, pool_fn=pool_fn)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        params, model_state = assemble.with_backbone(params, model_state, backbone)
        d = outputs["features"].shape[1]
        shape = (classes, centers, d) if centers else (classes, d)
        rows = jax.random.normal(jax.random.fold_in(key, 1000), shape)
        rows = jnp.pad(rows, [(0, -classes % multiple), *((0, 0) for _ in shape[1:])])
        return {**params, "proxies": rows}, model_state

    def criterion(params, model_state, outputs, batch, *, key, step):
        del key, step
        class_proxies = params["proxies"][:classes]
        value = loss_fn(outputs["features"], batch["labels"], class_proxies)
        metrics = base.diagnostics(outputs["embeddings"], batch["labels"])
        if sparsity:
            metrics["sparsity"] = losses.sparse_centers(class_proxies)
            value = value + sparsity * metrics["sparsity"]
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return outputs["embeddings"]

    loss, split_loss = base.split_loss(encoder, criterion)
    return base.Method(init, loss, embed, split_loss)
