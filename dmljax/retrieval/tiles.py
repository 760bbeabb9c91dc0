"""Vectors on the devices in tiles of one shape, and the product of two tiles."""

import concurrent.futures
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from dmljax.ops.devices import default_tile
from dmljax.retrieval import inputs, sharding
from dmljax.retrieval.rules import SimilarityFn, euclidean, mask

SMALLEST = 128  # rows of the smallest tile; smaller data are padded
SLICES = 16  # a tile is folded into this many slices, so that sums run over whole vectors
# The tiles of a set of vectors up to this size stay on the devices; also up to a quarter of the
# memory that is free on an accelerator.
RESIDENT_BYTES = 1 << 30
BLOCKS_PER_PASS = 8  # blocks of queries that meet a tile of the gallery while it is on the devices
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


def passes(blocks: int) -> Iterator[range]:
    """Yields the blocks of queries that meet a tile of the gallery while it is on the devices."""
    for first in range(0, blocks, BLOCKS_PER_PASS):
        yield range(first, min(first + BLOCKS_PER_PASS, blocks))


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


def pad_items(items: Int[np.ndarray, "n"], side: int) -> Int[np.ndarray, "m"]:
    """Pads items with -1 to whole tiles."""
    return np.pad(items, (0, -len(items) % side), constant_values=-1)


def _resident_bytes(mesh: Mesh | None) -> int:
    device = jax.local_devices()[0] if mesh is None else mesh.local_devices[0]
    return max(RESIDENT_BYTES, (sharding.free_bytes(device.memory_stats()) or 0) // 4)


_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # vectors, which are items, groups


class Tiles:
    """`vectors[items]` and their `groups` as a sequence of tiles; an item of -1 is padding.

    A tile is put on the devices when it is used, and a thread reads the next one while they compute
    with it. A tile stays there only if all tiles together are small (`RESIDENT_BYTES`): the vectors
    may be larger than the memory of the devices and, in a memory-mapped file, than the memory of
    the host. On a `mesh`, a tile is sharded by rows or, with `spec=REPLICATED`, copied to every
    device.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        items: Int[np.ndarray, "m"],
        groups: Int[np.ndarray, "n g"],
        *,
        center: Float[np.ndarray, "d"],
        similarity_fn: SimilarityFn,
        side: int,
        mesh: Mesh | None = None,
        spec: PartitionSpec = sharding.SHARDED,
    ):
        self._vectors, self._items, self._groups = vectors, items, groups
        self.side, self.width, self.mesh, self._spec = side, vectors.shape[1], mesh, spec
        self._dtype = inputs.compute_dtype(vectors)
        self._similarity_fn = similarity_fn
        self._center = center.astype(self._dtype)
        size = len(items) * self.width * self._dtype.itemsize
        self._resident: dict[int, Tile] | None = {} if size <= _resident_bytes(mesh) else None
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None
        self._ahead: tuple[int, concurrent.futures.Future[_Arrays] | None] = (-1, None)

    def __len__(self) -> int:
        return len(self._items) // self.side

    def __getitem__(self, i: int) -> Tile:
        if not 0 <= i < len(self):
            raise IndexError(i)
        check_stop()
        if self._resident is None:
            return self._put(self._next(i))
        if i not in self._resident:
            self._resident[i] = self._put(self._next(i))
        return self._resident[i]

    def _next(self, i: int) -> _Arrays:
        """Returns tile `i` and starts to read the next one, which a search mostly asks for."""
        number, future = self._ahead
        arrays = future.result() if future is not None and number == i else self._read(i)
        self._ahead = (-1, None)
        if i + 1 < len(self) and i + 1 not in (self._resident or ()):
            if self._thread is None:
                self._thread = concurrent.futures.ThreadPoolExecutor(1, "tiles")
            self._ahead = (i + 1, self._thread.submit(self._read, i + 1))
        return arrays

    def _read(self, i: int) -> _Arrays:
        """Reads the vectors of tile `i` into the memory of the host."""
        items = self._items[i * self.side : (i + 1) * self.side]
        is_item = items >= 0
        items = np.maximum(items, 0)
        vectors = self._vectors[items].astype(self._dtype, copy=False)
        vectors[~is_item] = 0
        return vectors, is_item, self._groups[items].astype(np.int32)

    def _put(self, arrays: _Arrays) -> Tile:
        """Puts a tile on the devices. The transfer goes on while they compute."""
        arrays = sharding.argument(arrays, self.mesh, self._spec)
        return _make_tile(self._similarity_fn, *arrays, self._center)


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


def plain_tiles(
    vectors: Float[np.ndarray, "n d"],
    side: int,
    *,
    mesh: Mesh | None = None,
    spec: PartitionSpec = sharding.SHARDED,
) -> Tiles:
    """Returns all vectors in their order, for euclidean distances, without groups."""
    block = side if mesh is None or spec == sharding.REPLICATED else side * mesh.size
    items = pad_items(np.arange(len(vectors)), block)
    center = np.zeros(vectors.shape[1])
    return Tiles(
        vectors,
        items,
        np.zeros((len(vectors), 1), np.int64),
        center=center,
        similarity_fn=euclidean,
        side=block,
        mesh=mesh,
        spec=spec,
    )
