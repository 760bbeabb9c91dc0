"""Ensembles that share most of their net: attention-based (ABE) and with several heads.

Both are called as `(images [b h w 3], *, train)` and return, in float32,

* "learners" `[b m d]`: the unit vectors of the m learners.
* "embeddings" `[b m*d]`: those beside each other, divided by sqrt(m). They are unit vectors, and a
  squared distance between them is the mean of the learners'.

`net` is a backbone of `dmljax.nets`; `split` names its last stage that all learners share and the
stage after that. The linear layers take the backbone's `output`, where a `pool` is given pooled by
it. Defaults are the published ones, for Caffe's GoogLeNet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.googlenet import GoogLeNet
from dmljax.nets.heads import Head
from dmljax.nets.initializers import uniform
from dmljax.nets.layers import Conv, glorot_dense
from dmljax.ops import Array

__all__ = ["abe", "fill_backbone", "multi_head"]


class ABE(nn.Module, kw_only=True):
    """S, then G on S * A_m for every learner m (Kim et al., ECCV 2018): ABE-8 by default.

    S ("shared") and G ("head"), which ends in a linear layer ("embedding"), are the same for all
    learners. A learner's attention A_m is a mask of its own for every channel and place: a copy of
    the stages up to `attention`, with weights of its own but one for all learners, then a 1x1
    convolution for each learner ("masks") and `mask_fn`. Also returns "masks" `[b m h w c]`.

    `features` counts those of all learners together. The 1x1 convolutions lie beside each other
    in one kernel: the outputs of learner m are the m-th c.
    """

    learners: int = 8
    features: int = 512
    net: Callable = GoogLeNet
    split: tuple[str, str] = ("pool3", "4a")
    attention: str = "4e"
    mask_fn: Callable = jax.nn.sigmoid
    output: str = "pooled"
    pool: Any = None
    remat: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, "b h w 3"], *, train: bool) -> dict[str, Array]:
        width = _share(self.features, self.learners)
        stop, start = self.split
        options = {"remat": self.remat, "dtype": self.dtype}

        shared = self.net(stop=stop, name="shared", **options)
        maps = shared(images, train=train)["features"]  # [b h w c]
        b, h, w, c = maps.shape
        attention = self.net(start=start, stop=self.attention, name="attention", **options)
        heard = attention(maps, train=train)["features"]
        if heard.shape[1:3] != (h, w):
            raise ValueError(
                f"masks of {heard.shape[1]} x {heard.shape[2]} do not fit maps of {h} x {w}: let "
                f"the attention end before a stage with a stride, not at {self.attention!r}"
            )
        masks = Conv(
            self.learners * c,
            1,
            use_bias=True,
            dtype=self.dtype,
            kernel_init=_glorot_each(self.learners),
            name="masks",
        )(heard)
        masks = self.mask_fn(ops.widen(masks)).reshape(b, h, w, self.learners, c)
        masks = jnp.moveaxis(masks, 3, 1)  # [b m h w c]

        # One after the other in the batch, image by image, so that a sharded batch stays in place.
        each = (maps[:, None] * masks.astype(maps.dtype)).reshape(b * self.learners, h, w, c)
        head = self.net(start=start, name="head", **options)
        pooled = _pooled(self.pool, head(each, train=train)[self.output], "pool", train)
        vectors = glorot_dense(width, dtype=self.dtype, name="embedding")(pooled)
        return _ensemble(vectors.reshape(b, self.learners, width)) | {"masks": masks}


class MultiHead(nn.Module, kw_only=True):
    """S, then a G and a linear layer of its own for every learner: "head_0", "embedding_0", ...

    The baseline of `ABE` in its paper. With one learner it is the backbone and a linear layer.
    """

    learners: int = 8
    features: int = 512
    net: Callable = GoogLeNet
    split: tuple[str, str] = ("pool3", "4a")
    output: str = "pooled"
    pool: Any = None
    remat: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, "b h w 3"], *, train: bool) -> dict[str, Array]:
        width = _share(self.features, self.learners)
        stop, start = self.split
        options = {"remat": self.remat, "dtype": self.dtype}

        shared = self.net(stop=stop, name="shared", **options)
        maps = shared(images, train=train)["features"]
        vectors = []
        for m in range(self.learners):
            head = self.net(start=start, name=f"head_{m}", **options)
            pooled = _pooled(self.pool, head(maps, train=train)[self.output], f"pool_{m}", train)
            vectors.append(glorot_dense(width, dtype=self.dtype, name=f"embedding_{m}")(pooled))
        return _ensemble(jnp.stack(vectors, axis=1))


abe = ABE
multi_head = MultiHead


def fill_backbone(variables: Mapping[str, Any], backbone: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of an ensemble with those of one whole backbone in every part that copies it.

    Pretrained weights go into S, into every G and into the attention's copy alike. Both are as
    `init` returns them, or one collection of those. Masks and embeddings stay as they are.
    """
    filled = {}
    for name, part in variables.items():
        if name in backbone and name in ("params", "batch_stats"):
            filled[name] = fill_backbone(part, backbone[name])
        elif name in ("shared", "attention", "head") or name.startswith("head_"):
            if missing := sorted(set(part) - set(backbone)):
                raise ValueError(
                    f"the backbone has no {', '.join(missing)}, which {name!r} needs: take weights "
                    "of the net that the ensemble is made of"
                )
            filled[name] = {child: backbone[child] for child in part}
        else:
            filled[name] = part
    return filled


def _pooled(pool, x, name, train):
    if pool is None:
        return x
    return Head(features=None, pool=pool, name=name)(x, train=train)["features"]


def _ensemble(vectors):
    learners = ops.normalize(vectors)  # [b m d]
    b, m, d = learners.shape
    return {"learners": learners, "embeddings": learners.reshape(b, m * d) / m**0.5}


def _glorot_each(learners):
    """Glorot's initialisation of kernels that lie beside each other, as if each were alone."""

    def init(key, shape, dtype=jnp.float32):
        bound = (6 / (shape[2] + shape[3] // learners)) ** 0.5
        return uniform(bound)(key, shape, dtype)

    return init


def _share(features, learners):
    if learners < 1 or features % learners:
        raise ValueError(
            f"{learners} learners cannot share {features} features: take features={learners} times "
            "those of one learner"
        )
    return features // learners
