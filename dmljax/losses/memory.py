"""Pair losses against a queue of earlier batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Integer

from dmljax import ops
from dmljax.losses._common import matrix, rows
from dmljax.ops import Array

__all__ = ["cross_batch_memory"]


class Memory(NamedTuple):
    """A ring of the latest rows: arrays only, so it is saved and sharded like any other state."""

    embeddings: Float[Array, "n d"]
    labels: Int[Array, "n"]
    ids: Int[Array, "n"]
    pointer: Int[Array, ""]
    filled: Int[Array, ""]
    next_id: Int[Array, ""]


class CrossBatchMemory(NamedTuple):
    """`init(d) -> memory` and `loss(memory, embeddings, labels, *, where) -> (loss, memory)`."""

    init: Callable[..., Memory]
    loss: Callable[..., tuple[Array, Memory]]


def cross_batch_memory(loss_fn: Callable, *, size: int) -> CrossBatchMemory:
    """`loss_fn`, a pair loss, against the last `size` rows (XBM, Wang et al., CVPR 2020).

    The rows of the batch that count enter the memory first, and push out the oldest. Then the batch
    is compared with the whole memory, in which each row meets its batch, but not itself: that is
    excluded by id, before a miner sees it. What the memory holds is constant, so gradients flow
    through the anchors only, also where both rows are of this batch.

    `init` takes `dtype`; other keywords of `loss`, `mine_fn` among them, go on to `loss_fn`. Labels
    are integers.
    """
    if size < 1:
        raise ValueError(f"size is the number of rows to remember, not {size}")

    def init(d: int, *, dtype=jnp.float32) -> Memory:
        # One array each: arrays that share a buffer cannot be donated.
        zero, minus = (lambda: jnp.zeros((), jnp.int32)), jnp.full(size, -1, jnp.int32)
        embeddings = jnp.zeros((size, d), dtype)
        return Memory(embeddings, jnp.zeros(size, jnp.int32), minus, zero(), zero(), zero())

    def loss(
        memory: Memory,
        embeddings: Float[Array, "b d"],
        labels: Integer[Array, "b"],
        *,
        where: Bool[Array, "b"] | None = None,
        **keywords,
    ) -> tuple[Array, Memory]:
        x = matrix("embeddings", embeddings)
        where = rows(where, x)
        _check(memory, x, labels, size)
        memory, ids = _enqueue(memory, x, jnp.asarray(labels), where)
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
    """The memory with the rows that count, and the ids of all rows."""
    size = len(memory.embeddings)
    order = jnp.cumsum(where, dtype=jnp.int32) - where  # among the rows that count
    count = jnp.sum(where, dtype=jnp.int32)
    ids = memory.next_id + order
    # Rows that do not count are written past the end, which is nowhere.
    slots = jnp.where(where, (memory.pointer + order) % size, size)

    def put(old, new):
        new = jax.lax.stop_gradient(new).astype(old.dtype)
        return jax.lax.stop_gradient(jnp.asarray(old)).at[slots].set(new, mode="drop")

    memory = Memory(
        embeddings=put(memory.embeddings, x),
        labels=put(memory.labels, labels),
        ids=put(memory.ids, ids),
        pointer=(memory.pointer + count) % size,
        filled=jnp.minimum(memory.filled + count, size),
        next_id=memory.next_id + count,
    )
    return memory, ids


def _check(memory, x, labels, size: int) -> None:
    shape, dtype = jnp.shape(labels), jnp.asarray(labels).dtype
    if shape != x.shape[:1] or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"labels must be int [{len(x)}], not {dtype} {list(shape)}")
    if jnp.shape(memory.embeddings) != (size, x.shape[1]):
        raise ValueError(
            f"the memory is {list(jnp.shape(memory.embeddings))}, but this loss remembers {size} "
            f"rows of {x.shape[1]}: start it with init({x.shape[1]})"
        )
    if len(x) > size:
        raise ValueError(
            f"a batch of {len(x)} rows does not fit into a memory of {size}: raise size to "
            f"{len(x)} or more"
        )
