"""What losses do first: check their arguments, widen to float32, mask, pair up, mine."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dmljax import ops
from dmljax.ops import Array, MineFn, Pairs, Scalar, Triplets
from dmljax.ops.masks import check_integers, check_no_names
from dmljax.ops.types import check_function


class Batch(NamedTuple):
    """The checked arguments of a pair loss."""

    anchors: Array  # [b d], 0 in rows that do not count
    references: Array  # [n d], the same object as `anchors` if the batch is compared with itself
    mined: Pairs | Triplets
    where: Array  # [b], the anchors that count

    @property
    def pairs(self) -> Pairs:
        return ops.triplets_to_pairs(self.mined)

    @property
    def within_batch(self) -> bool:
        return self.references is self.anchors

    def cosines(self) -> Array:
        """[b n]: the cosine of every anchor and reference."""
        return ops.cosine_similarity(self.anchors, self.references)


def prepare(
    embeddings: Array,
    labels,
    references: Array | None,
    reference_labels,
    where: Array | None,
    mine_fn: MineFn | None,
) -> Batch:
    """Checks the arguments that pair losses share and turns them into a `Batch`."""
    anchors, references, where = sides(embeddings, labels, references, reference_labels, where)
    within_batch = references is anchors
    if within_batch:
        pairs = ops.pairs(labels, where=where)
    elif isinstance(labels, Pairs):
        keep = jnp.asarray(where)[:, None]
        pairs = Pairs(jnp.asarray(labels.positives) & keep, jnp.asarray(labels.negatives) & keep)
    else:
        pairs = ops.pairs(labels, reference_labels, where=where)
    if mine_fn is None:
        return Batch(anchors, references, pairs, where)
    check_function("mine_fn", mine_fn, "miners.semihard_triplets")
    distances = jax.lax.stop_gradient(ops.unit_euclidean(anchors, references))
    return Batch(anchors, references, mine_fn(distances, pairs), where)


def sides(
    embeddings: Array, labels, references: Array | None, reference_labels, where: Array | None
) -> tuple[Array, Array, Array]:
    """The anchors, the references and the mask of the anchors, checked.

    The references are the same object as the anchors if the batch is compared with itself.
    """
    anchors = matrix("embeddings", embeddings)
    where = row_mask(where, anchors)
    within_batch = references is None
    if references is None:
        if reference_labels is not None:
            raise ValueError("reference_labels without references: pass both or neither")
        references = anchors
    else:
        references = matrix("references", references)
    if anchors.shape[1] != references.shape[1]:
        raise ValueError(
            f"embeddings {anchors.shape} and references {references.shape} differ in their last "
            "axis"
        )
    _check_pair_labels(labels, reference_labels, anchors, references, within_batch)
    # A row that does not count may hold anything, even NaN. Zeros keep it out of every sum.
    anchors = jnp.where(where[:, None], anchors, 0)
    return anchors, anchors if within_batch else references, where


def matrix(name: str, x: Array) -> jax.Array:
    """`x` in float32 or wider. Raises if it is not a non-empty matrix of floats."""
    x = jnp.asarray(x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a non-empty matrix [rows d], not of shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floats, not {x.dtype}: convert with astype('float32')")
    return ops.widen(x)


def row_mask(where: Array | None, x: Array) -> jax.Array:
    """The mask of the rows of `x` that count: `where`, or all rows without it."""
    if where is None:
        return jnp.ones(len(x), bool)
    where = jnp.asarray(where)
    if where.shape != x.shape[:1] or where.dtype != jnp.bool_:
        raise ValueError(f"where must be bool [{len(x)}], not {where.dtype} {list(where.shape)}")
    return where


def check_class_labels(labels, x: Array) -> None:
    """Raises unless `labels` has one integer for each row of `x`."""
    check_no_names("labels", labels)
    shape, dtype = np.shape(labels), jnp.asarray(labels).dtype
    if shape != x.shape[:1] or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"labels must be int [{len(x)}], not {dtype} {list(shape)}")


def mask_rows(x: Array, labels, classes: int, where) -> tuple[Array, Array, Array]:
    """`x` with 0, and `labels` with -1, in rows that do not count; and the rows that count."""
    check_class_labels(labels, x)
    counts = row_mask(where, x)
    _check_range(labels, classes, where)
    labels = jnp.asarray(labels)
    is_class = (labels >= 0) & (labels < classes)
    # Inside `jit` a label out of range cannot raise, so its row becomes NaN.
    x = jnp.where(is_class[:, None], x, jnp.nan)
    return jnp.where(counts[:, None], x, 0), jnp.where(counts, labels, -1), counts


def _check_range(labels, classes: int, where) -> None:
    if isinstance(labels, jax.core.Tracer) or isinstance(where, jax.core.Tracer):
        return
    labels, where = jax.device_get((labels, where))
    labels = np.asarray(labels)
    wrong = (labels < 0) | (labels >= classes)
    rows = np.flatnonzero(wrong if where is None else wrong & where)
    if rows.size:
        raise ValueError(
            f"label {labels[rows[0]]} in row {rows[0]} is none of the {classes} classes, which are "
            f"0 to {classes - 1}"
        )


def radians(degrees: Scalar) -> Scalar:
    """An angle in radians: a number in double precision for a number, an array for an array."""
    return np.deg2rad(degrees) if isinstance(degrees, int | float) else jnp.deg2rad(degrees)


def cross_entropy(positive_logits: Array, logits: Array, negatives: Array) -> jax.Array:
    """-log(e^p / (e^p + sum_N e^n)) for every entry p of `positive_logits [b k]`.

    The sum is over the row's `negatives [b n]` among `logits [b n]`. A row without negatives has
    entries 0, or NaN if p is NaN.
    """
    any_negative = jnp.any(negatives, axis=1, keepdims=True)
    negative_logits = ops.logsumexp(logits, where=negatives, keepdims=True)
    zeros = positive_logits - positive_logits
    return jnp.where(any_negative, jax.nn.softplus(negative_logits - positive_logits), zeros)


def _check_pair_labels(labels, reference_labels, anchors, references, within_batch: bool) -> None:
    if isinstance(labels, Pairs):
        if reference_labels is not None:
            raise ValueError("labels are ops.Pairs, so reference_labels would be unused")
        for name, mask in zip(Pairs._fields, labels, strict=True):
            if np.shape(mask) != (len(anchors), len(references)):
                raise ValueError(
                    f"Pairs.{name} must be bool [{len(anchors)} {len(references)}] for these "
                    f"embeddings and references, not {list(np.shape(mask))}"
                )
        return
    _check_one_label_per_row("labels", labels, "embeddings", anchors)
    if within_batch:
        return
    if reference_labels is None:
        raise ValueError("references need reference_labels (or ops.Pairs as labels)")
    _check_one_label_per_row("reference_labels", reference_labels, "references", references)
    if np.shape(labels)[1:] != np.shape(reference_labels)[1:]:
        raise ValueError(
            f"labels {list(np.shape(labels))} and reference_labels "
            f"{list(np.shape(reference_labels))} differ in their number of classes"
        )


def _check_one_label_per_row(name: str, labels, rows_name: str, x: Array) -> None:
    check_integers(name, labels)
    shape, dtype = np.shape(labels), jnp.asarray(labels).dtype
    if not (
        (len(shape) == 1 and jnp.issubdtype(dtype, jnp.integer))
        or (len(shape) == 2 and dtype == jnp.bool_)
    ):
        raise ValueError(
            f"{name} must be int [b], bool multi-hot [b c] or ops.Pairs, not {dtype} {list(shape)}"
        )
    if shape[0] != len(x):
        raise ValueError(f"{name} has {shape[0]} rows but {rows_name} has {len(x)}")
