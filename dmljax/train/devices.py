"""Array placement: batches are sharded, everything else is replicated, unless `runtime.sharded`.

Any number of devices can share any batch. `jax.jit` only takes arrays whose rows the devices divide
evenly, so the hosts send rows of zeros after the last image (`Shardings.padded`), and the compiled
step first cuts them off (`step.train_step`). Inside a compiled program, XLA's partitioner splits
arrays unevenly: each device holds ceil(rows / devices) rows, which are the rows that it received,
and XLA masks what lies beyond the last one. So losses, miners, attention, batch statistics,
memories and random draws are the same as on one device with the same images, without any mask.
Where the batch divides, nothing is added or cut.
"""

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmljax.ops import Array

_DETERMINISTIC = "xla_gpu_deterministic_ops=true"


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
    """Yields the same batches on the devices, and sends a batch while the one before is used.

    `window` batches are sent as one block. `ahead` blocks are sent before they are used.
    """
    waiting: collections.deque[Iterator[dict[str, jax.Array]]] = collections.deque()
    iterator = iter(batches)
    while block := list(itertools.islice(iterator, window)):
        waiting.append(_sent(block, rows))
        if len(waiting) > ahead:
            yield from waiting.popleft()
    for block_batches in waiting:
        yield from block_batches


def _sent(
    batches: list[dict[str, np.ndarray]], rows: NamedSharding
) -> Iterator[dict[str, jax.Array]]:
    """Sends batches as one block."""
    if len(batches) == 1:
        return iter([put(batches[0], rows)])
    in_block = NamedSharding(rows.mesh, PartitionSpec(None, *rows.spec))
    block = put({name: np.stack([x[name] for x in batches]) for name in batches[0]}, in_block)
    return (_batch_of(block, i) for i in range(len(batches)))


@jax.jit
def _batch_of(block: dict[str, jax.Array], i: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.lax.dynamic_index_in_dim(x, i, 0, False) for name, x in block.items()}
