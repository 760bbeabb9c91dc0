"""Sums over all pairs of rows and columns that never store the matrix of pairs.

`fold` goes through the pairs in tiles and keeps only what a loss accumulates: a log-sum-exp or a
sum for each row, or one total. The backward pass computes each tile again. With a mesh, each device
holds its rows, and the blocks of columns travel around the ring of devices, with their gradients in
the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dmljax import ops
from dmljax.ops import Array

__all__ = ["LogSumExp", "OfColumns", "Plan", "Side", "Sum", "Tile", "Total", "count", "fold"]


class Plan(NamedTuple):
    """How pairs are divided: the sides of a tile, and the devices that share the rows."""

    tile: int
    mesh: Mesh | None
    within_batch: bool  # rows and columns are the same batch: no row is paired with itself


class Side(NamedTuple):
    """The rows, or the columns, of the matrix of pairs."""

    vectors: Array  # [n d]
    labels: Array  # [n] or multi-hot [n c]
    where: Array  # [n], those that count
    positions: Array  # [n], in the batch
    extra: Any = ()  # arrays [n ...] that a loss needs


class Tile(NamedTuple):
    """Some rows against some columns."""

    rows: Side
    columns: Side
    within_batch: bool

    @property
    def is_itself(self) -> Array:
        """[r t]: a row that counts, paired with itself."""
        same = self.rows.positions[:, None] == self.columns.positions[None, :]
        return same & self.rows.where[:, None] & self.columns.where[None, :]

    @property
    def pairs(self) -> ops.Pairs:
        return ops.pairs(
            self.rows.labels,
            self.columns.labels,
            ids=self.rows.positions if self.within_batch else None,
            reference_ids=self.columns.positions if self.within_batch else None,
            where=self.rows.where,
            reference_where=self.columns.where,
        )

    def products(self) -> Array:
        """[r t]: the dot product of every row and column."""
        return ops.matmul(self.rows.vectors, self.columns.vectors.T)


class LogSumExp(NamedTuple):
    """Accumulates the log sum exp of each row: 0 for a row in which nothing counts."""

    values: Array  # [r t]
    where: Array  # [r t]

    def empty(self) -> tuple[Array, Array]:
        rows, dtype = self.values.shape[:1], self.values.dtype
        return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype)

    def add(self, state: tuple[Array, Array]) -> tuple[Array, Array]:
        peak, total = state
        values = jnp.where(self.where, self.values, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(values, axis=1))
        finite = jnp.where(jnp.isfinite(new_peak), new_peak, 0)  # -inf - -inf would be NaN
        terms = jnp.sum(jnp.exp(values - finite[:, None]), axis=1)
        return new_peak, total * jnp.exp(peak - finite) + terms

    def result(self, state: tuple[Array, Array]) -> Array:
        peak, total = state
        return jnp.where(jnp.isneginf(peak), 0, jnp.log(total) + peak)

    def gradient(self, result: Array, cotangent: Array) -> Array:
        shares = jnp.exp(jnp.where(self.where, self.values - result[:, None], -jnp.inf))
        return shares * cotangent[:, None]


class Sum(NamedTuple):
    """Accumulates the sum of each row."""

    values: Array  # [r t ...]
    where: Array  # [r t ...]

    def empty(self) -> Array:
        return jnp.zeros((self.values.shape[0], *self.values.shape[2:]), self.values.dtype)

    def add(self, state: Array) -> Array:
        return state + jnp.sum(self.values, axis=1, where=self.where)

    def result(self, state: Array) -> Array:
        return state

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return jnp.where(self.where, cotangent[:, None], 0)


class OfColumns(NamedTuple):
    """Accumulates `term`, whose arrays are transposed, for each column."""

    term: LogSumExp | Sum

    @property
    def values(self) -> Array:
        return self.term.values

    def empty(self) -> Any:
        return self.term.empty()

    def add(self, state: Any) -> Any:
        return self.term.add(state)

    def result(self, state: Any) -> Array:
        return self.term.result(state)

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return self.term.gradient(result, cotangent)


class Total(NamedTuple):
    """Accumulates one number over all tiles."""

    values: Array  # []

    def empty(self) -> Array:
        return jnp.zeros((), self.values.dtype)

    def add(self, state: Array) -> Array:
        return state + self.values

    def result(self, state: Array) -> Array:
        return state

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return cotangent


def count(where: Array) -> Sum:
    """Accumulates how many pairs of each row count."""
    return Sum(where.astype(jnp.float32), where)


def fold(terms_fn: Callable, plan: Plan, rows: Side, columns: Side, *params: Array) -> tuple:
    """What `terms_fn(tile, *params)` accumulates over all tiles, as a tuple of arrays.

    `terms_fn` returns some `LogSumExp`, `Sum`, `OfColumns` and `Total`. It must not close over
    traced arrays: these are `params`, or `extra` of a side. Gradients flow into the float ones.
    """
    return _fold(lambda *arguments: tuple(terms_fn(*arguments)), plan, rows, columns, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fold(terms_fn, plan, rows, columns, params):
    terms = _abstract_terms(terms_fn, plan, rows, columns, params)
    forward = functools.partial(_forward, terms_fn, plan)
    return _joined(terms, *_on_devices(forward, plan.mesh, rows, columns, params))


def _fold_forward(terms_fn, plan, rows, columns, params):
    results = _fold(terms_fn, plan, rows, columns, params)
    return results, (rows, columns, params, results)


def _fold_backward(terms_fn, plan, residual, cotangents):
    *inputs, results = residual
    terms = _abstract_terms(terms_fn, plan, *inputs)
    splits = zip(_split(terms, results), _split(terms, cotangents), strict=True)
    backward = functools.partial(_backward, terms_fn, plan)
    gradients = _on_devices(backward, plan.mesh, *zip(inputs, splits, strict=True))
    # `jax.custom_vjp` wants gradients of dtype float0 for arrays that are not floats.
    return tuple(
        _with_floats(tree, floats, lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0))
        for tree, floats in zip(inputs, gradients, strict=True)
    )


_fold.defvjp(_fold_forward, _fold_backward)


def _on_devices(local_fn, mesh, of_rows, of_columns, shared):
    """`local_fn(axis, of_rows, of_columns, shared)`, with the rows of all arrays but `shared`
    divided among the devices of the mesh, if there is one.

    It returns three trees of the same kinds. `shared` of the result is summed over the devices.
    """
    if mesh is None or mesh.size == 1:
        return local_fn(None, of_rows, of_columns, shared)
    (axis,) = mesh.axis_names
    lengths = [len(jax.tree.leaves(tree)[0]) for tree in (of_rows, of_columns)]

    def padded(tree, length):
        return _padded(tree, -(-length // mesh.size) * mesh.size)

    def local(of_rows, of_columns, shared):
        *sides, shared = local_fn(axis, of_rows, of_columns, shared)
        return *sides, jax.tree.map(lambda x: x[None], shared)

    divided, everywhere = PartitionSpec(axis), PartitionSpec()
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(divided, divided, everywhere),
        out_specs=divided,
        check_vma=False,
    )
    *sides, shared = jax.jit(mapped)(
        padded(of_rows, lengths[0]), padded(of_columns, lengths[1]), shared
    )
    sides = [
        jax.tree.map(lambda x, n=n: x[:n], side) for side, n in zip(sides, lengths, strict=True)
    ]
    return *sides, jax.tree.map(lambda x: jnp.sum(x, axis=0), shared)


def _forward(terms_fn, plan, axis, rows, columns, params):
    """The results of the local rows, of the local columns, and the totals."""
    terms = _abstract_terms(terms_fn, plan, rows, columns, params)
    sizes = len(rows.where), len(columns.where)
    rows, columns = _blocks(rows, plan.tile), _blocks(columns, plan.tile)

    def terms_of(row_block, column_block):
        return terms_fn(Tile(row_block, column_block, plan.within_batch), *params)

    def add(row_block, column_block, states):
        added = zip(terms_of(row_block, column_block), _joined(terms, *states), strict=True)
        return _split(terms, [term.add(state) for term, state in added])

    first_blocks = jax.tree.map(lambda x: x[0], (rows, columns))
    empty = [term.empty() for term in jax.eval_shape(terms_of, *first_blocks)]
    of_rows, of_columns, totals = _split(terms, empty)
    of_rows = _repeated(of_rows, len(rows.where))
    of_columns = _repeated(of_columns, len(columns.where))
    states = _sweep(add, plan, axis, rows, columns, (of_rows, of_columns, totals))
    results = zip(terms, _joined(terms, *states), strict=True)
    of_rows, of_columns, totals = _split(terms, [term.result(state) for term, state in results])
    return _rows(of_rows, sizes[0]), _rows(of_columns, sizes[1]), totals


def _backward(terms_fn, plan, axis, *inputs_and_results):
    """Gradients of the float arrays of rows, columns and params.

    Each of the inputs comes with `(results, cotangents)` of its terms.
    """
    (rows, _), (columns, _), (params, of_totals) = inputs_and_results
    terms = _abstract_terms(terms_fn, plan, rows, columns, params)
    sizes = len(rows.where), len(columns.where)
    rows, columns = (_blocks(side, plan.tile) for side in inputs_and_results[:2])

    def add(row_block_and_results, column_block_and_results, gradients):
        row_block, of_rows = row_block_and_results
        column_block, of_columns = column_block_and_results
        inputs = row_block, column_block, params

        def values(*floats):
            row_block, column_block, params = (
                _with_floats(tree, tree_floats, lambda leaf: leaf)
                for tree, tree_floats in zip(inputs, floats, strict=True)
            )
            tile_terms = terms_fn(Tile(row_block, column_block, plan.within_batch), *params)
            return [term.values for term in tile_terms], tile_terms

        _, pull_back, tile_terms = jax.vjp(values, *map(_floats, inputs), has_aux=True)
        results, cotangents = (
            _joined(terms, *parts) for parts in zip(of_rows, of_columns, of_totals, strict=True)
        )
        arguments = zip(tile_terms, results, cotangents, strict=True)
        cotangents = [term.gradient(*values) for term, *values in arguments]
        return jax.tree.map(jnp.add, gradients, pull_back(cotangents))

    zeros = (jax.tree.map(jnp.zeros_like, _floats(tree)) for tree in (rows[0], columns[0], params))
    of_rows, of_columns, of_params = _sweep(add, plan, axis, rows, columns, tuple(zeros))
    return _rows(of_rows, sizes[0]), _rows(of_columns, sizes[1]), of_params


def _sweep(update_fn, plan, axis, rows, columns, states):
    """The states after `states = update_fn(row_block, column_block, states)` for all tiles.

    `rows`, `columns` and the first two of the three `states` are blocks; `update_fn` gets the
    blocks of its tile, and the third. The columns and their states make one tour of the ring of
    devices.
    """

    def ring_step(carry, _):
        columns, row_states, column_states, shared = carry

        def of_row_block(carry, block_and_state):
            row_block, row_state = block_and_state

            def of_column_block(carry, block_and_state):
                column_block, column_state = block_and_state
                states = carry[0], column_state, carry[1]
                row_state, column_state, shared = update_fn(row_block, column_block, states)
                return (row_state, shared), column_state

            column_states, shared = carry
            (row_state, shared), column_states = jax.lax.scan(
                of_column_block, (row_state, shared), (columns, column_states)
            )
            return (column_states, shared), row_state

        (column_states, shared), row_states = jax.lax.scan(
            of_row_block, (column_states, shared), (rows, row_states)
        )
        columns, column_states = _next((columns, column_states), plan, axis)
        return (columns, row_states, column_states, shared), None

    carry = columns, *states
    if axis is None:
        return ring_step(carry, None)[0][1:]
    return jax.lax.scan(ring_step, carry, length=plan.mesh.size)[0][1:]


def _next(tree, plan, axis):
    """The arrays of the device before this one on the ring."""
    if axis is None:
        return tree
    ring = [(i, (i + 1) % plan.mesh.size) for i in range(plan.mesh.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), tree)


def _abstract_terms(terms_fn, plan, rows, columns, params) -> tuple:
    """The terms of a tile of one row and one column, with shapes in place of arrays."""
    first = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), (rows, columns)
    )

    def terms(rows, columns):
        return terms_fn(Tile(rows, columns, plan.within_batch), *params)

    return jax.eval_shape(terms, *first)


def _split(terms, values) -> tuple[list, list, list]:
    """The values of the terms of rows, of the terms of columns, and of totals."""
    kinds: dict[type | None, list] = {None: [], OfColumns: [], Total: []}
    for term, value in zip(terms, values, strict=True):
        kinds[type(term) if type(term) in kinds else None].append(value)
    return kinds[None], kinds[OfColumns], kinds[Total]


def _joined(terms, of_rows, of_columns, totals) -> tuple:
    """The values that `_split` has split."""
    of_rows, kinds = iter(of_rows), {OfColumns: iter(of_columns), Total: iter(totals)}
    return tuple(next(kinds.get(type(term), of_rows)) for term in terms)


def _repeated(tree, count: int):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def _padded(tree, length):
    """The arrays with zeros behind their last rows, which do not count: `where` is False there."""
    return jax.tree.map(
        lambda x: jnp.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)]), tree
    )


def _blocks(tree, tile: int):
    """`[blocks size ...]` of arrays `[n ...]`: blocks of at most `tile` rows, as equal as can be.

    So there are few rows of padding: fewer than blocks.
    """
    n = len(jax.tree.leaves(tree)[0])
    blocks = -(-n // tile)
    size = -(-n // blocks)
    padded = _padded(tree, blocks * size)
    return jax.tree.map(lambda x: x.reshape(blocks, size, *x.shape[1:]), padded)


def _rows(tree, n: int):
    """The arrays `[n ...]` of `_blocks`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], tree)


def _floats(tree) -> list:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _with_floats(tree, floats, other_fn: Callable):
    """`tree` with `floats` in place of its float arrays, and `other_fn` of the others."""
    leaves, structure = jax.tree.flatten(tree)
    remaining = iter(floats)
    return jax.tree.unflatten(
        structure,
        [
            next(remaining) if jnp.issubdtype(leaf.dtype, jnp.floating) else other_fn(leaf)
            for leaf in leaves
        ],
    )
