"""Vectors on the devices in tiles of one shape, and the product of two tiles.

Several devices share a search: each has its own rows of a block, and a copy of the gallery's tile.
The kernels run on every device as they would on one, and nothing is exchanged between devices. So
the numbers are the same as on one device.
"""

import collections
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dmljax.ops.devices import default_tile, free_bytes
from dmljax.retrieval import inputs
from dmljax.retrieval.rules import SimilarityFn, euclidean, mask

SHARDED, REPLICATED = PartitionSpec("rows"), PartitionSpec()
SMALLEST = 128  # rows of the smallest tile; smaller data are padded
SLICES = 16  # a tile is folded into this many slices, so that sums run over whole vectors
# The tiles of a set of vectors up to this size stay on the devices; also up to a quarter of the
# memory that is free on an accelerator.
RESIDENT_BYTES = 1 << 30
BLOCKS_PER_PASS = 8  # tiles of rows that meet a tile of columns while it is on the devices
_QUEUED = 4  # tiles of similarities that may wait for the devices, each with its memory
STRIP_SIZE = 1 << 24  # similarities in memory at once where whole rows are sorted


_stop_fn: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar(
    "stop_fn", default=lambda: None
)


@contextlib.contextmanager
def stoppable(stop_fn: Callable[[], None]) -> Iterator[None]:
    """Calls `stop_fn()` before each tile of all searches in the block; it may raise an exception.

    >>> def give_up():
    ...     raise TimeoutError("the search is ended")
    >>> with retrieval.stoppable(give_up):  # doctest: +IGNORE_EXCEPTION_DETAIL
    ...     retrieval.kmeans(np.ones((9, 2)), k=2)
    Traceback (most recent call last):
    TimeoutError: the search is ended
    """
    token = _stop_fn.set(stop_fn)
    try:
        yield
    finally:
        _stop_fn.reset(token)


def check_stop() -> None:
    """Calls the `stop_fn` of the surrounding `stoppable`."""
    _stop_fn.get()()


class Tile(NamedTuple):
    """Items as the kernels use them. Padding has zero vectors and offset -inf, and never ranks.

    `groups` are those of `rules.mask`: items that share one are not negatives of each other.
    """

    vectors: Float[Array, "n d"]
    offsets: Float[Array, "n"]
    groups: Int[Array, "n g"]


@jax.jit
def similarities(rows: Tile, columns: Tile) -> Float[Array, "b n"]:
    """Returns the similarity of every row to every column."""
    products = jnp.matmul(rows.vectors, columns.vectors.T, precision=jax.lax.Precision.HIGHEST)
    return products + (rows.offsets[:, None] + columns.offsets[None])


@jax.jit
def negatives(rows: Tile, columns: Tile) -> Float[Array, "b n"]:
    """Returns the similarities, and -inf for the pairs that the search leaves out."""
    is_left_out = mask(rows.groups[:, None], columns.groups[None])
    return jnp.where(is_left_out, -jnp.inf, similarities(rows, columns))


def choose_tile(tile: int | None, devices: Sequence[jax.Device] | None) -> int:
    """Returns the tile size. None is `default_tile`."""
    if devices is not None and not len(devices):
        raise ValueError("devices is empty: leave it out for all devices of this process")
    if tile is None:
        return default_tile(on_accelerator=on_accelerator(devices))
    if tile < SMALLEST or tile % SMALLEST:
        raise ValueError(f"tile={tile} must be a positive multiple of {SMALLEST}")
    return tile


def on_accelerator(devices: Sequence[jax.Device] | None) -> bool:
    """Returns whether `devices` (None: all of this process) are accelerators."""
    devices = jax.local_devices() if devices is None else devices
    return devices[0].platform != "cpu"


def choose_side(n: int, tile: int) -> int:
    """Returns the tile size for n items: small data get small tiles, of few compiled sizes."""
    return min(tile, max(SMALLEST, 1 << (n - 1).bit_length()))


def choose_mesh(devices: Sequence[jax.Device] | None, *, count: int) -> Mesh | None:
    """Returns a mesh of the devices (None: all of this process), or None for the default device.

    It returns None, too, if some device would get none of the `count` tiles of rows.
    """
    devices = jax.local_devices() if devices is None else list(devices)
    # A single device needs a mesh only if it is not where arrays go by default.
    if len(devices) == 1 and devices[0] == jax.local_devices()[0]:
        return None
    return Mesh(np.array(devices), ("rows",)) if count >= len(devices) else None


def put(arrays: Any, mesh: Mesh | None, spec: PartitionSpec = SHARDED) -> Any:
    """Puts a tree of NumPy arrays on the devices."""
    return jax.device_put(arrays, None if mesh is None else NamedSharding(mesh, spec))


