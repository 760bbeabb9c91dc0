"""What every pair loss does first: check, widen, mask, pair up, mine."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.ops import Array, MineFn, Pairs, Triplets


class Batch(NamedTuple):
    """Anchors `x [b d]`, references `y [n d]` (the same object where the batch is its own
    reference), what was chosen among their pairs, and which anchors count."""

    x: Array
    y: Array
    chosen: Pairs | Triplets
    where: Array

    @property
    def pairs(self) -> Pairs:
        return ops.triplets_to_pairs(self.chosen)

    @property
    def own(self) -> bool:
        return self.y is self.x


def prepare(
    embeddings: Array,
    labels,
    references: Array | None,
    reference_labels,
    where: Array | None,
    mine_fn: MineFn | None,
) -> Batch:
    """Checks the arguments that pair losses share and turns them into a `Batch`."""
    x = matrix("embeddings", embeddings)
    where = rows(where, x)
    own = references is None
    y = x if own else matrix("references", references)
    if own and reference_labels is not None:
        raise ValueError("reference_labels without references: pass both or neither")
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"embeddings {x.shape} and references {y.shape} differ in their last axis")
    check_labels(labels, reference_labels, x, y, own)
    # A row that does not count may hold anything, NaN too; zeros keep it out of every sum.
    x = jnp.where(where[:, None], x, 0)
    y = x if own else y
    if own:
        pairs = ops.pairs(labels, where=where)
    elif isinstance(labels, Pairs):
        keep = jnp.asarray(where)[:, None]
        pairs = Pairs(jnp.asarray(labels.positives) & keep, jnp.asarray(labels.negatives) & keep)
    else:
        pairs = ops.pairs(labels, reference_labels, where=where)
    if mine_fn is None:
        return Batch(x, y, pairs, where)
    distances = jax.lax.stop_gradient(ops.unit_euclidean(x, y))
    return Batch(x, y, mine_fn(distances, pairs), where)


def matrix(name: str, x: Array) -> jax.Array:
    """`x` widened, or one clear line if it is no non-empty matrix of floats."""
    x = jnp.asarray(x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a non-empty matrix [rows d], not of shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floats, not {x.dtype}: convert with astype('float32')")
    return ops.widen(x)


def rows(where: Array | None, x: Array) -> jax.Array:
    """The mask of the rows of `x` that count; all of them without `where`."""
    if where is None:
        return jnp.ones(len(x), bool)
    where = jnp.asarray(where)
    if where.shape != x.shape[:1] or where.dtype != jnp.bool_:
        raise ValueError(f"where must be bool [{len(x)}], not {where.dtype} {list(where.shape)}")
    return where


def check_labels(labels, reference_labels, x, y, own: bool) -> None:
    if isinstance(labels, Pairs):
        if reference_labels is not None:
            raise ValueError("labels are ready Pairs, so reference_labels would go unused")
        for name, mask in zip(Pairs._fields, labels, strict=True):
            if jnp.shape(mask) != (len(x), len(y)):
                raise ValueError(
                    f"Pairs.{name} must be bool [{len(x)} {len(y)}] for these embeddings and "
                    f"references, not {list(jnp.shape(mask))}"
                )
        return
    check_rows("labels", labels, "embeddings", x)
    if own:
        return
    if reference_labels is None:
        raise ValueError("references need reference_labels (or ready ops.Pairs as labels)")
    check_rows("reference_labels", reference_labels, "references", y)
    if jnp.shape(labels)[1:] != jnp.shape(reference_labels)[1:]:
        raise ValueError(
            f"labels {list(jnp.shape(labels))} and reference_labels "
            f"{list(jnp.shape(reference_labels))} differ in their number of classes"
        )


def check_rows(name: str, labels, of: str, x: Array) -> None:
    shape, dtype = jnp.shape(labels), jnp.asarray(labels).dtype
    if not (
        (len(shape) == 1 and jnp.issubdtype(dtype, jnp.integer))
        or (len(shape) == 2 and dtype == jnp.bool_)
    ):
        raise ValueError(
            f"{name} must be int [b], bool multi-hot [b c] or ops.Pairs, not {dtype} {list(shape)}"
        )
    if shape[0] != len(x):
        raise ValueError(f"{name} has {shape[0]} rows but {of} has {len(x)}: they must agree")
