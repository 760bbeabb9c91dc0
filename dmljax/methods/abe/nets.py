"""Ensembles of learners that share most of their net: with attention (ABE), and with several heads.

In the paper's letters: S is the first stages of the backbone and G its remaining stages, then
learner m is B_m(x) = G(S(x) * A_m(S(x))), a unit vector, with a mask A_m over channels and places.

Both ensembles are called as `(images [b h w c], *, train)` and return, in float32,

* "learners" `[b m d]`: the unit vectors of the m learners.
* "embeddings" `[b m*d]`: these side by side, divided by sqrt(m). They are unit vectors, and their
  squared distance is the mean of the squared distances of the learners.

Their fields, with the published defaults for Caffe's GoogLeNet:

* `learners` and `features`: the number of learners, and the dimensions of all together.
* `net`: makes a backbone; called with `start` and `stop` (stages), `name`, `remat` and `dtype`. The
  class token and the registers of a `vit` pass from S to G as further places.
* `split`: the last stage of S and the first stage of G.
* `pool_fn`: pools the map of G, see `methods.assemble.encoder`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.methods import assemble
from dmljax.nets.googlenet import GoogLeNet
from dmljax.nets.heads import Head
from dmljax.nets.initializers import uniform
from dmljax.nets.layers import Conv, glorot_dense
from dmljax.ops import Array
from dmljax.ops.devices import over_devices

__all__ = ["ABE", "MultiHead", "min_max", "with_backbone"]


def min_max(logits: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """Scales every channel of every image to a mask from 0 to 1; a constant channel gives 0."""
    low = jnp.min(logits, axis=(1, 2), keepdims=True)
    high = jnp.max(logits, axis=(1, 2), keepdims=True)
    return (logits - low) / jnp.where(high > low, high - low, 1)


class ABE(nn.Module, kw_only=True):
    """The attention-based ensemble (Kim et al., ECCV 2018); ABE-8 by default.

    S ("shared") and G ("head"), with the linear layer after it ("embedding"), are the same for all
    learners. The learners differ in their masks A_m: a copy of the stages up to `attention`, which
    all learners share, and a 1x1 convolution for each ("masks"), then `mask_fn` (logits -> mask).

    `attention_net` makes the attention's copy; None makes it like the others. Its map must have the
    size of the map of S, so it may have no stride: `functools.partial(GoogLeNet, pools=False)` runs
    from any stage to any other.

    Also returns "masks" `[b m h w c]`. The convolutions of all learners are one kernel: the m-th
    group of c outputs belongs to learner m.
    """

    learners: int = 8
    features: int = 512
    net: Callable = GoogLeNet
    split: tuple[str, str] = ("pool3", "4a")
    attention: str = "4e"
    attention_net: Callable | None = None
    mask_fn: Callable = jax.nn.sigmoid
    pool_fn: Callable | None = None
    remat: bool | str = False
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, "b h w c"], *, train: bool) -> dict[str, Array]:
        width = _learner_width(self.features, self.learners)
        stop, start = self.split
        options = {"remat": self.remat, "dtype": self.dtype}

        shared = self.net(stop=stop, name="shared", **options)
        shared_outputs = shared(images, train=train)
        grid = shared_outputs["features"].shape[1:3]
        make_attention = self.attention_net or self.net
        attention = make_attention(start=start, stop=self.attention, name="attention", **options)
        attention_outputs = _next(attention, shared_outputs, train)
        if attention_outputs["features"].shape[1:3] != grid:
            (mask_h, mask_w), (h, w) = attention_outputs["features"].shape[1:3], grid
            raise ValueError(
                f"masks of {mask_h} x {mask_w} do not fit maps of {h} x {w}: let the attention end "
                f"before a stage with a stride, not at {self.attention!r}, or leave out its pools"
            )
        maps = _places(shared_outputs)
        b, h, w, c = maps.shape
        logits = Conv(
            self.learners * c,
            1,
            use_bias=True,
            dtype=self.dtype,
            kernel_init=_glorot_of_each_learner(self.learners),
            name="masks",
        )(_places(attention_outputs))
        masks = self.mask_fn(ops.widen(logits)).reshape(b, h, w, self.learners, c)
        masks = jnp.moveaxis(masks, 3, 1)  # [b m h w c]

        # Learners are neighbors in the batch of G, image by image, so that a sharded batch stays
        # in place.
        masked = (maps[:, None] * masks.astype(maps.dtype)).reshape(b * self.learners, h, w, c)
        masked = over_devices(masked, batch=b)
        head = self.net(start=start, name="head", **options)
        inputs = _from_places(masked, grid)
        pooled = _pooled(self.pool_fn, _next(head, inputs, train), "pool", train)
        vectors = glorot_dense(width, dtype=self.dtype, name="embedding")(pooled)
        if "prefix" in inputs:
            masks = masks[:, :, -grid[0] * grid[1] :].reshape(b, self.learners, *grid, c)
        return _outputs(vectors.reshape(b, self.learners, width)) | {"masks": masks}


class MultiHead(nn.Module, kw_only=True):
    """The control in the paper of ABE: every learner has its own G, and there is no attention.

    S is "shared"; learner m has "head_m" and a linear layer "embedding_m". One learner is the
    backbone with a linear layer.
    """

    learners: int = 8
    features: int = 512
    net: Callable = GoogLeNet
    split: tuple[str, str] = ("pool3", "4a")
    pool_fn: Callable | None = None
    remat: bool | str = False
    dtype: Any = None

    @nn.compact
    def __call__(self, images: Float[Array, "b h w c"], *, train: bool) -> dict[str, Array]:
        width = _learner_width(self.features, self.learners)
        stop, start = self.split
        options = {"remat": self.remat, "dtype": self.dtype}

        shared = self.net(stop=stop, name="shared", **options)
        shared_outputs = shared(images, train=train)
        vectors = []
        for m in range(self.learners):
            head = self.net(start=start, name=f"head_{m}", **options)
            pooled = _pooled(self.pool_fn, _next(head, shared_outputs, train), f"pool_{m}", train)
            vectors.append(glorot_dense(width, dtype=self.dtype, name=f"embedding_{m}")(pooled))
        return _outputs(jnp.stack(vectors, axis=1))


def with_backbone(variables: Mapping[str, Any], backbone: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of an ensemble, with the values of one backbone in every copy of its stages.

    S, every G and the attention's copy get pretrained values; masks and linear layers keep theirs.
    Both arguments are as `init` returns them, or both are one of its collections.
    """
    replaced = {}
    for name, value in variables.items():
        if name in backbone and name in ("params", "batch_stats"):
            replaced[name] = with_backbone(value, backbone[name])
        elif name in ("shared", "attention", "head") or name.startswith("head_"):
            replaced[name] = _subtree(value, backbone, name)
        else:
            replaced[name] = value
    return replaced