def on_mesh(mesh: Mesh | None, kernel: Callable, *specs: PartitionSpec) -> Callable:
    """Runs `kernel` on every device of `mesh`; `specs` say which arguments are sharded by rows."""
    return kernel if mesh is None else _mapped(mesh, kernel, specs)


@functools.cache
def _mapped(mesh: Mesh, kernel: Callable, specs: tuple[PartitionSpec, ...]) -> Callable:
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=SHARDED))


def _resident_bytes(mesh: Mesh | None) -> int:
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    return max(RESIDENT_BYTES, (free_bytes(device.memory_stats()) or 0) // 4)


class Tiles:
    """`vectors[items]` and their `groups` as a sequence of tiles; an item of -1 is padding.

    A tile is put on the devices when it is used, and the devices compute while the host reads the
    next one. A tile stays there only if all tiles together are small (`RESIDENT_BYTES`): the
    vectors may be larger than the memory of the devices and, in a memory-mapped file, than the
    memory of the host. On a `mesh`, each device has `side` rows of a tile or, with
    `spec=REPLICATED`, a copy of it. Without `items`, all vectors are taken in their order; without
    `groups`, no pair is left out.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        items: Int[np.ndarray, "m"] | None = None,
        groups: Int[np.ndarray, "n g"] | None = None,
        *,
        side: int,
        center: Float[np.ndarray, "d"] | None = None,
        similarity_fn: SimilarityFn = euclidean,
        mesh: Mesh | None = None,
        spec: PartitionSpec = SHARDED,
    ):
        self.side = side if mesh is None or spec == REPLICATED else side * mesh.size
        self.width, self.mesh, self._spec = vectors.shape[1], mesh, spec
        items = np.arange(len(vectors)) if items is None else items
        self.items = np.pad(items, (0, -len(items) % self.side), constant_values=-1)
        self._vectors, self._dtype = vectors, inputs.compute_dtype(vectors)
        self._groups = np.zeros((len(vectors), 0), np.int32) if groups is None else groups
        center = np.zeros(self.width) if center is None else center
        self._similarity_fn, self._center = similarity_fn, center.astype(self._dtype)
        size = len(self.items) * self.width * self._dtype.itemsize
        self._resident: dict[int, Tile] | None = {} if size <= _resident_bytes(mesh) else None

    def __len__(self) -> int:
        return len(self.items) // self.side

    def __getitem__(self, i: int) -> Tile:
        check_stop()
        if self._resident is None:
            return self._load(i)
        if i not in self._resident:
            self._resident[i] = self._load(i)
        return self._resident[i]

    def _load(self, i: int) -> Tile:
        """Reads tile `i` and puts it on the devices. The transfer goes on while they compute."""
        items = self.items[i * self.side : (i + 1) * self.side]
        is_item = items >= 0
        items = np.maximum(items, 0)
        vectors = self._vectors[items].astype(self._dtype, copy=False)
        vectors[~is_item] = 0
        arrays = vectors, is_item, self._groups[items].astype(np.int32)
        return _make_tile(self._similarity_fn, *put(arrays, self.mesh, self._spec), self._center)


@functools.partial(jax.jit, static_argnums=0)
def _make_tile(
    similarity_fn: SimilarityFn,
    vectors: Float[Array, "n d"],
    is_item: Bool[Array, "n"],
    groups: Int[Array, "n g"],
    center: Float[Array, "d"],
) -> Tile:
    vectors, offsets = similarity_fn(vectors, center)
    return Tile(
        jnp.where(is_item[:, None], vectors, 0), jnp.where(is_item, offsets, -jnp.inf), groups
    )


def sweep(
    rows: Tiles,
    columns: Tiles,
    states: Mapping[int, Any],
    *,
    blocks: Sequence[int] | None = None,
    is_upper: bool = False,
    together: int | None = None,
) -> Iterator[tuple[int, Tile, int, Tile]]:
    """Yields all pairs of a tile of rows and a tile of columns: `(b, rows[b], j, columns[j])`.

    This is the loop of every search. A tile of columns meets `together` tiles of rows while it is
    on the devices. The caller stores what it computes for row tile `b` in `states[b]`: the devices
    may lag behind the host by a few pairs, which bounds their memory.

    Args:
        blocks: The row tiles to visit; all by default.
        is_upper: Whether to skip the pairs with j < b.
    """
    blocks = range(len(rows)) if blocks is None else blocks
    together = together or BLOCKS_PER_PASS
    waiting: collections.deque[Any] = collections.deque()
    for first in range(0, len(blocks), together):
        indices = blocks[first : first + together]
        row_tiles = [rows[b] for b in indices]
        for j in range(indices[0] if is_upper else 0, len(columns)):
            column_tile = columns[j]
            for b, row_tile in zip(indices, row_tiles, strict=True):
                if j >= b or not is_upper:
                    yield b, row_tile, j, column_tile
                    waiting.append(states.get(b))
                    if len(waiting) > _QUEUED:
                        jax.block_until_ready(waiting.popleft())
