"""Heads: from the feature map of a backbone to embeddings and logits.

A head is called as `(maps [b h w c] or pooled [b c], *, train, where=None)` and returns a dict in
float32:

* "pooled" `[b c]`: the map, pooled over space.
* "features" `[b d]`: the linear layer of "pooled". A classifier without a neck reads these.
* "embeddings" `[b d]`: the features as unit vectors.
* "neck" `[b d]` (with a neck): the features after a batch norm, which a classifier reads instead.
* "logits" `[b classes]` (with a classifier).
"""

import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.nets.initializers import normal
from dmljax.nets.layers import BatchNorm, Dense
from dmljax.nets.pools import global_mean
from dmljax.ops import Array

__all__ = [
    "Head",
    "classify",
]


class Head(nn.Module, kw_only=True):
    """Pool, linear layer and unit vectors; with a neck and a classifier if wanted.

    * `features`: width of the linear layer; None leaves it out.
    * `dense_fn(features, dtype=..., name=...)` makes the linear layer: one of `layers.Dense` (drawn
      as in PyTorch), `layers.orthogonal_dense`, `layers.kaiming_dense`, `layers.glorot_dense`,
      `layers.centered_dense` (principal directions, whitened) and `layers.mlp` (two layers with a
      batch norm). A layer that takes `train` gets it.
    * `pool_fn`: a function of `nets.pools`, or any function `[b h w c] -> [b c]`; None if the input
      is pooled already.
    * `classes`: number of classes of the classifier; None leaves it out.
    * `neck`: the classifier reads the features after a batch norm (Luo et al., CVPR Workshops
      2019). It has no bias, so that the classes stay around the origin.

    The parameters are called red, bottleneck and fc, as in the code of Seidenschwarz et al. (ICML
    2021).
    """

    features: int | None = 512
    dense_fn: Callable = Dense
    pool_fn: Callable | None = global_mean
    classes: int | None = None
    neck: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        maps: Float[Array, "b h w c"] | Float[Array, "b c"],
        *,
        train: bool,
        where: Bool[Array, "b"] | None = None,
    ) -> dict[str, Array]:
        if jnp.ndim(maps) != (2 if self.pool_fn is None else 4):
            takes = "maps [b h w c]" if self.pool_fn else "pooled features [b c] (pool_fn=None)"
            raise ValueError(f"this head takes {takes}, not {list(jnp.shape(maps))}")
        pooled = ops.widen(maps if self.pool_fn is None else self.pool_fn(maps))
        features = pooled
        if self.features is not None:
            layer = self.dense_fn(self.features, dtype=self.dtype, name="red")
            takes_train = "train" in inspect.signature(layer).parameters
            features = ops.widen(layer(pooled, **({"train": train} if takes_train else {})))
        outputs = classify(
            features,
            classes=self.classes,
            neck=self.neck,
            dtype=self.dtype,
            train=train,
            where=where,
        )
        return {"pooled": pooled, **outputs}


def classify(
    features: Float[Array, "b d"],
    *,
    classes: int | None,
    neck: bool,
    dtype: Any = None,
    train: bool,
    where: Bool[Array, "b"] | None = None,
) -> dict[str, Array]:
    """Computes the outputs of a head from "features" on; the arguments are those of `Head`.

    Creates "bottleneck" (the neck) and "fc" (the classifier) in the module that calls it.
    """
    outputs = {"features": features, "embeddings": ops.normalize(features)}
    if where is not None and (jnp.shape(where) != features.shape[:1] or where.dtype != bool):
        raise ValueError(
            f"where must be [{features.shape[0]}] bool, one per row, not {where.dtype} "
            f"{list(jnp.shape(where))}"
        )
    if neck:
        # Without a mask, a batch of one row would be an error.
        where = jnp.ones(len(features), bool) if where is None else where
        norm = BatchNorm(use_bias=False, name="bottleneck")
        features = outputs["neck"] = norm(features, train=train, where=where)
    if classes is not None:
        # After a neck the classifier has no bias: its hyperplanes go through the origin.
        kernel_init = normal(0.001) if neck else None
        linear = Dense(classes, use_bias=not neck, dtype=dtype, kernel_init=kernel_init, name="fc")
        outputs["logits"] = ops.widen(linear(features))
    return outputs
