"""Masks of positive and negative pairs."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from dmljax.ops.loops import sum_over_true, take_column
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
    """Computes masks of the positive and negative pairs of anchors and references.

    Args:
        labels: Classes of the anchors: int `[b]`; or multi-hot bool `[b c]`, where rows that share
            a class are positives; or `ops.Pairs`, which the other arguments then narrow.
        reference_labels: Classes of the references, in the form of `labels`. Without them the batch
            is compared with itself, and a row is neither positive nor negative of itself.
        ids: An id of each anchor. A pair with equal ids is neither positive nor negative.
        reference_ids: An id of each reference; by default `ids`.
        where: Anchors that count.
        reference_where: References that count; by default `where`, if a batch is compared with
            itself.
    """
    if not isinstance(labels, Pairs):
        check_integers("labels", labels)
        check_integers("reference_labels", reference_labels)
    check_integers("ids", ids)
    check_integers("reference_ids", reference_ids)
    within_batch = reference_labels is None and not (
        isinstance(labels, Pairs) and reference_ids is not None
    )
    if isinstance(labels, Pairs):
        positives, negatives = map(jnp.asarray, labels)
        within_batch = within_batch and positives.shape[0] == positives.shape[1]
    else:
        positives = _share_a_class(labels, labels if reference_labels is None else reference_labels)
        negatives = ~positives
    if within_batch:
        keep = ~jnp.eye(positives.shape[0], dtype=bool)
    else:
        keep = jnp.ones(positives.shape, bool)
    if ids is not None:
        reference_ids = ids if reference_ids is None else reference_ids
        keep &= jnp.asarray(ids)[:, None] != jnp.asarray(reference_ids)[None, :]
    if where is not None:
        keep &= jnp.asarray(where)[:, None]
    if within_batch and reference_where is None:
        reference_where = where
    if reference_where is not None:
        keep &= jnp.asarray(reference_where)[None, :]
    return Pairs(positives & keep, negatives & keep)


def triplets_to_pairs(mined: Pairs | Triplets) -> Pairs:
    """Returns the pairs that are part of a triplet of `mined`. Returns `Pairs` unchanged."""
    if isinstance(mined, Pairs):
        return mined
    (positives, negatives), distances, select_fn = mined
    square = distances.shape[0] == distances.shape[1]

    def mark(column, valid, distances, negatives):
        d_pn = distances[column] if square else None
        selected = select_fn(take_column(distances, column), distances, d_pn)
        selected = selected & negatives & valid[:, None]
        positive_is_used = jnp.any(selected, axis=1)
        rows = jnp.arange(len(column))
        uses = jnp.zeros(negatives.shape, jnp.int32)
        uses = uses.at[rows, column].add(positive_is_used, unique_indices=True)
        return uses, selected.astype(jnp.int32)

    uses = sum_over_true(mark, positives, distances, negatives)
    return Pairs(positives & (uses[0] > 0), negatives & (uses[1] > 0))


def check_no_names(name: str, labels) -> None:
    """Raises for text, which JAX arrays cannot hold."""
    if (array := _of_numpy(labels)) is not None and array.dtype.kind in "OSTU":
        raise ValueError(
            f"{name} are {array.dtype}: give integers (np.unique(names, return_inverse=True)[1] "
            "makes them of names)"
        )


def check_integers(name: str, labels) -> None:
    """Raises for text, and for integers that JAX would cut to 32 bits, so that they collide."""
    check_no_names(name, labels)
    array = _of_numpy(labels)
    if array is None or array.dtype.kind not in "iu" or not array.size:
        return
    limits = np.iinfo(jax.dtypes.canonicalize_dtype(array.dtype))
    low, high = array.min(), array.max()
    if low < limits.min or high > limits.max:
        raise ValueError(
            f"{name} reach {high if high > limits.max else low}, which {limits.dtype} cannot hold: "
            f"np.unique({name}, return_inverse=True)[1] numbers them from 0"
        )


def _of_numpy(labels) -> np.ndarray | None:
    """Returns `labels` in numpy, with all of their bits; None for what JAX holds or traces."""
    if labels is None or any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(labels)):
        return None
    return np.asarray(labels)


def _share_a_class(labels, reference_labels):
    labels, reference_labels = jnp.asarray(labels), jnp.asarray(reference_labels)
    if labels.ndim == 1:
        return labels[:, None] == reference_labels[None, :]
    return matmul(labels.astype(jnp.float32), reference_labels.astype(jnp.float32).T) > 0
