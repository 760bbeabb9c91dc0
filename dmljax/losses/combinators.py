"""A weighted sum of losses, and statistics to log beside a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._arguments import PAIR_ARGUMENTS, describe
from dmljax.losses._common import prepare
from dmljax.ops import Array, DistanceFn, Labels, ReferenceLabels, Scalar

__all__ = ["stats", "weighted_sum"]


def weighted_sum(losses: Mapping[str, tuple[float | Array, Callable]]) -> Callable:
    """Several losses as one function that returns `(sum of weight * loss, {name: loss})`.

    Args:
        losses: `{name: (weight, loss_fn)}`. All losses get the arguments of the returned function.
            Bind others with `functools.partial`.

    >>> loss_fn = losses.weighted_sum({"a": (1, losses.contrastive), "b": (0.5, losses.supcon)})
    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> total, values = loss_fn(x, np.array([0, 0, 1, 1]))
    >>> print(f"{total:.3f} = {values['a']:.3f} + 0.5 * {values['b']:.3f}")
    0.770 = 0.738 + 0.5 * 0.064
    """
    if not losses:
        raise ValueError("weighted_sum of no losses: pass {name: (weight, loss_fn), ...}")
    losses = dict(losses)

    def loss(*args, **keywords) -> tuple[Array, dict[str, Array]]:
        values = {name: loss_fn(*args, **keywords) for name, (_, loss_fn) in losses.items()}
        total = jnp.sum(jnp.stack([weight * values[name] for name, (weight, _) in losses.items()]))
        return total, values

    return loss


@describe(PAIR_ARGUMENTS)
def stats(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: Scalar = 0.2,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """Statistics that tell a collapsed loss from a solved one, for the log. They have no gradient.

    * `positive_distance`, `negative_distance`: means over pairs. If both are near 0, the
      embeddings have collapsed into a point.
    * `active_triplets`: the share of all triplets with d_ap - d_an + margin > 0. It is 1 for a loss
      that stays at its margin, and 0 for one that has nothing left to learn.
    * `active_positives`, `active_negatives`: the share of the pairs that are part of such a
      triplet.

    Args:
        margin: Margin of a triplet.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> stats = losses.stats(x, np.array([0, 0, 1, 1]), margin=0.2)
    >>> print(f"{stats['positive_distance']:.3f} {stats['negative_distance']:.3f}")
    0.632 1.378
    """
    embeddings = jax.lax.stop_gradient(jnp.asarray(embeddings))
    if references is not None:
        references = jax.lax.stop_gradient(jnp.asarray(references))
    batch = prepare(embeddings, labels, references, reference_labels, where, None)
    distances = distance_fn(batch.anchors, batch.references)
    positives, negatives = batch.pairs
    statistics: dict[str, Array] = {
        "positive_distance": ops.reduce(ops.mean, distances, positives),
        "negative_distance": ops.reduce(ops.mean, distances, negatives),
    }
    margin = jnp.asarray(margin, distances.dtype)
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
