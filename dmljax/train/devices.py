"""Where arrays live: rows of a batch over all devices, everything else on each of them, but for
parameters that are asked for in shards."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["Shardings", "of_state", "path_of", "prefetch", "put", "shardings"]


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


def of_state(shapes: Any, shards: Shardings, *, patterns: Sequence[str] = ()) -> Any:
    """The sharding of every array of a state that has `params` and other fields.

    A parameter whose path matches one of `patterns` is split over the devices on its first axis,
    and with it what the optimizer keeps of it: arrays of its shape whose paths end in its path.
    """
    params = {path_of(p): a.shape for p, a in jax.tree_util.tree_leaves_with_path(shapes.params)}
    split = {}
    for pattern in patterns:
        found = {p: shape for p, shape in params.items() if re.search(pattern, p)}
        if not found:
            names = sorted({p.split("/")[0] for p in params})
            raise ValueError(
                f"runtime.sharded: no parameter matches {pattern!r}; they begin with "
                f"{', '.join(names)}"
            )
        split |= found
    for path, shape in split.items():
        if not shape or shape[0] % shards.size:
            raise ValueError(
                f"runtime.sharded: {path} is {list(shape)}, whose first axis {shards.size} devices "
                f"cannot share evenly: pad it (proxies: method.multiple={shards.size}), or leave "
                "it whole"
            )

    def choose(path, leaf):
        names = path_of(path).split("/")
        ends = ("/".join(names[i:]) for i in range(len(names)))
        return shards.rows if any(split.get(e) == leaf.shape for e in ends) else shards.everywhere

    return jax.tree_util.tree_map_with_path(choose, shapes)


def path_of(keys: Any) -> str:
    """'net/layer4/0/conv1/kernel'."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


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
