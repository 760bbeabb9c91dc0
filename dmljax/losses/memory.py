"""Pair losses against a memory of earlier batches."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Integer

from dmljax import ops
from dmljax.losses._common import check_class_labels, matrix, row_mask
from dmljax.ops import Array
from dmljax.ops.masks import check_integers
from dmljax.ops.types import check_function

__all__ = ["cross_batch_memory"]


class Memory(NamedTuple):
    """A ring buffer of the latest rows. It has arrays only, so it is saved like any other state."""

    embeddings: Float[Array, "n d"]
    labels: Int[Array, "n"]
    ids: Int[Array, "n"]  # how many rows were stored before this one, -1 for an empty slot
    pointer: Int[Array, ""]  # the slot that is written next
    filled: Int[Array, ""]  # the number of slots that hold a row
    next_id: Int[Array, ""]


class CrossBatchMemory(NamedTuple):
    """A pair loss against a memory, as two pure functions."""

    init: Callable[..., Memory]  # (d, *, dtype) -> memory
    loss: Callable[..., tuple[Array, Memory]]  # (memory, embeddings, labels, ...) -> (loss, memory)


def cross_batch_memory(loss_fn: Callable, *, size: int) -> CrossBatchMemory:
    """Compares a batch with the last `size` rows (XBM); returns `init` and `loss`.

    `init(d, *, dtype)` returns an empty memory. `loss(memory, embeddings, labels, *, where, ...)`
    returns the loss and the new memory, and hands further keywords, such as `mine_fn`, to
    `loss_fn`. First it stores the rows of the batch that count, in place of the oldest. Then it
    compares the batch with the whole memory. A row meets the other rows of its batch there, but not
    itself, which is excluded by id. The memory is constant, so gradients flow only through the
    anchors, even where both rows of a pair are of this batch. `smooth_ap` and `pnp` rank the anchor
    itself only within a batch, so with a memory they have other values, even on equal rows.

    Reference: Wang et al., Cross-Batch Memory for Embedding Learning, CVPR 2020, arXiv:1912.06798.

    Args:
        loss_fn: A pair loss, such as `losses.contrastive`. Labels must be integers.
        size: Number of rows to remember, at least a batch.

    >>> xbm = losses.cross_batch_memory(losses.contrastive, size=8)
    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> loss, memory = xbm.loss(xbm.init(2), x, np.array([0, 0, 1, 1]))
    >>> print(f"{loss:.3f}, {memory.filled} rows stored")
    0.738, 4 rows stored
    """
    if size < 1:
        raise ValueError(f"size is the number of rows to remember, not {size}")
    check_function("loss_fn", loss_fn, "losses.contrastive")
    parameters = inspect.signature(loss_fn).parameters
    if not any(p.name == "references" or p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(
            f"a memory holds references, and {getattr(loss_fn, '__name__', 'this loss')} takes "
            "none: take a pair loss, such as losses.contrastive"
        )

    def init(d: int, *, dtype=jnp.float32) -> Memory:
        return Memory(
            embeddings=jnp.zeros((size, d), dtype),
            labels=jnp.zeros(size, int),  # JAX's default: int32, and int64 under jax_enable_x64
            ids=jnp.full(size, -1, jnp.int32),
            # Three arrays, because arrays that share a buffer cannot be donated.
            pointer=jnp.zeros((), jnp.int32),
            filled=jnp.zeros((), jnp.int32),
            next_id=jnp.zeros((), jnp.int32),
        )

    def loss(
        memory: Memory,
        embeddings: Float[Array, "b d"],
        labels: Integer[Array, "b"],
        *,
        where: Bool[Array, "b"] | None = None,
        **keywords,
    ) -> tuple[Array, Memory]:
        x = matrix("embeddings", embeddings)
        where = row_mask(where, x)
        _check(memory, x, labels, size)
        # In the dtype that is stored, equal labels stay equal: uint32 wraps to int32 on both sides.
        labels = jnp.asarray(labels).astype(memory.labels.dtype)
        memory, ids = _enqueue(memory, x, labels, where)
        pairs = ops.pairs(
            labels,
            memory.labels,
            ids=ids,
            reference_ids=memory.ids,
            where=where,
            reference_where=jnp.arange(size) < memory.filled,
        )
        value = loss_fn(embeddings, pairs, references=memory.embeddings, where=where, **keywords)
        return value, memory

    return CrossBatchMemory(init, loss)


def _enqueue(memory: Memory, x, labels, where) -> tuple[Memory, Array]:
    """Stores the rows that count; returns the memory and the ids of all rows of the batch."""
    size = len(memory.embeddings)
    order = jnp.cumsum(where, dtype=jnp.int32) - where  # number of counting rows before each row
    count = jnp.sum(where, dtype=jnp.int32)
    ids = memory.next_id + order
    # Slot `size` does not exist: with mode="drop", rows that do not count are not written.
    slots = jnp.where(where, (memory.pointer + order) % size, size)

    def store(old, new):
        new = jax.lax.stop_gradient(new).astype(old.dtype)
        return jax.lax.stop_gradient(jnp.asarray(old)).at[slots].set(new, mode="drop")

    memory = Memory(
        embeddings=store(memory.embeddings, x),
        labels=store(memory.labels, labels),
        ids=store(memory.ids, ids),
        pointer=(memory.pointer + count) % size,
        filled=jnp.minimum(memory.filled + count, size),
        next_id=memory.next_id + count,
    )
    return memory, ids


def _check(memory, x, labels, size: int) -> None:
    check_class_labels(labels, x)
    check_integers("labels", labels)
    dtype, stored = jnp.asarray(labels).dtype, memory.labels.dtype
    if dtype.itemsize > stored.itemsize:
        raise ValueError(
            f"labels are {dtype}, but the memory stores {stored}, which cannot hold all of them: "
            f"create it with init({x.shape[1]}) while jax_enable_x64 is on, or give {stored} labels"
        )
    if jnp.shape(memory.embeddings) != (size, x.shape[1]) or len(x) > size:
        raise ValueError(
            f"a batch {list(x.shape)} needs a memory [{max(size, len(x))} {x.shape[1]}], not "
            f"{list(jnp.shape(memory.embeddings))}: create it with init({x.shape[1]}) and a size "
            "of at least the batch"
        )
