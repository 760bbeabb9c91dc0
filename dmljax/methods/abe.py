"""Attention-based ensemble (ABE; Kim et al., ECCV 2018): learners that share most of their net.

In the paper's letters: S is the first stages of the backbone and G its remaining stages, then
learner m is B_m(x) = G(S(x) * A_m(S(x))), a unit vector, with a mask A_m over channels and places.
Each learner has a metric loss, and a divergence keeps them apart. The control in the paper has
several heads and no attention.

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

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.methods import assemble, base
from dmljax.nets.googlenet import GoogLeNet
from dmljax.nets.heads import Head
from dmljax.nets.initializers import uniform
from dmljax.nets.layers import Conv, glorot_dense
from dmljax.ops import Array, Labels, MineFn, Scalar
from dmljax.ops.devices import over_devices

__all__ = ["abe", "contrastive", "divergence", "drawn_pairs", "mean_divergence", "min_max"]


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
    """Returns the variables of an ensemble, with a backbone's values in every copy of its stages.

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


def contrastive(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: Scalar = 1.0,
    push_positives: bool = False,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
) -> Float[Array, ""]:
    """Computes ABE's loss: (sum of d^2 over positives + [margin - d^2]+ over negatives) / pairs.

    (Kim et al., ECCV 2018.) `dmljax.losses.contrastive` differs in two ways: it squares the hinge
    instead of the distance inside it, and it averages positives and negatives separately.

    * `embeddings`: used as they are; in ABE they are unit vectors.
    * `push_positives=True` also applies the hinge to positives, as one published implementation
      does by omitting the factor (1 - y).
    * `where`: rows that count. `mine_fn`: narrows the pairs.
    """
    x = ops.widen(embeddings)
    squares = ops.squared_euclidean(x, x)
    pairs = ops.pairs(labels, where=where)
    if mine_fn is not None:
        distances = jax.lax.stop_gradient(ops.unit_euclidean(x, x))
        pairs = ops.triplets_to_pairs(mine_fn(distances, pairs))
    positives, negatives = pairs
    pushed = positives | negatives if push_positives else negatives
    total = jnp.sum(squares, where=positives)
    total += jnp.sum(jax.nn.relu(margin - squares), where=pushed)
    return ops.divide(total, jnp.sum(positives | negatives, dtype=total.dtype))


def divergence(learners: Float[Array, "b m d"], *, margin: Scalar = 1.0) -> Float[Array, ""]:
    """Computes the mean over images of sum_{p<q} [margin - |B_p(x) - B_q(x)|^2]+ over learners.

    (Kim et al., ECCV 2018.) It pushes the learners of one image apart. The paper also sums over
    images, so its weight depends on the size of the batch.
    """
    first, second = np.triu_indices(learners.shape[1], 1)
    if not len(first):
        return jnp.zeros((), learners.dtype)
    gaps = learners[:, first] - learners[:, second]  # [b pairs d]
    hinges = jax.nn.relu(margin - jnp.sum(gaps * gaps, axis=2))
    return jnp.mean(jnp.sum(hinges, axis=1))


