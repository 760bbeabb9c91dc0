"""What a computation on several devices needs to know of them: nothing but this one function."""

from __future__ import annotations

import jax
from jax.sharding import PartitionSpec

__all__ = ["over_devices"]


def over_devices(rows: jax.Array) -> jax.Array:
    """`rows`, split over the devices of the train step (`train.loop.compiled_step`), if any.

    XLA does so by itself unless the first axis was just merged from the images of a batch, which
    the devices do not divide evenly, and another axis. Devices then hold other shares of the merged
    rows than of the images, and without this call XLA would compute all rows on every device.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or len(rows) % mesh.size == 0:
        return rows
    return jax.lax.with_sharding_constraint(rows, PartitionSpec(mesh.axis_names[0]))
