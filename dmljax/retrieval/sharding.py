"""A search on several devices: each has its own rows of a block, and a copy of the gallery's tile.

The kernels run on every device as they would on one, and nothing is exchanged between devices. So
the numbers are the same as on one device.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHARDED, REPLICATED = PartitionSpec("rows"), PartitionSpec()


def choose_mesh(devices: Sequence[jax.Device] | None, *, tiles: int) -> Mesh | None:
    """Returns a mesh of the devices (None: all of this process), or None for the default device.

    It returns None, too, if some device would get none of the `tiles` of rows.
    """
    devices = jax.local_devices() if devices is None else list(devices)
    # A single device needs a mesh only if it is not where arrays go by default.
    if len(devices) == 1 and devices[0] == jax.local_devices()[0]:
        return None
    return Mesh(np.array(devices), ("rows",)) if tiles >= len(devices) else None


def free_bytes(stats: Mapping[str, int] | None) -> int | None:
    """Returns the free memory by the `memory_stats` of a device; None for CPUs, which have none."""
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def bounds(share: tuple[int, int], count: int) -> tuple[int, int]:
    """Returns the first and the last row (exclusive) of the share `(i, n)` of `count` rows."""
    index, parts = share
    if not 0 <= index < parts:
        raise ValueError(f"share={share} must be (i, n) with i from 0 to n - 1")
    return count * index // parts, count * (index + 1) // parts


def put(arrays, mesh: Mesh | None, spec: PartitionSpec = SHARDED):
    """Puts a tree of NumPy arrays on the devices."""
    return jax.device_put(arrays, None if mesh is None else NamedSharding(mesh, spec))


def argument(arrays, mesh: Mesh | None, spec: PartitionSpec = SHARDED):
    """Puts a tree of NumPy arrays on the devices of a mesh, for one call.

    Without a mesh, the call itself sends them to the device, which takes less time of the host.
    """
    return arrays if mesh is None else put(arrays, mesh, spec)


def on_mesh(mesh: Mesh | None, kernel: Callable, *specs: PartitionSpec) -> Callable:
    """Runs `kernel` on every device of `mesh`; `specs` say which arguments are sharded by rows."""
    return kernel if mesh is None else _mapped(mesh, kernel, specs)


@functools.cache
def _mapped(mesh: Mesh, kernel: Callable, specs: tuple[PartitionSpec, ...]) -> Callable:
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=SHARDED))
