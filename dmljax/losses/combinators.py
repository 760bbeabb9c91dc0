"""Around the losses: several at once, and what to log beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import prepare
from dmljax.ops import Array, DistanceFn, Labels, ReferenceLabels

__all__ = ["stats", "weighted_sum"]


def weighted_sum(losses: Mapping[str, tuple[float | Array, Callable]]) -> Callable:
    """`{name: (weight, loss_fn)}` as one function: `(sum of weight * loss, {name: loss})`.

    All get the same arguments; wrap one that needs others in a lambda or `functools.partial`.
    """
    if not losses:
        raise ValueError("weighted_sum of no losses: pass {name: (weight, loss_fn), ...}")
    losses = dict(losses)

    def loss(*args, **keywords) -> tuple[Array, dict[str, Array]]:
        values = {name: loss_fn(*args, **keywords) for name, (_, loss_fn) in losses.items()}
        total = jnp.sum(jnp.stack([weight * values[name] for name, (weight, _) in losses.items()]))
        return total, values

    return loss


def stats(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float | Float[Array, ""] = 0.2,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """How a batch stands, for the log; no gradients.

    * `positive_distance`, `negative_distance`: means over pairs. Both near 0 is a collapse.
    * `active_triplets`: the share of all triplets with d_ap - d_an + margin > 0. A loss that stays
      at its margin has a share of 1 here, and one that has nothing left to learn has 0.
    * `active_positives`, `active_negatives`: the share of those pairs that stand in an active
      triplet.
    """
    embeddings = jax.lax.stop_gradient(jnp.asarray(embeddings))
    if references is not None:
        references = jax.lax.stop_gradient(jnp.asarray(references))
    batch = prepare(embeddings, labels, references, reference_labels, where, None)
    distances = distance_fn(batch.x, batch.y)
    positives, negatives = batch.pairs
    result = {
        "positive_distance": ops.reduce(ops.mean, distances, positives),
        "negative_distance": ops.reduce(ops.mean, distances, negatives),
    }
    margin = jnp.asarray(margin, distances.dtype)
    farthest = jnp.max(distances, axis=1, where=positives, initial=-jnp.inf, keepdims=True)
    nearest = jnp.min(distances, axis=1, where=negatives, initial=jnp.inf, keepdims=True)
    # Only anchors with both kinds of pairs have triplets.
    positives = positives & (nearest < jnp.inf)
    negatives = negatives & (farthest > -jnp.inf)

    def count(column, valid, distances, negatives, margin):
        d_ap = jnp.take_along_axis(distances, column[:, None], axis=1)
        keep = negatives & valid[:, None]
        return ops.mean((d_ap - distances + margin > 0).astype(distances.dtype), keep)

    active, all_triplets = ops.sum_over_true(count, positives, distances, negatives, margin)
    result["active_triplets"] = ops.divide(active, all_triplets)
    for name, hit, pairs in (
        ("active_positives", distances - nearest + margin > 0, positives),
        ("active_negatives", farthest - distances + margin > 0, negatives),
    ):
        result[name] = ops.reduce(ops.mean, hit.astype(distances.dtype), pairs)
    return result
