"""A method for every pair, triplet and ranking loss, with a miner and a memory if wanted."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax.numpy as jnp

from dmljax import losses, ops
from dmljax.losses.combinators import check_prefixes
from dmljax.methods import assemble, base
from dmljax.nets.layers import Dense

__all__ = ["pairs"]


def pairs(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    dim: int | None = 128,
    pool_fn: Callable | None = None,
    dense_fn: Callable = Dense,
    normalized: bool = True,
    unit: bool = True,
    memory: int = 0,
    memory_start: int = 0,
    prefixes: Sequence[int] = (),
) -> base.Method:
    """Applies the loss `loss_fn(embeddings, labels)` to a backbone, a pool and a linear layer.

    * `mine_fn`: a miner, which narrows the pairs that the loss sees.
    * `dim`: width of the linear layer; None evaluates the pooled features themselves.
    * `pool_fn`, `dense_fn`: see `assemble.encoder`.
    * `normalized=False` gives the loss the features before they become unit vectors.
    * `unit=False` also evaluates those. In two dimensions unit vectors would lie on a circle.
      Both only select one of the two outputs of the net, so they are not functions.
    * `memory`: the loss also compares the batch with this many rows of earlier batches (Wang et
      al., CVPR 2020). That term counts from step `memory_start` on, when embeddings change slowly.
    * `prefixes`: widths, such as (64, 128), that also get the loss, so that the first 64 numbers of
      an embedding are an embedding (`losses.prefixes`, Kusupati et al., NeurIPS 2022).
    """
    del classes
    if prefixes and not (normalized and unit):
        raise ValueError("prefixes are unit vectors: leave out normalized=False and unit=False")
    encoder = assemble.encoder(net, dim=dim, pool_fn=pool_fn, dense_fn=dense_fn)
    loss_input = "embeddings" if normalized else "features"
    mined_loss = base.with_miner(base.with_prefixes(loss_fn, prefixes), mine_fn)
    bank = losses.cross_batch_memory(mined_loss, size=memory) if memory else None

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        params, model_state = assemble.with_backbone(params, model_state, backbone)
        if prefixes:
            check_prefixes(prefixes, width=outputs[loss_input].shape[1])
        if bank is not None:
            model_state = {**model_state, "memory": bank.init(outputs[loss_input].shape[1])}
        return params, model_state

    def criterion(params, model_state, outputs, batch, *, key, step):
        del params
        x, labels = outputs[loss_input], batch["labels"]
        metrics = base.diagnostics(x, labels)
        value = mined_loss(x, labels, key=key, step=step)
        if bank is not None:
            memory_loss, new_memory = bank.loss(
                model_state["memory"], x, labels, key=key, step=step
            )
            metrics["memory_loss"] = memory_loss
            value = value + jnp.where(step >= memory_start, memory_loss, 0)
            model_state = {**model_state, "memory": new_memory}
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return ops.normalize(outputs[loss_input]) if unit else outputs["features"]

    loss, split_loss = base.split_loss(encoder, criterion)
    return base.Method(init, loss, embed, split_loss, per_class=(), prefixes=tuple(prefixes))
