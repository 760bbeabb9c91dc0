"""Where arrays live: rows of a batch over all devices, everything else on each of them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["Shardings", "prefetch", "put", "shardings"]


class Shardings:
    """`rows` splits the first axis over `devices`; `everywhere` copies."""

    def __init__(self, devices: Any = None):
        self.mesh = Mesh(np.array(jax.devices() if devices is None else devices), ("data",))
        self.rows = NamedSharding(self.mesh, PartitionSpec("data"))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())

    @property
    def size(self) -> int:
        return self.mesh.size


def shardings(devices: Any = None, *, batch: int) -> Shardings:
    """Over all devices (or `devices`), which must share a global batch of `batch` evenly."""
    found = Shardings(devices)
    if batch % found.size:
        raise ValueError(
            f"a global batch of {batch} cannot be shared by {found.size} devices evenly: choose a "
            f"multiple of {found.size}"
        )
    return found


def put(batch: dict[str, np.ndarray], rows: NamedSharding) -> dict[str, jax.Array]:
    """This host's rows of the global batch -> global arrays."""
    return {k: jax.make_array_from_process_local_data(rows, v) for k, v in batch.items()}


def prefetch(
    batches: Iterable[dict[str, np.ndarray]], rows: NamedSharding, *, ahead: int = 1
) -> Iterator[dict[str, jax.Array]]:
    """The same batches on the devices, each sent off while the one before is used."""
    waiting = collections.deque()
    for batch in batches:
        waiting.append(put(batch, rows))
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting
