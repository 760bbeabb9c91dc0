"""Sharding of rows inside a computation on several devices, and the size of tiles."""

from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

__all__ = ["check_axes", "default_tile", "divides_evenly", "over_devices"]


def check_axes(mesh: Any) -> None:
    """Raises if a mesh has explicit axes, which `jax.make_mesh` gives it by default."""
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"the mesh has the explicit axes {mesh.axis_names}: take jax.sharding.Mesh(devices, "
            "names), or jax.make_mesh with axis_types=(jax.sharding.AxisType.Auto,)"
        )


def default_tile(*, on_accelerator: bool) -> int:
    """Rows that are compared with as many rows at a time.

    Accelerators take longer to start many small programs than to run them.
    """
    return 4096 if on_accelerator else 1024


def divides_evenly(batch: Any) -> bool:
    """Whether the devices of the train step (`train.loop.compiled_step`) have equal shares.

    In an exported program, which is for one device, `batch` may be a symbol.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or batch % mesh.size == 0


def over_devices(rows: jax.Array, *, batch: Any) -> jax.Array:
    """`rows`, split over the devices of the train step, if any.

    XLA needs this call where the first axis merges the `batch` images with another axis, and the
    devices do not divide the batch evenly. A device's share of the merged rows then differs from
    its share of the images, and XLA alone would compute all rows on every device.
    """
    if divides_evenly(batch):
        return rows
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(mesh.axis_names[0]))
