"""Sums of losses, a loss of nested prefixes, and statistics to log with a loss."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.losses._common import Batch, loss_of, prepare
from dmljax.ops import Array, DistanceFn, Scalar
from dmljax.ops.types import check_function

__all__ = ["prefixes", "stats", "weighted_sum"]


def weighted_sum(losses: Mapping[str, tuple[float | Array, Callable]]) -> Callable:
    """Combines losses to one function, which returns `(sum of weight * loss, {name: loss})`.

    Args:
        losses: `{name: (weight, loss_fn)}`. All losses get the arguments of the returned function.
            Bind others with `functools.partial`, and drop some with a function of your own, such as
            `lambda x, *_, **__: losses.lp(x)`.

    >>> loss_fn = losses.weighted_sum({"a": (1, losses.contrastive), "b": (0.5, losses.supcon)})
    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> total, values = loss_fn(x, np.array([0, 0, 1, 1]))
    >>> print(f"{total:.3f} = {values['a']:.3f} + 0.5 * {values['b']:.3f}")
    0.770 = 0.738 + 0.5 * 0.064
    """
    pairs = losses.values() if isinstance(losses, Mapping) else ()
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"`losses` must be {{name: (weight, loss_fn), ...}}, got {losses!r}")
    losses = dict(losses)
    for name, (_, loss_fn) in losses.items():
        check_function(f"the loss {name!r}", loss_fn, "losses.triplet")

    def loss(*args, **keywords) -> tuple[Array, dict[str, Array]]:
        values = {name: loss_fn(*args, **keywords) for name, (_, loss_fn) in losses.items()}
        total = jnp.sum(jnp.stack([weight * values[name] for name, (weight, _) in losses.items()]))
        return total, values

    return loss


def prefixes(
    loss_fn: Callable, *, dims: Sequence[int], weights: Sequence[float] | None = None
) -> Callable:
    """Sums a loss over the leading `dims` dimensions of the embeddings (Matryoshka).

        sum_m weight_m loss(x[:m] / |x[:m]|, ...)

    References and proxies are cut and normalized in the same way, so all prefixes share them. The
    returned function takes the arguments of `loss_fn`; a miner sees the distances of each prefix. A
    loss that reads the lengths of embeddings (`sphereface`, `large_margin_softmax`) reads 1.

    Reference: Kusupati et al., Matryoshka Representation Learning, NeurIPS 2022, arXiv:2205.13147.

    Args:
        loss_fn: A loss of pairs, against proxies or of two views.
        dims: Ascending numbers of dimensions. Include the whole width to train it, too.
        weights: A weight for each of `dims`; None weighs all by 1, as the paper does.

    >>> loss_fn = losses.prefixes(losses.contrastive, dims=(1, 2))
    >>> x, labels = np.array([[1, 0], [0.8, 0.6], [-1, 0.5]], np.float32), np.array([0, 0, 1])
    >>> first, both = (losses.contrastive(x[:, :m], labels) for m in (1, 2))
    >>> print(f"{loss_fn(x, labels):.3f} = {first:.3f} + {both:.3f}")
    0.632 = 0.000 + 0.632
    """
    check_prefixes(dims)
    weights = (1.0,) * len(dims) if weights is None else tuple(weights)
    if len(weights) != len(dims):
        raise ValueError(f"{len(dims)} prefixes need {len(dims)} weights, not {list(weights)}")

    @functools.wraps(loss_fn)
    def loss(embeddings, *args, **keywords):
        check_prefixes(dims, width=np.shape(embeddings)[1])
        arrays = (embeddings, *args)
        total = 0
        for dim, weight in zip(dims, weights, strict=True):

            def cut(value: Any, dim: int = dim) -> Any:
                if not _has_width(value, embeddings):
                    return value
                return ops.normalize(ops.widen(value)[..., :dim])

            values = {name: cut(value) for name, value in keywords.items()}
            total = total + weight * loss_fn(*map(cut, arrays), **values)
        return total

    return loss


def check_prefixes(dims: Sequence[int], *, width: int | None = None) -> None:
    """Raises unless `dims` are ascending numbers of dimensions, at most `width`."""
    ends = [0, *dims] if width is None else [0, *dims, width + 1]
    if not dims or any(a >= b for a, b in itertools.pairwise(ends)):
        limit = "" if width is None else f", at most the width {width} of the embeddings"
        raise ValueError(
            f"prefixes are ascending numbers of dimensions, such as (64, 128){limit}, not "
            f"{list(dims)}"
        )


def _has_width(value: Any, embeddings: Array) -> bool:
    """Returns whether a value is an array of vectors in the space of the embeddings."""
    if not hasattr(value, "dtype") or np.ndim(value) < 2:
        return False
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return is_float and value.shape[-1] == np.shape(embeddings)[1]


@loss_of(prepare, without=("reduce_fn", "mine_fn", "tile"))
def stats(
    batch: Batch, *, margin: Scalar = 0.2, distance_fn: DistanceFn = ops.unit_euclidean
) -> dict[str, Float[Array, ""]]:
    """Computes statistics that tell a collapsed loss from a solved one, without a gradient.

    * `positive_distance`, `negative_distance`: means over pairs. If both are near 0, the
      embeddings have collapsed into a point.
    * `active_triplets`: the fraction of all triplets with d_ap - d_an + margin > 0. It is 1 for a
      loss that stays at its margin, and 0 for one that has nothing left to learn.
    * `active_positives`, `active_negatives`: the fraction of the pairs that are part of such a
      triplet.

    Args:
        margin: Margin of a triplet.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> stats = losses.stats(x, np.array([0, 0, 1, 1]), margin=0.2)
    >>> print(f"{stats['positive_distance']:.3f} {stats['negative_distance']:.3f}")
    0.632 1.378
    """
    distances = jax.lax.stop_gradient(distance_fn(batch.anchors, batch.references))
    margin = jax.lax.stop_gradient(jnp.asarray(margin, distances.dtype))
    positives, negatives = batch.pairs
    statistics: dict[str, Array] = {
        "positive_distance": ops.reduce(ops.mean, distances, positives),
        "negative_distance": ops.reduce(ops.mean, distances, negatives),
    }
    farthest = jnp.max(distances, axis=1, where=positives, initial=-jnp.inf, keepdims=True)
    nearest = jnp.min(distances, axis=1, where=negatives, initial=jnp.inf, keepdims=True)
    # An anchor without positives, or without negatives, has no triplets.
    positives = positives & (nearest < jnp.inf)
    negatives = negatives & (farthest > -jnp.inf)

    def count(column, valid, distances, negatives, margin):
        d_ap = ops.take_column(distances, column)
        keep = negatives & valid[:, None]
        return ops.mean((d_ap - distances + margin > 0).astype(distances.dtype), keep)

    active, all_triplets = ops.sum_over_true(count, positives, distances, negatives, margin)
    statistics["active_triplets"] = ops.divide(active, all_triplets)
    for name, is_active, pairs in (
        ("active_positives", distances - nearest + margin > 0, positives),
        ("active_negatives", farthest - distances + margin > 0, negatives),
    ):
        statistics[name] = ops.reduce(ops.mean, is_active.astype(distances.dtype), pairs)
    return statistics
