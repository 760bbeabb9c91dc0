"""Sharding of rows inside a computation on several devices."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

__all__ = ["over_devices"]


def over_devices(rows: jax.Array) -> jax.Array:
    """`rows`, split over the devices of the train step (`train.loop.compiled_step`), if any.

    XLA needs this call where the first axis merges the images of a batch with another axis, and the
    devices do not divide the batch evenly. A device's share of the merged rows then differs from
    its share of the images, and XLA alone would compute all rows on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or len(rows) % mesh.size == 0:
        return rows
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(mesh.axis_names[0]))
