"""Sums over all pairs of rows and columns that never store the matrix of pairs.

`fold` goes through the pairs in tiles and keeps only what a loss accumulates: a log-sum-exp or a
sum for each row, or one total. The backward pass computes each tile again. With a mesh, each device
holds its rows, and the blocks of columns travel around the ring of devices, with their gradients in
the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dmljax import ops
from dmljax.ops import Array

__all__ = ["LogSumExp", "Plan", "Side", "Sum", "Tile", "Total", "count", "fold"]


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

    @staticmethod
    def result(state: tuple[Array, Array]) -> Array:
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

    @staticmethod
    def result(state: Array) -> Array:
        return state

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return jnp.where(self.where, cotangent[:, None], 0)


class Total(NamedTuple):
    """Accumulates one number over all tiles."""

    values: Array  # []

    def empty(self) -> Array:
        return jnp.zeros((), self.values.dtype)

    def add(self, state: Array) -> Array:
        return state + self.values

    @staticmethod
    def result(state: Array) -> Array:
        return state

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return cotangent


def count(where: Array) -> Sum:
    """Accumulates how many pairs of each row count."""
    return Sum(where.astype(jnp.float32), where)


def fold(terms_fn: Callable, plan: Plan, rows: Side, columns: Side, *params: Array) -> tuple:
    """What `terms_fn(tile, *params)` accumulates over all tiles, as a tuple of arrays.

    `terms_fn` returns some `LogSumExp`, `Sum` and `Total`. It must not close over traced
    arrays: these are `params`, or `extra` of a side. Gradients flow into the float ones.
    """
    return _fold(lambda *arguments: tuple(terms_fn(*arguments)), plan, rows, columns, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fold(terms_fn, plan, rows, columns, params):
    types = _types(terms_fn, plan, rows, columns, params)
    forward = functools.partial(_forward, terms_fn, plan)
    of_rows, _, totals = _on_devices(forward, plan.mesh, rows, columns, params)
    return _joined(types, of_rows, totals)


def _fold_forward(terms_fn, plan, rows, columns, params):
    results = _fold(terms_fn, plan, rows, columns, params)
    return results, (rows, columns, params, results)


def _fold_backward(terms_fn, plan, residual, cotangents):
    rows, columns, params, results = residual
    types = _types(terms_fn, plan, rows, columns, params)
    of_rows, totals = zip(_split(types, results), _split(types, cotangents), strict=True)
    backward = functools.partial(_backward, terms_fn, plan, types)
    gradients = _on_devices(backward, plan.mesh, (rows, of_rows), columns, (params, totals))
    # `jax.custom_vjp` wants gradients of dtype float0 for arrays that are not floats.
    return tuple(
        _with_floats(tree, floats, lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0))
        for tree, floats in zip((rows, columns, params), gradients, strict=True)
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
    """The results of the local rows, nothing for the columns, and the totals."""
    types = _types(terms_fn, plan, rows, columns, params)
    n = len(rows.where)
    rows, columns = _blocks(rows, plan.tile), _blocks(columns, plan.tile)

    def terms(row_block, column_block):
        return terms_fn(Tile(row_block, column_block, plan.within_batch), *params)

    first_blocks = jax.tree.map(lambda x: x[0], (rows, columns))
    empty = [term.empty() for term in jax.eval_shape(terms, *first_blocks)]
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(rows.where), *x.shape)), empty)

    def ring_step(carry, _):
        columns, states = carry

        def of_row_block(row_block_and_states):
            row_block, states = row_block_and_states

            def add(states, column_block):
                added = zip(terms(row_block, column_block), states, strict=True)
                return [term.add(state) for term, state in added], None

            return jax.lax.scan(add, states, columns)[0]

        states = jax.lax.map(of_row_block, (rows, states))
        return (_next(columns, plan, axis), states), None

    (_, states), _ = _around(ring_step, (columns, states), plan, axis)
    results = [type_.result(state) for type_, state in zip(types, states, strict=True)]
    of_rows, totals = _split(types, results)
    return _rows(of_rows, n), (), [jnp.sum(total) for total in totals]


def _backward(terms_fn, plan, types, axis, rows_and_results, columns, params_and_totals):
    """Gradients of the float arrays of rows, columns and params."""
    (rows, results), (params, totals) = rows_and_results, params_and_totals
    sizes = len(rows.where), len(columns.where)
    rows, results = _blocks((rows, results), plan.tile)
    columns = _blocks(columns, plan.tile)

    def of_tile(row_block, column_block, results):
        def values(*floats):
            row_side, column_side, scalars = (
                _with_floats(tree, tree_floats, lambda leaf: leaf)
                for tree, tree_floats in zip((row_block, column_block, params), floats, strict=True)
            )
            terms = terms_fn(Tile(row_side, column_side, plan.within_batch), *scalars)
            return [term.values for term in terms], terms

        floats = [_floats(tree) for tree in (row_block, column_block, params)]
        _, pull_back, terms = jax.vjp(values, *floats, has_aux=True)
        of_terms = [_joined(types, *parts) for parts in zip(results, totals, strict=True)]
        return pull_back(
            [t.gradient(*of_term) for t, *of_term in zip(terms, *of_terms, strict=True)]
        )

    def ring_step(carry, _):
        columns, column_gradients, row_gradients, param_gradients = carry

        def of_row_block(carry, xs):
            column_gradients, param_gradients = carry
            row_block, results, row_gradient = xs

            def of_column_block(carry, xs):
                column_block, column_gradient = xs
                by_row, by_column, by_params = of_tile(row_block, column_block, results)
                return _sum(carry, (by_row, by_params)), _sum(column_gradient, by_column)

            (row_gradient, param_gradients), column_gradients = jax.lax.scan(
                of_column_block, (row_gradient, param_gradients), (columns, column_gradients)
            )
            return (column_gradients, param_gradients), row_gradient

        (column_gradients, param_gradients), row_gradients = jax.lax.scan(
            of_row_block, (column_gradients, param_gradients), (rows, results, row_gradients)
        )
        travelers = _next((columns, column_gradients), plan, axis)
        return (*travelers, row_gradients, param_gradients), None

    zeros = (jax.tree.map(jnp.zeros_like, _floats(tree)) for tree in (columns, rows, params))
    (_, of_columns, of_rows, of_params), _ = _around(ring_step, (columns, *zeros), plan, axis)
    return _rows(of_rows, sizes[0]), _rows(of_columns, sizes[1]), of_params


def _around(ring_step, carry, plan, axis):
    """`ring_step` once for the columns of each device, after which all are back home."""
    if axis is None:
        return ring_step(carry, None)
    return jax.lax.scan(ring_step, carry, length=plan.mesh.size)


def _next(tree, plan, axis):
    """The arrays of the device before this one on the ring."""
    if axis is None:
        return tree
    ring = [(i, (i + 1) % plan.mesh.size) for i in range(plan.mesh.size)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis, ring), tree)


def _types(terms_fn, plan, rows, columns, params) -> list[type]:
    """The class of each term."""
    first = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), (rows, columns)
    )

    def terms(rows, columns):
        return terms_fn(Tile(rows, columns, plan.within_batch), *params)

    return [type(term) for term in jax.eval_shape(terms, *first)]


def _split(types, values) -> tuple[list, list]:
    """The values of terms of rows, and those of totals."""
    pairs = list(zip(types, values, strict=True))
    return [v for t, v in pairs if t is not Total], [v for t, v in pairs if t is Total]


def _joined(types, of_rows, totals) -> tuple:
    """The values that `_split` has split."""
    of_rows, totals = iter(of_rows), iter(totals)
    return tuple(next(totals if type_ is Total else of_rows) for type_ in types)


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


def _sum(x, y):
    return jax.tree.map(jnp.add, x, y)
