"""Attention-based ensemble (Kim et al., ECCV 2018): learners that look at different things.

`dmljax.nets.abe` has the nets; here are their losses, and pictures of what the learners see and of
how far they agree. `contrastive` goes into a config as 'dmljax.methods.abe:contrastive'.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.methods import base
from dmljax.nets import abe as ensembles
from dmljax.ops import Array, Labels, MineFn

__all__ = ["abe", "contrastive", "cosines", "divergence", "draw_cosines", "draw_masks"]


# --- losses -------------------------------------------------------------------------------------


def contrastive(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float = 1.0,
    push_positives: bool = False,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
) -> Float[Array, ""]:
    """The metric loss of ABE: sum(d^2 of positives, [margin - d^2]+ of negatives) / their number.

    Of embeddings as they are, which are unit vectors in ABE. The square is inside the hinge, and
    one mean goes over both kinds of pairs: `dmljax.losses.contrastive` does neither.
    `push_positives=True` hinges positives too, as a published reading of the formula that lost its
    factor (1 - y) would.
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


def divergence(
    learners: Float[Array, "b m d"], *, margin: float = 1.0, pairs: str = "sum"
) -> Float[Array, ""]:
    """sum_{p<q} [margin - |B_p(x) - B_q(x)|^2]+ of an image's own learners, mean over images.

    The paper sums over images too, which `lambda_div` would have to make up for. `pairs='mean'`
    divides by the m (m - 1) / 2 pairs of learners, as public code does.
    """
    if pairs not in ("sum", "mean"):
        raise ValueError(f"pairs is 'sum' or 'mean', not {pairs!r}")
    m = learners.shape[1]
    first, second = np.triu_indices(m, 1)
    if not len(first):
        return jnp.zeros((), learners.dtype)
    gaps = learners[:, first] - learners[:, second]  # [b pairs d]
    each = jax.nn.relu(margin - jnp.sum(gaps * gaps, axis=2))
    return jnp.mean(jnp.sum(each, axis=1)) / (len(first) if pairs == "mean" else 1)


# --- the method ---------------------------------------------------------------------------------


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
    mine_fn: Callable | None = None,
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
    loss_fn = base.mined(loss_fn, mine_fn)

    def init(key, batch):
        params, model_state, _ = whole.init(key, batch["images"])
        return params, model_state

    def loss(params, model_state, batch, *, key, step):
        del step
        outputs, model_state = whole.apply(
            params, model_state, batch["images"], train=True, key=jax.random.fold_in(key, 0)
        )
        x = outputs["learners"]  # [b m d]
        labels = batch["labels"] if pairs == "all" else _drawn(batch["labels"])
        keys = jax.random.split(jax.random.fold_in(key, 1), learners)
        each = jax.vmap(lambda x, key: loss_fn(x, labels, key=key), in_axes=(1, 0))(x, keys)
        metrics = base.stats(outputs["embeddings"], batch["labels"])
        metrics["metric"] = jnp.sum(each)
        metrics["divergence"] = divergence(x, margin=margin_div, pairs=divergence_pairs)
        if learners > 1:
            metrics["self_cosine"] = _self_cosine(jax.lax.stop_gradient(x))
        return metrics["metric"] + lambda_div * metrics["divergence"], (model_state, metrics)

    def look(params, model_state, images):
        return whole.apply(params, model_state, images, train=False)[0]

    def embed(params, model_state, images):
        return base.unit(look(params, model_state, images)["embeddings"])

    def parts(params, model_state, images):
        found = look(params, model_state, images)["learners"]
        return {f"learner_{m}": found[:, m] for m in range(learners)}

    def show(params, model_state, images):
        return {"masks": look(params, model_state, images)["masks"]}

    def fill(variables, weights):
        return {**variables, "net": ensembles.fill_backbone(variables["net"], weights)}

    return base.Method(
        init,
        loss,
        embed,
        parts if learners > 1 else None,
        show=None if heads else show,
        draw=None if heads and learners == 1 else functools.partial(_draw, masked=not heads),
        fill=fill,
    )


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


# --- pictures -----------------------------------------------------------------------------------


