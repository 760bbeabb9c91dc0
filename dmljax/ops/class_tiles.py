"""Sums and log-sum-exps over very many classes, computed a tile of classes at a time.

Each device goes over the rows of the proxies that it holds. Only numbers per row of the batch are
exchanged between devices. No logits are kept: the backward pass computes each tile again.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dmljax.ops.devices import check_axes
from dmljax.ops.types import Array

__all__ = ["ClassTiles", "over_classes"]


class ClassTiles(NamedTuple):
    """How a loss against proxies goes over the classes; it returns the same loss in less memory.

    * `size`: classes at a time; None: all that a device holds.
    * `share`: the share of the classes outside of the batch that take part, above 0 and at most 1.
      Below 1, it is partial FC (An et al., Partial FC: Training 10 Million Identities on a Single
      Machine, ICCVW 2021; Killing Two Birds with One Stone, CVPR 2022): the classes of the batch
      and a random share of the others. Of every 1 / share neighboring classes, rounded to a whole
      number, one is drawn: 0.1 draws one of ten. The draw does not depend on the devices.
    * `key`: the randomness of a share below 1; another one for each step.
    * `unbiased`: a drawn class counts 1 / share times, so that the expectation of every sum over
      classes is the sum over all of them. This holds for the denominator of a softmax, not for its
      logarithm. False is partial FC as published.
    """

    size: int | None = None
    share: float = 1.0
    key: jax.Array | None = None
    unbiased: bool = False


class _Columns(NamedTuple):
    """The classes that a device goes over; without `places`, all of its rows in their order."""

    total: int
    places: Array | None = None  # [total], rows on this device
    where: Array | None = None  # [total], the columns that count
    weights: Array | None = None  # [total], how often each counts


class _Plan(NamedTuple):
    """What is known before compilation: it is hashable, and has no arrays."""

    fn: Callable
    classes: int
    size: int | None
    share: float
    unbiased: bool
    mesh: Any  # None: one device

    @property
    def neighbors(self) -> int:
        """The size of a group of neighboring classes; one class of each group is drawn."""
        return min(self.classes, round(1 / self.share))


def over_classes(
    fn: Callable, proxies: Array, labels: Array, operands: Any, *, tiles: ClassTiles
) -> Any:
    """`(logs, sums)` of `fn` over all classes: log-sum-exps of `logs`, and sums of `sums`.

    `fn(proxies, classes, where, weights, labels, *operands) -> (logs, sums)` sees a tile of the
    proxies, the numbers of its classes, and which of them count, how often (None: once). Its
    results are trees of arrays whose shapes do not depend on the tile. `fn` must not close over
    traced arrays: these are `operands`, into which gradients flow, as into `proxies`.

    Inside of `jax.sharding.use_abstract_mesh(mesh)` or `jax.set_mesh(mesh)`, as in the train step,
    the devices of the first axis of the mesh share the classes.

    Args:
        labels: The class of each row of the batch; -1 for rows that do not count.
    """
    if not isinstance(tiles, ClassTiles):
        raise ValueError(f"tiles={tiles!r}: give ops.ClassTiles, such as ops.ClassTiles(256)")
    if tiles.size is not None and (not hasattr(tiles.size, "__index__") or tiles.size < 1):
        raise ValueError(f"a tile has 1 or more classes, not {tiles.size}: give an integer")
    if not 0 < tiles.share <= 1:
        raise ValueError(
            f"the share of the classes is above 0 and at most 1, not {tiles.share}: 1 takes all"
        )
    key_data, key_kind = None, None
    if tiles.share < 1:
        if tiles.key is None:
            raise ValueError(f"a share of {tiles.share} draws classes: give a key for each step")
        key_data = jax.random.key_data(tiles.key)
        key_kind = str(jax.random.key_impl(tiles.key))
    mesh = jax.sharding.get_abstract_mesh()
    check_axes(mesh)
    count = 1 if mesh.empty else mesh.shape[mesh.axis_names[0]]
    classes = len(proxies)
    plan = _Plan(fn, classes, tiles.size, tiles.share, tiles.unbiased, mesh if count > 1 else None)
    proxies = jnp.pad(proxies, [(0, -classes % count)] + [(0, 0)] * (proxies.ndim - 1))
    operands = jax.tree.map(jnp.asarray, tuple(operands))
    return _statistics(plan, key_kind, proxies, (jnp.asarray(labels), key_data), operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _statistics(plan, key_kind, proxies, fixed, operands):
    def local(proxies, fixed, operands):
        columns, first = _columns(plan, key_kind, proxies, fixed)

        def add(i, totals):
            rows, tile = _tile(plan, proxies, columns, first, i)
            logs, sums = plan.fn(rows, *tile, fixed[0], *operands)
            return (
                jax.tree.map(jnp.logaddexp, totals[0], logs),
                jax.tree.map(jnp.add, totals[1], sums),
            )

        rows, tile = _tile(plan, proxies, columns, first, 0)
        logs, sums = jax.eval_shape(plan.fn, rows, *tile, fixed[0], *operands)
        zeros = (
            jax.tree.map(lambda a: jnp.full(a.shape, -jnp.inf, a.dtype), logs),
            jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums),
        )
        logs, sums = jax.lax.fori_loop(0, _count(plan, columns), add, zeros)
        if plan.mesh is None:
            return logs, sums
        axis = plan.mesh.axis_names[0]
        return jax.tree.map(lambda x: _log_of_sum(x, axis), logs), jax.lax.psum(sums, axis)

    return _on_devices(plan, local, outputs=PartitionSpec())(proxies, fixed, operands)


def _forward(plan, key_kind, proxies, fixed, operands):
    logs, sums = _statistics(plan, key_kind, proxies, fixed, operands)
    return (logs, sums), (proxies, fixed, operands, logs)


def _backward(plan, key_kind, residual, cotangents):
    proxies, fixed, operands, logs = residual
    leaves, structure = jax.tree.flatten(operands)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def merged(floats, others):
        floats, others = iter(floats), iter(others)
        return structure.unflatten([next(floats if f else others) for f in is_float])

    def local(proxies, rest):
        fixed, leaves, logs, cotangents = rest
        columns, first = _columns(plan, key_kind, proxies, fixed)
        floats = [leaf for leaf, f in zip(leaves, is_float, strict=True) if f]
        others = [leaf for leaf, f in zip(leaves, is_float, strict=True) if not f]

        def add(i, gradients):
            rows, tile = _tile(plan, proxies, columns, first, i)

            def of_tile(rows, floats):
                return plan.fn(rows, *tile, fixed[0], *merged(floats, others))

            (tile_logs, _), pull_back = jax.vjp(of_tile, rows, floats)
            # The slope of log(sum_t exp(l_t)) with respect to l_t is the share of exp(l_t).
            shares = jax.tree.map(_share_of, tile_logs, logs)
            tile_cotangents = jax.tree.map(jnp.multiply, cotangents[0], shares), cotangents[1]
            of_rows, of_floats = pull_back(tile_cotangents)
            of_proxies = _added(plan, gradients[0], of_rows, columns, i)
            return of_proxies, jax.tree.map(jnp.add, gradients[1], of_floats)

        zeros = jnp.zeros_like(proxies), jax.tree.map(jnp.zeros_like, floats)
        of_proxies, of_floats = jax.lax.fori_loop(0, _count(plan, columns), add, zeros)
        if plan.mesh is not None:
            of_floats = jax.lax.psum(of_floats, plan.mesh.axis_names[0])
        return of_proxies, of_floats

    outputs = PartitionSpec(), PartitionSpec()
    if plan.mesh is not None:
        outputs = PartitionSpec(plan.mesh.axis_names[0]), PartitionSpec()
    on_devices = _on_devices(plan, local, outputs=outputs)
    of_proxies, of_floats = on_devices(proxies, (fixed, leaves, logs, cotangents))
    others = [np.zeros(x.shape, jax.dtypes.float0) for x in leaves]
    others = [x for x, f in zip(others, is_float, strict=True) if not f]
    without = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), fixed)
    return of_proxies, without, merged(of_floats, others)


_statistics.defvjp(_forward, _backward)


def _on_devices(plan: _Plan, local: Callable, *, outputs: Any) -> Callable:
    """`local(proxies, *others)` on every device, with its own rows of the proxies."""
    if plan.mesh is None:
        return local

    def on_devices(proxies, *others):
        mapped = jax.shard_map(
            local,
            mesh=plan.mesh,
            in_specs=(PartitionSpec(plan.mesh.axis_names[0]), *[PartitionSpec()] * len(others)),
            out_specs=outputs,
            check_vma=False,
        )
        return mapped(proxies, *others)

    return on_devices


def _log_of_sum(logs, axis):
    """log(sum(exp(logs))) over the devices; -infinity where no device has a class."""
    peak = jax.lax.pmax(logs, axis)
    peak = jnp.where(jnp.abs(peak) < jnp.inf, peak, 0)
    return jnp.log(jax.lax.psum(jnp.exp(logs - peak), axis)) + peak


def _share_of(part, total):
    is_empty = part == -jnp.inf
    return jnp.where(is_empty, 0, jnp.exp(jnp.where(is_empty, 0, part - total)))


def _columns(plan: _Plan, key_kind, proxies, fixed) -> tuple[_Columns, Any]:
    """What this device goes over, and the number of its first class."""
    rows, (labels, key_data) = len(proxies), fixed
    first = 0 if plan.mesh is None else rows * jax.lax.axis_index(plan.mesh.axis_names[0])
    if key_data is None:
        return _Columns(rows), first
    batch = jnp.sort(labels)
    is_new = jnp.concatenate([jnp.ones(1, bool), batch[1:] != batch[:-1]])
    drawn, widths = _drawn(plan, jax.random.wrap_key_data(key_data, impl=key_kind), first, rows)
    slots = jnp.clip(jnp.searchsorted(batch, drawn), 0, len(batch) - 1)
    numbers = jnp.concatenate([batch, drawn.astype(batch.dtype)])
    counts = jnp.concatenate([is_new & (batch >= 0), batch[slots] != drawn])
    places = numbers - first
    here = (places >= 0) & (places < rows) & (numbers < plan.classes)
    weights = None
    if plan.unbiased:
        weights = jnp.concatenate([jnp.ones_like(batch), widths.astype(batch.dtype)])
    return _Columns(len(numbers), jnp.where(here, places, 0), counts & here, weights), first


def _drawn(plan: _Plan, key, first, rows: int) -> tuple[Array, Array]:
    """A class of every neighborhood that has classes on this device, and its number of neighbors.

    A neighborhood may reach over the border to the next device. Both devices draw the same class of
    it, because the draw depends only on the key and on the number of the neighborhood.
    """
    width = plan.neighbors
    j = first // width + jnp.arange((rows - 1) // width + 2, dtype=jnp.int32)
    widths = jnp.clip(plan.classes - j * width, 1, width)  # the last one may be smaller
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, j)
    bits = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
    return j * width + (bits % widths.astype(jnp.uint32)).astype(jnp.int32), widths


def _size(plan: _Plan, columns: _Columns) -> int:
    return min(plan.size or columns.total, columns.total)


def _count(plan: _Plan, columns: _Columns) -> int:
    return -(-columns.total // _size(plan, columns))


def _start(plan: _Plan, columns: _Columns, i):
    # The last tile overlaps the one before it, so that no array needs padding.
    return jnp.minimum(i * _size(plan, columns), columns.total - _size(plan, columns))


def _tile(plan: _Plan, proxies, columns: _Columns, first, i):
    """The rows of tile `i`, and their `(classes, where, weights)`."""
    size, start = _size(plan, columns), _start(plan, columns, i)
    positions = start + jnp.arange(size, dtype=jnp.int32)
    is_new = positions >= i * size
    if columns.places is None:
        rows = jax.lax.dynamic_slice_in_dim(proxies, start, size)
        return rows, (first + positions, is_new & (first + positions < plan.classes), None)
    places, where, weights = (
        x if x is None else jax.lax.dynamic_slice_in_dim(x, start, size)
        for x in (columns.places, columns.where, columns.weights)
    )
    return proxies[places], (first + places, is_new & where, weights)


def _added(plan: _Plan, gradients, of_rows, columns: _Columns, i):
    """`gradients` of the proxies, with the gradients of tile `i` added in their places."""
    start = _start(plan, columns, i)
    if columns.places is None:
        rows = jax.lax.dynamic_slice_in_dim(gradients, start, len(of_rows))
        return jax.lax.dynamic_update_slice_in_dim(gradients, rows + of_rows, start, 0)
    places = jax.lax.dynamic_slice_in_dim(columns.places, start, len(of_rows))
    return gradients.at[places].add(of_rows)
