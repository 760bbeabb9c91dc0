"""Array placement: batches are sharded, and other arrays are replicated or sharded on request.

Any number of devices can share any batch. `jax.jit` only takes arrays whose rows the devices divide
evenly, so the hosts send rows of zeros after the last image (`Shardings.padded`), and the compiled
step first cuts them off (`step.train_step`). Inside a compiled program, XLA's partitioner splits
arrays unevenly: each device holds ceil(rows / devices) rows, which are the rows that it received,
and XLA masks what lies beyond the last one. So losses, miners, attention, batch statistics,
memories and random draws are the same as on one device with the same images, without any mask.
Where the batch divides, nothing is added or cut.

`runtime.sharded` shards weights of classes, optimizer state and parameters (`of_state`). These are
annotations only: XLA inserts the communication, and a step computes what it would compute with
everything on every device.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmljax.adapt.trees import path_of, paths_under
from dmljax.methods.base import Method
from dmljax.ops import Array

_T = TypeVar("_T")
_DETERMINISTIC = "xla_gpu_deterministic_ops=true"
_MEMORY = "model_state/memory/"  # of a method that has `losses.cross_batch_memory`


class Shardings:
    """Two ways to place an array: `rows` shards its first axis, `everywhere` replicates it.

    By default on all devices of all processes; the devices of a process are neighbors.
    """

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        if devices is None:
            devices = sorted(jax.devices(), key=lambda device: device.process_index)
        self.mesh = Mesh(np.array(devices), ("data",))
        self.rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def platform(self) -> str:
        return next(self.mesh.devices.flat).platform

    @property
    def hosts(self) -> int:
        """The number of processes that the devices belong to."""
        return len({device.process_index for device in self.mesh.devices.flat})

    def padded(self, batch: int, *, chunk: int | None = None) -> int:
        """Returns the number of rows of a global batch with padding, over all devices.

        The rows of a device are neighbors in the batch. Every `batch / chunk`-th of them is in the
        same chunk (`step.train_step`), so a device holds its rows of all chunks.
        """
        chunk = min(chunk or batch, batch)
        return -(-chunk // self.size) * self.size * -(-batch // chunk)


def with_rows(rows: Array, count: int | None) -> Array:
    """Returns the first `count` rows, padded with zeros if there are fewer; None: all rows.

    For sharded rows, call it in a compiled program, where shards may have different sizes.
    """
    missing = 0 if count is None else count - len(rows)
    if missing > 0:
        return jnp.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)])
    return rows[:count] if missing else rows


def check_determinism(platform: str, flags: str) -> None:
    """Raises unless a run on this platform, with these XLA_FLAGS, repeats bit for bit."""
    if platform == "gpu" and _DETERMINISTIC not in flags:
        raise ValueError(
            "runtime.deterministic is read before JAX starts, which has started: use `dmljax "
            f"train`, or set XLA_FLAGS=--{_DETERMINISTIC}"
        )


def describe_determinism(platform: str) -> str:
    """Describes what makes a run repeat bit for bit, for its header."""
    return f"deterministic (--{_DETERMINISTIC})" if platform == "gpu" else "deterministic"


def put(batch: dict[str, np.ndarray], rows: NamedSharding) -> dict[str, jax.Array]:
    """Returns the global arrays of a batch; `batch` has the rows of this host."""
    return {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}


def prefetch(
    batches: Iterable[dict[str, np.ndarray]],
    rows: NamedSharding,
    *,
    ahead: int = 1,
    window: int = 1,
) -> Iterator[dict[str, jax.Array]]:
    """Yields the same batches on the devices.

    `window` batches are sent as one block. `ahead` blocks are sent before they are used.
    """
    iterator = iter(batches)
    blocks = iter(lambda: list(itertools.islice(iterator, window)), [])
    sent = requested_ahead((_sent(block, rows) for block in blocks), count=ahead)
    return itertools.chain.from_iterable(sent)


def _sent(
    batches: list[dict[str, np.ndarray]], rows: NamedSharding
) -> Iterable[dict[str, jax.Array]]:
    """Sends batches as one block."""
    if len(batches) == 1:
        return [put(batches[0], rows)]
    in_block = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))
    block = put({name: np.stack([x[name] for x in batches]) for name in batches[0]}, in_block)
    return (_batch_of(block, i) for i in range(len(batches)))


@jax.jit
def _batch_of(block: dict[str, jax.Array], i: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_index_in_dim(x, i, 0, False) for name, x in block.items()}


def requested_ahead(items: Iterable[_T], *, count: int = 1) -> Iterator[_T]:
    """Yields `items`, each when the `count` next ones have been taken."""
    waiting: collections.deque[_T] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


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
            lambda keys, x: with_rows(x, count) if path_of(keys) in self.paths else x, params
        )


def class_rows(
    method: Method, params: Any, *, classes: int, shards: Shardings, sharded: str | None
) -> ClassRows:
    """Finds the rows of classes among the parameters (or their shapes) of a method."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {path_of(keys): x.shape[:1] for keys, x in leaves}
    # Without a split loss, the embeddings cannot be sent to the rows.
    folders = method.per_class if method.per_class and method.split_loss is not None else ()
    paths = frozenset(p for p in paths_under(folders, sizes) if sizes[p] == (classes,))
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
        path = path_of(keys)
        has_rows = class_rows.is_split and leaf.shape[:1] == (class_rows.rows,)
        if has_rows and class_rows.contains(path):
            return shards.rows
        if path.split("/")[0] in split_fields or (split_fields and path.startswith(_MEMORY)):
            return _split(leaf.shape, shards)
        return shards.everywhere

    return jax.tree_util.tree_map_with_path(choose, shapes)


def used_params_fn(
    shards: Shardings, *, sharded: str | None, class_rows: ClassRows
) -> Callable[[Any], Any]:
    """Returns a function from the stored parameters to those that a method computes with.

    With 'all', every device gathers the parameters that others hold, except the rows of classes.
    """

    def gathered(keys, x):
        if class_rows.is_split and class_rows.contains(path_of(keys)):
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
    axes = [i for i, n in enumerate(shape) if n % shards.size == 0 and 0 not in shape]
    if not axes:
        return shards.everywhere
    longest = max(axes, key=shape.__getitem__)
    return NamedSharding(shards.mesh, PartitionSpec(*[None] * longest, *shards.mesh.axis_names))