def mean_divergence(learners: Float[Array, "b m d"], *, margin: Scalar = 1.0) -> Float[Array, ""]:
    """Divides `divergence` by the m (m - 1) / 2 pairs of learners, as public code does."""
    count = learners.shape[1]
    return divergence(learners, margin=margin) / max(count * (count - 1) // 2, 1)


def drawn_pairs(labels: Array) -> ops.Pairs:
    """Returns only the pairs of rows i and i + b/2, which `data.sampling.abe_pairs` draws."""
    b = len(labels)
    if b % 2:
        raise ValueError(f"drawn pairs need a batch of an even number of rows, not {b}")
    rows = jnp.arange(b)
    partner = rows[None, :] == ((rows + b // 2) % b)[:, None]
    positives, negatives = ops.pairs(labels)
    return ops.Pairs(positives & partner, negatives & partner)


def abe(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    learners: int = 8,
    dim: int = 512,
    split: Sequence[str] = ("pool3", "4a"),
    attention: str | None = "4e",
    attention_pools: bool = True,
    mask_fn: Callable = jax.nn.sigmoid,
    pool_fn: Callable | None = None,
    pairs_fn: Callable | None = None,
    lambda_div: float = 1.0,
    divergence_fn: Callable = divergence,
) -> base.Method:
    """Builds ABE-M (Kim et al., 2018): sum_m loss_fn(B_m(x), y) + lambda_div divergence_fn(B(x)).

    `embed` returns the unit vectors of the learners side by side, divided by sqrt(M). A ranking by
    it is a ranking by the mean of the learners' squared distances. The parts are the learners.

    * `loss_fn`, `mine_fn`: any pair loss; `contrastive` of this module is the paper's.
    * `learners`, `dim`: M, and the dimensions of all learners together.
    * `split`: the last stage of `net` that all learners share, and the stage after it. `attention`:
      the last stage of the attention's copy. The defaults are stages of Caffe's GoogLeNet. Any
      backbone with `start` and `stop` will do: for `convnet` `split=("conv3", "conv4")` and
      `attention="conv4"`, for `dinov2_s14` `split=("5", "6")` and `attention="8"`, for `convnext_t`
      `split=("2.4", "2.5")` and `attention="2.8"`. The class token and the registers of a `vit` get
      masks as patches do.
    * `attention=None`: the control in the paper, M separate heads on the shared stages. One learner
      is then a plain net. The paper's rows have `lambda_div=0`, and it reports that the divergence
      changes nothing here.
    * `attention_pools=False`: the attention's copy of the net has no pools, so it can go on behind
      a pool, as in figure 7 of the paper. Only `googlenet` can leave them out.
    * `mask_fn`: logits -> masks `[b h w c]`. The paper does not name it; one port reports a
      sigmoid, another uses `min_max` instead.
    * `pool_fn`: how the last map of a learner becomes a vector; the paper takes the mean.
    * `pairs_fn`: labels -> pairs that the loss compares. None compares all pairs of the batch,
      `drawn_pairs` only those that the sampler drew. The paper does not say which.
    * `divergence_fn`: learners `[b m d]` -> number. It gets the `step` if it has this argument.
    """
    del classes
    last_shared, first_separate = split
    options = {
        "learners": learners,
        "features": dim,
        "net": _like(net),
        "split": (last_shared, first_separate),
        "pool_fn": pool_fn,
        "remat": net.remat,
        "dtype": net.dtype,
    }
    loss_fn = base.with_miner(loss_fn, mine_fn)
    if attention is None:
        heads = MultiHead(**options)
        return _ensemble_method(heads, loss_fn, pairs_fn, lambda_div, divergence_fn)[0]
    if not attention_pools and not hasattr(net, "pools"):
        raise ValueError(
            f"attention_pools=False: {type(net).__name__} has no pools to leave out; take googlenet"
        )
    attention_net = options["net"] if attention_pools else _like(net.clone(pools=False))
    ensemble = ABE(attention=attention, attention_net=attention_net, mask_fn=mask_fn, **options)
    method, outputs_fn = _ensemble_method(ensemble, loss_fn, pairs_fn, lambda_div, divergence_fn)

    def spatial_masks(params, model_state, images):
        return {"masks": outputs_fn(params, model_state, images)["masks"]}

    assert method.inspect is not None
    return method._replace(inspect=method.inspect._replace(spatial_masks=spatial_masks))


def _ensemble_method(
    ensemble: nn.Module,
    loss_fn: Callable,
    pairs_fn: Callable | None,
    lambda_div: float,
    divergence_fn: Callable,
) -> tuple[base.Method, Callable]:
    """Builds the method of an ensemble, and the function of its outputs."""
    learners = ensemble.learners
    divergence_fn = base.with_step(divergence_fn)
    module = assemble.modules(lambda run, images: run["net"](images), net=ensemble)

    def init(key, batch, *, backbone=None):
        params, model_state, _ = module.init(key, batch["images"])
        if backbone is None:
            return params, model_state
        variables = {"params": params["net"]}
        if "batch_stats" in model_state:
            variables["batch_stats"] = model_state["batch_stats"]["net"]
        variables = with_backbone(variables, backbone)
        return assemble.with_backbone(params, model_state, variables)

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = module.apply(
            params, model_state, batch["images"], train=True, key=jax.random.fold_in(key, 0)
        )
        x = outputs["learners"]  # [b m d]
        labels = batch["labels"] if pairs_fn is None else pairs_fn(batch["labels"])
        keys = jax.random.split(jax.random.fold_in(key, 1), learners)

        def metric(x, key):
            return loss_fn(x, labels, key=key, step=step)

        metric_losses = jax.vmap(metric, in_axes=(1, 0))(x, keys)
        metrics = base.diagnostics(outputs["embeddings"], batch["labels"])
        metrics["metric"] = jnp.sum(metric_losses)
        metrics["divergence"] = divergence_fn(x, step=step)
        if learners > 1:
            metrics["self_cosine"] = _self_cosine(jax.lax.stop_gradient(x))
        return metrics["metric"] + lambda_div * metrics["divergence"], (model_state, metrics)

    def outputs_fn(params, model_state, images):
        return module.apply(params, model_state, images, train=False)[0]

    def embed(params, model_state, images):
        return ops.normalize(outputs_fn(params, model_state, images)["embeddings"])

    def parts(params, model_state, images):
        vectors = outputs_fn(params, model_state, images)["learners"]
        return {f"learner_{m}": vectors[:, m] for m in range(learners)}

    inspect = base.Inspect(parts=parts if learners > 1 else None)
    copies = ["shared", "attention", "head", *(f"head_{m}" for m in range(learners))]
    backbone = tuple(f"net/{copy}" for copy in copies)
    method = base.Method(init, loss, embed, None, inspect, backbone=backbone, per_class=())
    return method, outputs_fn


def _like(net: nn.Module) -> Callable[..., nn.Module]:
    """Returns a function that creates nets like `net`, with other stages and names."""
    fields = {f.name: getattr(net, f.name) for f in dataclasses.fields(net)}
    if not {"start", "stop"} <= set(fields):
        raise ValueError(
            f"abe needs a net that runs from any stage to any other, and {type(net).__name__} does "
            "not (it has no start and stop): take googlenet, resnet50, vit_s16, ..."
        )
    set_by_ensemble = ("parent", "name", "remat", "dtype")
    options = {name: value for name, value in fields.items() if name not in set_by_ensemble}
    return functools.partial(type(net), **options)


def _self_cosine(learners: Float[Array, "b m d"]) -> Float[Array, ""]:
    """Computes the mean cosine between two learners of an image; collapsed ones are near 1."""
    m = learners.shape[1]
    total = jnp.sum(learners, axis=1)  # |sum of unit vectors|^2 = m + 2 sum_{p<q} cos
    return jnp.mean(jnp.sum(total * total, axis=1) - m) / (m * (m - 1))
