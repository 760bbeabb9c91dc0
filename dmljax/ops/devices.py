"""Sharding of rows inside a computation on several devices, and the size of tiles."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

__all__ = ["current_mesh", "default_tile", "divides_evenly", "free_bytes", "over_devices"]


def current_mesh() -> Any:
    """Returns the mesh whose devices share a computation, or None for a single device.

    It is the mesh of `jax.sharding.use_abstract_mesh` or `jax.set_mesh`; its first axis counts.
    Inside `jax.shard_map`, each device computes alone. Raises if the mesh has explicit axes, which
    `jax.make_mesh` gives it by default.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[mesh.axis_names[0]] == 1:
        return None
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"the mesh has the explicit axes {mesh.axis_names}: take jax.sharding.Mesh(devices, "
            "names), or jax.make_mesh with axis_types=(jax.sharding.AxisType.Auto,)"
        )
    return None if mesh.axis_types[0] == AxisType.Manual else mesh


def default_tile(*, on_accelerator: bool) -> int:
    """Returns the size of tiles of similarities.

    Accelerators take longer to start many small programs than to run them.
    """
    return 4096 if on_accelerator else 1024


def free_bytes(stats: Mapping[str, int] | None) -> int | None:
    """Returns the free memory by the `memory_stats` of a device; None for CPUs, which have none."""
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def divides_evenly(batch: Any) -> bool:
    """Returns whether the devices of the train step get equal shares of a batch.

    In an exported program, which is for one device, `batch` may be a symbol.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or batch % mesh.size == 0


def over_devices(rows: jax.Array, *, batch: Any) -> jax.Array:
    """Returns `rows`, split over the devices of the train step, if any.

    XLA needs this call where the first axis merges the `batch` images with another axis, and the
    devices do not divide the batch evenly. A device's share of the merged rows then differs from
    its share of the images, and XLA alone would compute all rows on every device.
    """
    if divides_evenly(batch):
        return rows
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(mesh.axis_names[0]))
