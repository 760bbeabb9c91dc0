"""A method for every loss against proxies: learned vectors, one or several for each class."""

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import losses, ops
from dmljax.losses.combinators import check_prefixes
from dmljax.methods import assemble, base
from dmljax.nets.initializers import Initializer, normal, uniform
from dmljax.nets.layers import Dense

__all__ = ["proxies", "published_init"]

# The net folds the key of a step with smaller numbers.
_CLASSES = 1000


def _proxy_anchor(key, shape, dtype=jnp.float32):
    return normal(math.sqrt(2 / shape[0]))(key, shape, dtype)


def _normalized_softmax(key, shape, dtype=jnp.float32):
    return uniform(1 / math.sqrt(shape[-1]))(key, shape, dtype)


def _soft_triple(key, shape, dtype=jnp.float32):
    return uniform(1 / math.sqrt(math.prod(shape[:-1])))(key, shape, dtype)


_PUBLISHED = {
    losses.normalized_softmax: _normalized_softmax,
    losses.proxy_anchor: _proxy_anchor,
    losses.proxy_nca_pp: normal(1 / 8),
    losses.soft_triple: _soft_triple,
}


def published_init(loss_fn: Callable) -> Initializer:
    """Returns the initial values of proxies `[c d]` or `[c k d]` in the code published with a loss.

    * `proxy_anchor` (Kim et al., 2020): normal with variance 2 / c.
    * `soft_triple` (Qian et al., 2019): uniform within 1 / sqrt(c k).
    * `normalized_softmax` (Zhai & Wu, 2019): uniform within 1 / sqrt(d).
    * `proxy_nca_pp` (Teh et al., 2020): normal with deviation 1 / 8.
    * all others: normal with deviation 1, the default of pytorch-metric-learning.

    The four losses divide proxies by their norms. So the size of the initial values changes no
    first loss, but it sets how far a step of Adam turns a proxy: by about rate / size.
    """
    while loss_fn not in _PUBLISHED:  # a partial, a loss with scheduled values, `losses.prefixes`
        inner = getattr(loss_fn, "func", None) or getattr(loss_fn, "__wrapped__", None)
        if inner is None:
            break
        loss_fn = inner
    return _PUBLISHED.get(loss_fn, jax.random.normal)


def proxies(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    dim: int | None = 128,
    pool_fn: Callable | None = None,
    dense_fn: Callable = Dense,
    proxy_init: Initializer | float | None = None,
    centers: int = 0,
    sparsity: float = 0.0,
    prefixes: Sequence[int] = (),
    tile: int | None = None,
    sample: float | None = None,
    unbiased: bool = False,
) -> base.Method:
    """Builds the method of a loss `loss_fn(features, labels, proxies)` with class proxies.

    The proxies are `params["proxies"]`. They often need a higher learning rate than the net: in a
    config `optimizer.groups=[dict(path="^proxies", factor=100.0)]`.

    * `dim`: width of the linear layer; None compares the pooled features themselves with proxies.
    * `pool_fn`, `dense_fn`: see `assemble.encoder`.
    * `proxy_init`: the initial values of the proxies, or the standard deviation of a normal
      distribution; None takes `published_init(loss_fn)`.
    * `centers`: proxies for each class, for losses that take several; 0 for all other losses.
    * `sparsity`: weight of `losses.sparse_centers`, which pulls the centers of one class together
      (Qian et al., ICCV 2019, use 0.2).
    * `prefixes`: widths, such as (64, 128), that also get the loss, with the same leading numbers
      of the proxies (`losses.prefixes`, Kusupati et al., NeurIPS 2022).
    * `tile`: the loss sees `tile` classes at a time, and no array has a logit for each class. The
      loss stays the same, and each logit is computed twice.
    * `sample`: partial FC: a step compares with the classes of the batch and with this random share
      of the others (`ops.ClassTiles`). 1 / `sample` is rounded to a whole number.
    * `unbiased`: with `sample`, a drawn class counts 1 / `sample` times.
    """
    encoder = assemble.encoder(net, dim=dim, pool_fn=pool_fn, dense_fn=dense_fn)
    tiles_fn = _tiles_fn(loss_fn, tile, sample, unbiased)
    stepped_loss = base.with_miner(base.with_prefixes(loss_fn, prefixes), None)
    if proxy_init is None:
        proxy_init = published_init(loss_fn)
    elif not callable(proxy_init):
        proxy_init = normal(proxy_init)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        params, model_state = assemble.with_backbone(params, model_state, backbone)
        d = outputs["features"].shape[1]
        if prefixes:
            check_prefixes(prefixes, width=d)
        shape = (classes, centers, d) if centers else (classes, d)
        rows = proxy_init(jax.random.fold_in(key, 1000), shape, jnp.float32)
        return {**params, "proxies": rows}, model_state

    def criterion(params, model_state, outputs, batch, *, key, step):
        x, labels, rows = outputs["features"], batch["labels"], params["proxies"]
        value = stepped_loss(x, labels, rows, key=key, step=step, **tiles_fn(key))
        metrics = base.diagnostics(outputs["embeddings"], batch["labels"])
        if sparsity:
            metrics["sparsity"] = losses.sparse_centers(rows)
            value = value + sparsity * metrics["sparsity"]
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return outputs["embeddings"]

    loss, split_loss = base.split_loss(encoder, criterion)
    return base.Method(
        init, loss, embed, split_loss, per_class=("proxies",), prefixes=tuple(prefixes)
    )


def _tiles_fn(
    loss_fn: Callable, tile: int | None, sample: float | None, unbiased: bool
) -> Callable[[jax.Array], dict[str, ops.ClassTiles]]:
    """Returns the keywords of the loss in a step, which depend on its key."""
    if not 0 < (1 if sample is None else sample) <= 1 or (1 if tile is None else tile) < 1:
        raise ValueError(
            f"method.sample={sample} must be a fraction above 0 and at most 1, and "
            f"method.tile={tile} a number of classes from 1 on; None takes all classes"
        )
    if unbiased and sample is None:
        raise ValueError("method.unbiased weighs the classes of method.sample: set it, too")
    if tile is None and sample is None:
        return lambda key: {}
    if not base.accepts(loss_fn, "tiles"):
        name = "tile" if sample is None else "sample"
        raise ValueError(
            f"method.{name}: this loss needs all classes at once, as it has no argument tiles: "
            "take one like arcface, cosface, normalized_softmax or proxy_anchor, or leave it out"
        )

    def tiles_fn(key):
        share = 1.0 if sample is None else sample
        tiles = ops.ClassTiles(tile, share, jax.random.fold_in(key, _CLASSES), unbiased)
        return {"tiles": tiles}

    return tiles_fn