def _subtree(tree, backbone, name):
    """Selects the values of `backbone` at the paths of `tree`, which has some of its stages."""
    if missing := sorted(set(tree) - set(backbone)):
        raise ValueError(
            f"the backbone has no {', '.join(missing)}, which {name!r} needs: take weights of the "
            "net that the ensemble is made of"
        )
    return {
        child: _subtree(value, backbone[child], name)
        if isinstance(value, Mapping)
        else backbone[child]
        for child, value in tree.items()
    }


def _next(net, outputs, train):
    """Applies the next stages of a net to the map and to any tokens in front of it."""
    tokens = {"prefix": outputs["prefix"]} if "prefix" in outputs else {}
    return net(outputs["features"], train=train, **tokens)


def _places(outputs):
    """Returns all positions of the outputs as a map; with p tokens first, `[b p+h*w 1 c]`."""
    maps = outputs["features"]
    if "prefix" not in outputs:
        return maps
    b, h, w, c = maps.shape
    return jnp.concatenate((outputs["prefix"], maps.reshape(b, h * w, c)), axis=1)[:, :, None]


def _from_places(places, grid):
    """Inverts `_places`."""
    if places.shape[1:3] == grid:
        return {"features": places}
    b, count, _, c = places.shape
    prefix, patches = jnp.split(places[:, :, 0], [count - grid[0] * grid[1]], axis=1)
    return {"features": patches.reshape(b, *grid, c), "prefix": prefix}


def _pooled(pool_fn, outputs, name, train):
    """Pools the map of a backbone with these outputs; `name` is the module of a learned pool."""
    output, pool_fn = assemble.pooling(pool_fn)
    if pool_fn is None:
        return assemble.output_of(outputs, output)
    head = Head(features=None, pool_fn=pool_fn, name=name)
    return head(assemble.output_of(outputs, output), train=train)["features"]


def _outputs(vectors):
    learners = ops.normalize(vectors)  # [b m d]
    b, m, d = learners.shape
    return {"learners": learners, "embeddings": learners.reshape(b, m * d) / m**0.5}


def _glorot_of_each_learner(learners):
    """Draws Glorot's initial values for the concatenated kernels of several learners."""

    def init(key, shape, dtype=jnp.float32):
        bound = (6 / (shape[2] + shape[3] // learners)) ** 0.5
        return uniform(bound)(key, shape, dtype)

    return init


def _learner_width(features, learners):
    if learners < 1 or features % learners:
        raise ValueError(
            f"{learners} learners cannot share {features} features: take a multiple of {learners}"
        )
    return features // learners
