"""Masks of positive and negative pairs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Bool, Integer

from dmljax.ops.loops import sum_over_true
from dmljax.ops.numerics import matmul
from dmljax.ops.types import Array, Labels, Pairs, ReferenceLabels, Triplets

__all__ = [
    "pairs",
    "triplets_to_pairs",
]


def pairs(
    labels: Labels,
    reference_labels: ReferenceLabels | None = None,
    *,
    ids: Integer[Array, "b"] | None = None,
    reference_ids: Integer[Array, "n"] | None = None,
    where: Bool[Array, "b"] | None = None,
    reference_where: Bool[Array, "n"] | None = None,
) -> Pairs:
    """Masks of the positive and negative pairs of anchors and references.

    Without `reference_labels` the batch is its own reference, and a row is neither positive nor
    negative of itself: it is left out by position. With references nothing is left out, unless
    `ids` and `reference_ids` name the same thing. `labels` are integers, multi-hot rows (sharing
    one class makes a positive), or ready `Pairs`, which only get the other masks applied.
    """
    own = reference_labels is None and not (isinstance(labels, Pairs) and reference_ids is not None)
    if isinstance(labels, Pairs):
        alike, unlike = map(jnp.asarray, labels)
        own = own and alike.shape[0] == alike.shape[1]
    else:
        alike = _share_a_class(labels, labels if reference_labels is None else reference_labels)
        unlike = ~alike
    keep = ~jnp.eye(alike.shape[0], dtype=bool) if own else jnp.ones(alike.shape, bool)
    if ids is not None:
        other = ids if reference_ids is None else reference_ids
        keep &= jnp.asarray(ids)[:, None] != jnp.asarray(other)[None, :]
    if where is not None:
        keep &= jnp.asarray(where)[:, None]
    if own and reference_where is None:
        reference_where = where
    if reference_where is not None:
        keep &= jnp.asarray(reference_where)[None, :]
    return Pairs(alike & keep, unlike & keep)


def _share_a_class(labels, reference_labels):
    labels, reference_labels = jnp.asarray(labels), jnp.asarray(reference_labels)
    if labels.ndim == 1:
        return labels[:, None] == reference_labels[None, :]
    return matmul(labels.astype(jnp.float32), reference_labels.astype(jnp.float32).T) > 0


def triplets_to_pairs(chosen: Pairs | Triplets) -> Pairs:
    """The pairs that stand in at least one chosen triplet. `Pairs` come back unchanged."""
    if isinstance(chosen, Pairs):
        return chosen
    (positives, negatives), distances, select_fn = chosen
    square = distances.shape[0] == distances.shape[1]

    def mark(column, valid, distances, negatives):
        d_ap = jnp.take_along_axis(distances, column[:, None], axis=1)
        d_pn = distances[column] if square else None
        selected = select_fn(d_ap, distances, d_pn) & negatives & valid[:, None]
        hit = jnp.any(selected, axis=1)
        rows = jnp.arange(len(column))
        return jnp.zeros(negatives.shape, jnp.int32).at[rows, column].add(hit), selected.astype(
            jnp.int32
        )

    kept = sum_over_true(mark, positives, distances, negatives)
    return Pairs(positives & (kept[0] > 0), negatives & (kept[1] > 0))
