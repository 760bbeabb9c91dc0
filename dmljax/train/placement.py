"""Shards weights of classes, optimizer state and parameters, as `runtime.sharded` says.

These are annotations only. XLA inserts the communication, and a step computes what it would compute
with everything on every device.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dmljax import adapt
from dmljax.methods.base import Method
from dmljax.train.devices import Shardings, with_rows

_MEMORY = "model_state/memory/"  # of a method that has `losses.cross_batch_memory`


class ClassRows(NamedTuple):
    """The parameters that have a row for each class.

    * `paths`: where they are. The optimizer keeps arrays whose paths end in these.
    * `classes`, `rows`: how many there are. Rows after the classes are zeros, so that the devices
      can share the rows evenly. No method sees them, and they stay zeros.
    * `is_split`: whether the devices share the rows.
    """

    paths: frozenset[str] = frozenset()
    classes: int = 0
    rows: int = 0
    is_split: bool = False

    def contains(self, path: str) -> bool:
        """Returns True for an array at one of `paths`, in the parameters or the optimizer state."""
        names = path.split("/")
        return any("/".join(names[i:]) in self.paths for i in range(len(names)))

    def padded(self, params: Any) -> Any:
        """Returns parameters with zeros after the rows of the classes."""
        return self._with_rows(params, self.rows)

    def cut(self, params: Any) -> Any:
        """Returns parameters as a method expects them, without the zeros."""
        return self._with_rows(params, self.classes)

    def _with_rows(self, params: Any, count: int) -> Any:
        if self.rows == self.classes:
            return params
        return jax.tree_util.tree_map_with_path(
            lambda keys, x: with_rows(x, count) if adapt.path_of(keys) in self.paths else x, params
        )


def class_rows(
    method: Method, params: Any, *, classes: int, shards: Shardings, sharded: str | None
) -> ClassRows:
    """Finds the rows of classes among the parameters (or their shapes) of a method."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {adapt.path_of(keys): x.shape[:1] for keys, x in leaves}
    # Without a split loss, the embeddings cannot be sent to the rows.
    folders = method.per_class if method.per_class and method.split_loss is not None else ()
    paths = frozenset(p for p in adapt.paths_under(folders, sizes) if sizes[p] == (classes,))
    if sharded == "classes" and not paths:
        raise ValueError(
            "runtime.sharded='classes' splits parameters with a row for each class, which this "
            "method has not: take the method proxies, or 'state' or 'all', or leave it out"
        )
    if sharded == "classes" and shards.size > classes:
        raise ValueError(
            f"runtime.sharded='classes': {shards.size} devices cannot share {classes} classes: use "
            f"at most --config.runtime.devices={classes}, or leave runtime.sharded out"
        )
    is_split = sharded is not None and bool(paths) and shards.size <= classes
    rows = classes + (-classes % shards.size if is_split else 0)
    return ClassRows(paths, classes, rows, is_split)


def of_state(
    shapes: Any,
    shards: Shardings,
    *,
    sharded: str | None = None,
    class_rows: ClassRows = ClassRows(),  # noqa: B008  a tuple
) -> Any:
    """Returns the sharding of every array of a `TrainState`.

    * None: every device has all arrays.
    * 'classes': the devices share the rows of `class_rows`, and what the optimizer keeps for them.
    * 'state': they also share all other arrays of the optimizer, and the rows of earlier batches
      that a loss keeps (`losses.cross_batch_memory`).
    * 'all': they also share all other parameters.

    An array is split along the longest axis that the number of devices divides; without such an
    axis, every device has all of it.
    """
    split_fields = {"state": {"opt_state"}, "all": {"opt_state", "params"}}.get(sharded or "", ())

    def choose(keys, leaf):
        path = adapt.path_of(keys)
        has_rows = class_rows.is_split and leaf.shape[:1] == (class_rows.rows,)
        if has_rows and class_rows.contains(path):
            return shards.rows
        if path.split("/")[0] in split_fields or (split_fields and path.startswith(_MEMORY)):
            return _split(leaf.shape, shards)
        return everywhere

    everywhere = shards.everywhere
    return jax.tree_util.tree_map_with_path(choose, shapes)


def used_params_fn(
    shards: Shardings, *, sharded: str | None, class_rows: ClassRows
) -> Callable[[Any], Any]:
    """Returns a function from the stored parameters to those that a method computes with.

    With 'all', every device gathers the parameters that others hold, except the rows of classes.
    """

    def gathered(keys, x):
        if class_rows.is_split and class_rows.contains(adapt.path_of(keys)):
            return x
        return jax.lax.with_sharding_constraint(x, shards.everywhere)

    def used(params):
        if sharded == "all":
            params = jax.tree_util.tree_map_with_path(gathered, params)
        return class_rows.cut(params)

    return used


def on_every_device(tree: Any, shards: Shardings) -> Any:
    """Replicates arrays, so that each host can read all of them.

    All processes must call this together.
    """
    return tree if shards.hosts == 1 else _gather(shards.everywhere)(tree)


@functools.cache
def _gather(everywhere: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=everywhere)


def _split(shape: tuple[int, ...], shards: Shardings) -> NamedSharding:
    axes = [i for i, n in enumerate(shape) if n % shards.size == 0]
    if not axes or not math.prod(shape):
        return shards.everywhere
    longest = max(axes, key=lambda i: shape[i])
    return NamedSharding(shards.mesh, PartitionSpec(*[None] * longest, *shards.mesh.axis_names))
