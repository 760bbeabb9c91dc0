"""Sums over all pairs of rows and columns, at once or in tiles.

`fold` calls a function that returns the terms of a tile, and adds them up: log-sum-exps and sums of
each row or each column, and totals. In tiles, no array of all pairs is stored, and the backward
pass computes each tile again.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dmljax.ops.devices import current_mesh
from dmljax.ops.loops import floats_of, merged, others_of
from dmljax.ops.numerics import logsumexp
from dmljax.ops.types import Array

__all__ = ["LogSumExp", "OfColumns", "Side", "Sum", "Total", "count", "fold", "pad_rows"]


class Side(NamedTuple):
    """The rows, or the columns, of the matrix of pairs."""

    vectors: Array  # [n d]
    labels: Any  # [n] or multi-hot [n c]; None where masks say the pairs
    where: Any  # [n], those that count; None: all
    positions: Any  # [n], indices in the batch; None where masks say the pairs
    extra: Any = ()  # further arrays [n ...]


class LogSumExp(NamedTuple):
    """The log-sum-exp of each row: -infinity for a row in which nothing counts."""

    values: Array  # [r t]
    where: Array  # [r t]

    def at_once(self) -> Array:
        any_counts = jnp.any(self.where, axis=1)
        return jnp.where(any_counts, logsumexp(self.values, where=self.where), -jnp.inf)

    def empty(self, n: int) -> tuple[Array, Array]:
        return jnp.full(n, -jnp.inf, self.values.dtype), jnp.zeros(n, self.values.dtype)

    def add(self, state: tuple[Array, Array]) -> tuple[Array, Array]:
        peak, total = state
        values = jnp.where(self.where, self.values, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(values, axis=1))
        finite = _finite(new_peak)
        terms = jnp.sum(jnp.exp(values - finite[:, None]), axis=1)
        return new_peak, total * jnp.exp(peak - finite) + terms

    def over_devices(self, state: tuple[Array, Array], axis: str) -> tuple[Array, Array]:
        peak, total = state
        highest = jax.lax.pmax(peak, axis)
        return highest, jax.lax.psum(total * jnp.exp(peak - _finite(highest)), axis)

    def result(self, state: tuple[Array, Array]) -> Array:
        peak, total = state
        return jnp.log(total) + peak

    def gradient(self, result: Array, cotangent: Array) -> Array:
        fractions = jnp.exp(jnp.where(self.where, self.values - result[:, None], -jnp.inf))
        return fractions * cotangent[:, None]


class Sum(NamedTuple):
    """The sum of each row."""

    values: Array  # [r t]
    where: Array  # [r t]

    def at_once(self) -> Array:
        return jnp.sum(self.values, axis=1, where=self.where)

    def empty(self, n: int) -> Array:
        return jnp.zeros(n, self.values.dtype)

    def add(self, state: Array) -> Array:
        return state + self.at_once()

    def over_devices(self, state: Array, axis: str) -> Array:
        return jax.lax.psum(state, axis)

    def result(self, state: Array) -> Array:
        return state

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return jnp.where(self.where, cotangent[:, None], 0)


class Total(NamedTuple):
    """The sum of one number of each tile."""

    values: Array  # []

    def at_once(self) -> Array:
        return self.values

    def empty(self, n: int) -> Array:
        return jnp.zeros((), self.values.dtype)

    def add(self, state: Array) -> Array:
        return state + self.values

    def over_devices(self, state: Array, axis: str) -> Array:
        return jax.lax.psum(state, axis)

    def result(self, state: Array) -> Array:
        return state

    def gradient(self, result: Array, cotangent: Array) -> Array:
        return cotangent


class OfColumns(NamedTuple):
    """A term of each column. The arrays of `term` are transposed: `[t r]`."""

    term: LogSumExp | Sum


def count(where: Array) -> Sum:
    """Returns the term that counts the pairs of each row."""
    return Sum(where.astype(jnp.float32), where)


def fold(
    terms_fn: Callable,
    rows: Side,
    columns: Side,
    *params: Any,
    tile: int | None,
    has_whole_columns: bool = False,
) -> tuple[Array, ...]:
    """Returns the sums of `terms_fn(rows, columns, *params)` over all tiles, a tuple of arrays.

    `terms_fn` returns `LogSumExp`, `Sum`, `OfColumns` and `Total` of a tile: of some rows and some
    columns. It must not close over traced arrays: these are `params` (numbers or arrays), or
    `extra` of a side. Gradients flow into the float ones.

    Within `jax.sharding.use_abstract_mesh(mesh)` or `jax.set_mesh(mesh)`, as in the train step, the
    devices of the mesh share the rows. The columns, with their sums and their gradients, travel
    around the ring of devices, so that no device holds all columns.

    Args:
        tile: Rows and columns of a tile. None computes all pairs at once, without a loop and with
            the gradient of JAX.
        has_whole_columns: Each tile has all columns, and so has each device. This is the better
            choice for few columns and very many rows.
    """
    if tile is None:
        return tuple(term.at_once() for term in _plain(terms_fn(rows, columns, *params)))
    dtype = rows.vectors.dtype
    arrays = [jnp.asarray(p, dtype if isinstance(p, int | float) else None) for p in params]
    return _Fold(terms_fn, rows, columns, tuple(arrays), tile, has_whole_columns)()


def _plain(terms: Iterable) -> list:
    return [t.term if isinstance(t, OfColumns) else t for t in terms]


class _Fold:
    """A fold in tiles."""

    def __init__(self, terms_fn, rows, columns, params, tile, has_whole_columns):
        self.has_whole_columns = has_whole_columns
        self.mesh = current_mesh()
        self.axis = None if self.mesh is None else self.mesh.axis_names[0]
        self.devices = 1 if self.mesh is None else self.mesh.shape[self.axis]
        self.lengths = len(rows.where), len(columns.where)
        row_count = -(-self.lengths[0] // self.devices)  # of each device
        self.row_tile = _even(row_count, tile)
        self.column_tile = self.lengths[1]
        if not has_whole_columns:
            self.column_tile = _even(-(-self.lengths[1] // self.devices), tile)
        self.terms_fn = lambda *tile: tuple(terms_fn(*tile))
        self.inputs = rows, columns, params
        first = _slice(rows, 0, self.row_tile), _slice(columns, 0, self.column_tile)
        terms = jax.eval_shape(self.terms_fn, *first, *params)
        self.terms = _plain(terms)
        # Where the sums of each term belong: 0 to rows, 1 to columns, 2 to totals.
        self.sides = [1 if isinstance(t, OfColumns) else 2 * isinstance(t, Total) for t in terms]

    def _split(self, values: Sequence) -> tuple[list, ...]:
        """Returns the values of the terms of rows, of columns, and of totals."""
        pairs = list(zip(values, self.sides, strict=True))
        return tuple([value for value, side in pairs if side == i] for i in range(3))

    def _joined(self, split: Sequence[Sequence]) -> list:
        """Returns values in the order of the terms."""
        values = [iter(group) for group in split]
        return [next(values[side]) for side in self.sides]

    def __call__(self):
        @jax.custom_vjp
        def run(floats, others):
            return self._on_devices(self._forward, *merged(floats, others))

        def forward(floats, others):
            results = run(floats, others)
            return results, (floats, others, results)

        def backward(residual, cotangents):
            floats, others, results = residual
            rows, columns, params = merged(floats, others)
            of_rows, of_columns, of_totals = zip(results, cotangents, strict=True)
            inputs = (rows, of_rows), (columns, of_columns), (params, of_totals)
            return self._on_devices(self._backward, *inputs), None

        run.defvjp(forward, backward)
        return tuple(self._joined(run(floats_of(self.inputs), others_of(self.inputs))))

    def _on_devices(self, local_fn, rows, columns, shared):
        """Calls `local_fn` on each device. It returns results of rows, of columns, and shared."""
        if self.mesh is None:
            return local_fn(rows, columns, shared)
        split, everywhere = PartitionSpec(self.axis), PartitionSpec()
        specs = split, everywhere if self.has_whole_columns else split, everywhere
        mapped = jax.shard_map(
            local_fn, mesh=self.mesh, in_specs=specs, out_specs=specs, check_vma=False
        )
        rows = pad_rows(rows, self.devices)
        columns = columns if self.has_whole_columns else pad_rows(columns, self.devices)
        *sides, shared = mapped(rows, columns, shared)
        of_rows, of_columns = (_slice(x, 0, n) for x, n in zip(sides, self.lengths, strict=True))
        return of_rows, of_columns, shared

    def _forward(self, rows, columns, params):

        def add(row_tile, column_tile, states):
            terms = _plain(self.terms_fn(row_tile[0], column_tile[0], *params))
            states = zip(terms, self._joined(states), strict=True)
            return self._split([term.add(state) for term, state in states])

        sizes = len(rows.where), len(columns.where), 0
        terms = zip(self.terms, self.sides, strict=True)
        empty = self._split([term.empty(sizes[side]) for term, side in terms])
        states = self._joined(self._sweep(add, (rows, ()), (columns, ()), empty))
        of_rows, of_columns, totals = self._split(list(zip(self.terms, states, strict=True)))
        if self.axis is not None:
            totals = [(term, term.over_devices(state, self.axis)) for term, state in totals]
            if self.has_whole_columns:
                of_columns = [(t, t.over_devices(state, self.axis)) for t, state in of_columns]
        return tuple(
            [term.result(state) for term, state in group] for group in (of_rows, of_columns, totals)
        )

    def _backward(self, rows, columns, params):
        """Returns the gradients of the floats of rows, columns and params.

        Each argument comes with the results and cotangents of its terms.
        """
        params, of_totals = params

        def add(row_tile, column_tile, gradients):
            (row_side, of_rows), (column_side, of_columns) = row_tile, column_tile
            inputs = row_side, column_side, params
            others = others_of(inputs)

            def values(floats):
                row_side, column_side, params = merged(floats, others)
                tile_terms = _plain(self.terms_fn(row_side, column_side, *params))
                return [term.values for term in tile_terms], tile_terms

            _, pull_back, tile_terms = jax.vjp(values, floats_of(inputs), has_aux=True)
            results, cotangents = (
                self._joined(parts) for parts in zip(of_rows, of_columns, of_totals, strict=True)
            )
            slopes = [
                term.gradient(result, cotangent)
                for term, result, cotangent in zip(tile_terms, results, cotangents, strict=True)
            ]
            return jax.tree.map(jnp.add, gradients, pull_back(slopes)[0])

        zeros = jax.tree.map(jnp.zeros_like, floats_of((rows[0], columns[0], params)))
        of_rows, of_columns, of_params = self._sweep(add, rows, columns, zeros)
        if self.axis is not None:
            of_params = jax.lax.psum(of_params, self.axis)
            if self.has_whole_columns:
                of_columns = jax.lax.psum(of_columns, self.axis)
        return of_rows, of_columns, of_params

    def _sweep(self, update_fn, rows, columns, states):
        """Calls `states = update_fn(row tile, column tile, states)` for all tiles.

        The first state holds arrays of rows and the second one arrays of columns; `update_fn` gets
        and returns those of its tile.
        """
        if self.mesh is None or self.has_whole_columns:
            return self._local_sweep(update_fn, rows, columns, states)
        ring = [(i, (i + 1) % self.devices) for i in range(self.devices)]

        def step(_, carry):
            columns, states = carry
            of_rows, of_columns, shared = self._local_sweep(update_fn, rows, columns, states)
            columns, of_columns = jax.tree.map(
                lambda x: jax.lax.ppermute(x, self.axis, ring), (columns, of_columns)
            )
            return columns, (of_rows, of_columns, shared)

        return jax.lax.fori_loop(0, self.devices, step, (columns, states))[1]

    def _local_sweep(self, update_fn, rows, columns, states):
        row_tile, column_tile = self.row_tile, self.column_tile

        def visit_rows(i, states):
            of_rows, of_columns, shared = states
            start, row_block = _tile(rows, i, row_tile)

            def visit(j, states):
                of_rows, of_columns, shared = states
                first, column_block = _tile(columns, j, column_tile)
                old = of_rows, _slice(of_columns, first, column_tile), shared
                of_rows, new, shared = update_fn(row_block, column_block, old)
                return of_rows, _write(of_columns, new, first), shared

            states = _slice(of_rows, start, row_tile), of_columns, shared
            count = -(-_length(columns) // column_tile)
            new, of_columns, shared = jax.lax.fori_loop(0, count, visit, states)
            return _write(of_rows, new, start), of_columns, shared

        return jax.lax.fori_loop(0, -(-_length(rows) // row_tile), visit_rows, states)


def _finite(peak: Array) -> Array:
    """Returns `peak`, and 0 for infinities: -infinity minus -infinity would be NaN."""
    return jnp.where(jnp.isfinite(peak), peak, 0)


def _even(n: int, tile: int) -> int:
    """Returns the size of tiles of at most `tile` rows that divide `n` rows most evenly."""
    return math.ceil(n / math.ceil(n / tile))


def _length(tree: Any) -> int:
    return len(jax.tree.leaves(tree)[0])


def _slice(tree: Any, start: Any, size: int) -> Any:
    if isinstance(start, int):
        return jax.tree.map(lambda x: x[start : start + size], tree)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)


def _write(tree: Any, part: Any, start: Any) -> Any:
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0), tree, part
    )


def _tile(rows: tuple[Side, Any], i: Any, size: int) -> tuple[Any, tuple[Side, Any]]:
    """Returns the first row of tile `i`, and the tile.

    The last tile overlaps the one before it, so that no array needs padding. Rows of an earlier
    tile do not count.
    """
    start = jnp.minimum(i * size, _length(rows) - size)
    side, of_side = _slice(rows, start, size)
    is_new = start + jnp.arange(size) >= i * size
    return start, (side._replace(where=side.where & is_new), of_side)


def pad_rows(tree: Any, multiple: int) -> Any:
    """Returns the arrays with rows of zeros at their end, which do not count: `where` is False."""
    return jax.tree.map(
        lambda x: jnp.pad(x, [(0, -len(x) % multiple), *[(0, 0)] * (x.ndim - 1)]), tree
    )