def _draw(
    folder: pathlib.Path,
    *,
    labels: np.ndarray,
    embeddings: Mapping[str, np.ndarray],
    read_fn: Callable,
    show_fn: Callable,
    masked: bool,
    images: int = 8,
) -> list[str]:
    """The masks of a few images, where there are any, and cosines of several learners."""
    names = []
    if masked:
        rows = np.random.default_rng(0).choice(len(labels), min(images, len(labels)), replace=False)
        chosen = read_fn(rows)
        draw_masks(show_fn(chosen)["masks"], chosen, folder / "masks.png")
        names.append("masks.png")
    if parts := [part for name, part in embeddings.items() if name]:
        draw_cosines(cosines(np.stack(parts, axis=1), labels), folder / "cosines.png")
        names.append("cosines.png")
    return names


_COLORS = {"self": "#3a6ea5", "positive": "#2a9d5c", "negative": "#d1495b"}


def cosines(
    learners: Float[np.ndarray, "n m d"], labels: Any, *, limit: int = 1000, seed: int = 0
) -> dict[str, np.ndarray]:
    """Cosines of three kinds of pairs, the paper's figure 5.

    "self": one image, two learners. "positive" and "negative": two images of one class or of two,
    one learner. Of `limit` images at most, drawn by `seed`.
    """
    learners, labels = np.asarray(learners, np.float64), np.asarray(labels)
    rows = np.arange(len(learners))
    if len(rows) > limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))
    x, labels = learners[rows], labels[rows]
    x = x / np.maximum(np.linalg.norm(x, axis=2, keepdims=True), 1e-12)
    first, second = np.triu_indices(x.shape[1], 1)
    i, j = np.triu_indices(len(x), 1)
    same = labels[i] == labels[j]
    between = np.stack([(part @ part.T)[i, j] for part in np.moveaxis(x, 1, 0)])  # [m pairs]
    return {
        "self": np.sum(x[:, first] * x[:, second], axis=2).ravel(),
        "positive": between[:, same].ravel(),
        "negative": between[:, ~same].ravel(),
    }


def draw_cosines(cosines: dict[str, np.ndarray], path: str | os.PathLike) -> None:
    """Histograms of `cosines`, each of area 1."""
    figure, axes = _figure(6.5, 3.6)
    for name, values in cosines.items():
        if len(values):
            label = f"{name} pairs, mean {np.mean(values):.2f}"
            bins = np.linspace(-1, 1, 81)
            axes.hist(
                np.clip(values, -1, 1),
                bins=bins,
                density=True,
                histtype="stepfilled",
                alpha=0.45,
                color=_COLORS[name],
                edgecolor=_COLORS[name],
                label=label,
            )
    axes.set(xlabel="cosine", ylabel="density", xlim=(-1, 1))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def draw_masks(
    masks: Float[np.ndarray, "n m h w c"],
    images: Any,
    path: str | os.PathLike,
    *,
    channel: int | None = None,
) -> None:
    """Every image (uint8) and, beside it, what each learner's mask lets through of it.

    One `channel`, as in the paper's figure 6, or the mean over all. Where a learner lets through
    more than the learners do on average is red, where less is blue; the scale is each image's own.
    """
    masks, images = np.asarray(masks, np.float64), np.asarray(images)
    maps = masks.mean(axis=4) if channel is None else masks[..., channel]  # [n m h w]
    maps = maps - maps.mean(axis=1, keepdims=True)
    n, m = maps.shape[:2]
    figure, axes = _figure(
        1.15 * (m + 1) + 0.2, 1.15 * n + 0.3, nrows=n, ncols=m + 1, squeeze=False
    )
    for line, image, row in zip(axes, images, maps, strict=True):
        peak = max(np.abs(row).max(), 1e-12)
        grey = image.mean(axis=2)
        h, w = grey.shape
        box = (-0.5, w - 0.5, h - 0.5, -0.5)
        line[0].imshow(image[:, :, 0] if image.shape[2] == 1 else image, cmap="gray", vmax=255)
        for axis, part in zip(line[1:], row, strict=True):
            # Washed out, so that colours show on dark images too.
            axis.imshow(grey, cmap="gray", vmin=-128, vmax=255, extent=box)
            axis.imshow(
                part,
                cmap="RdBu_r",
                vmin=-peak,
                vmax=peak,
                alpha=0.6,
                extent=box,
                interpolation="bilinear",
            )
        for axis in line:
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
    axes[0][0].set_title("image", fontsize=9)
    for i, axis in enumerate(axes[0][1:]):
        axis.set_title(f"learner {i}", fontsize=9)
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float, **kwargs):
    from matplotlib.figure import Figure  # of pyplot, a notebook would see its backend changed

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**kwargs)
