"""Vectors on the devices in tiles of one shape, and what is alike in them."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Integer

Embeddings = Float[Array, "b d"] | np.ndarray
Labels = Integer[Array, "b"] | np.ndarray
SimilarityFn = Callable[[Array, Array], tuple[Array, Array]]

SLICES = 16  # a tile is folded into this many slices, so that sums run over whole vectors
RESIDENT = 1 << 30  # bytes of vectors up to which all tiles of a set stay on the devices
_LEAST = 128  # the smallest tile: data smaller than this is padded


class Tile(NamedTuple):
    """Items as the kernels see them. Padding has zero vectors and offset -inf: it never ranks."""

    vectors: Float[Array, "n d"]
    offsets: Float[Array, "n"]
    groups: Int[Array, "n"]


def euclidean(
    vectors: Float[Array, "n d"], centre: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """-|q - g|^2 / 2 = q'g - |q|^2 / 2 - |g|^2 / 2, measured from the gallery's centre."""
    vectors = vectors - centre[None]
    return vectors, -0.5 * jnp.sum(vectors * vectors, axis=-1)


def cosine(
    vectors: Float[Array, "n d"], centre: Float[Array, "d"]
) -> tuple[Float[Array, "n d"], Float[Array, "n"]]:
    """q'g / |q||g|; a zero vector has similarity 0 to everything."""
    del centre  # angles are seen from the origin
    norms = jnp.sqrt(jnp.sum(vectors * vectors, axis=-1, keepdims=True))
    return vectors / jnp.where(norms > 0, norms, 1), jnp.zeros_like(norms[:, 0])


@jax.jit
def similarities(rows: Tile, columns: Tile) -> Float[Array, "b n"]:
    products = jnp.matmul(rows.vectors, columns.vectors.T, precision=jax.lax.Precision.HIGHEST)
    return products + (rows.offsets[:, None] + columns.offsets[None])


def prepare(
    embeddings: Embeddings, gallery: Embeddings | None, tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    if tile < _LEAST or tile % _LEAST:
        raise ValueError(f"tile={tile} must be a positive multiple of {_LEAST}")
    embeddings, centre = _checked(embeddings, "embeddings")
    if gallery is None:
        gallery = embeddings
    else:
        gallery, centre = _checked(gallery, "gallery")
        if gallery.shape[1] != embeddings.shape[1]:
            raise ValueError(
                f"embeddings have {embeddings.shape[1]} dimensions and the gallery has "
                f"{gallery.shape[1]}: embed both with the same net"
            )
    return embeddings, gallery, centre, side_of(max(len(embeddings), len(gallery)), tile)


def _checked(vectors: Embeddings, name: str) -> tuple[np.ndarray, Float[np.ndarray, "d"]]:
    """The array and, rounded, its mean. Subtracting that keeps far-off data from cancelling."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(
            f"{name} have shape {vectors.shape}: give an array [items, dimensions], not empty"
        )
    dtype = dtype_of(vectors)
    total, squares = np.zeros(vectors.shape[1]), 0.0
    for i in range(0, len(vectors), 4096):
        part = vectors[i : i + 4096].astype(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            bad = np.flatnonzero(~np.isfinite(np.vecdot(part, part)))
        if len(bad):
            raise ValueError(
                f"{name}[{i + bad[0]}] is not finite, or its norm is not: a NaN, an infinity or an "
                f"overflow of {dtype.name}. Find where the net diverged, or scale the embeddings"
            )
        total += part.sum(axis=0, dtype=np.float64)
        squares += float(np.vecdot(part, part).sum(dtype=np.float64))
    mean = total / len(vectors)
    spread = np.sqrt(max(squares / len(vectors) - float(mean @ mean), 0.0) / len(mean))
    # On a grid of a power of two, whole numbers stay whole, and exact ties stay exact.
    grid = 2.0 ** np.ceil(np.log2(spread)) if spread > 0 else 0.0
    return vectors, np.round(mean / grid) * grid if grid else np.zeros_like(mean)


def dtype_of(vectors: np.ndarray) -> np.dtype:
    dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(vectors.dtype), jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"embeddings are {vectors.dtype}: give real numbers")
    return np.dtype(dtype)


def side_of(n: int, tile: int) -> int:
    """Small data get small tiles, of few different sizes, since each size is compiled."""
    return min(tile, max(_LEAST, 1 << (n - 1).bit_length()))


def padded(items: Int[np.ndarray, "n"], side: int) -> Int[np.ndarray, "m"]:
    return np.pad(items, (0, -len(items) % side), constant_values=-1)


class Tiles:
    """`vectors[items]` as a sequence of tiles; an item of -1 is padding.

    A tile is put on the device when it is asked for, and stays there only if the whole set takes no
    more than `RESIDENT` bytes: the vectors may be larger than the device's memory and, in a
    memory-mapped file, than the host's. With a `mesh` a tile is shared out row by row, or, `whole`,
    is on each device.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        items: Int[np.ndarray, "m"],
        groups: Int[np.ndarray, "m"],
        *,
        centre: np.ndarray,
        similarity_fn: SimilarityFn,
        side: int,
        mesh: Mesh | None = None,
        whole: bool = False,
    ):
        self._vectors, self._items, self._groups = vectors, items, groups
        self.side, self.mesh, self._whole = side, mesh, whole
        self._dtype = dtype_of(vectors)
        self._similarity_fn = similarity_fn
        self._centre = centre.astype(self._dtype)
        fits = len(items) * vectors.shape[1] * self._dtype.itemsize <= RESIDENT
        self._kept: dict[int, Tile] | None = {} if fits else None

    def __len__(self) -> int:
        return len(self._items) // self.side

    def __getitem__(self, i: int) -> Tile:
        if not 0 <= i < len(self):
            raise IndexError(i)
        if self._kept is None:
            return self._load(i)
        if i not in self._kept:
            self._kept[i] = self._load(i)
        return self._kept[i]

    def _load(self, i: int) -> Tile:
        rows = slice(i * self.side, (i + 1) * self.side)
        items = self._items[rows]
        real = items >= 0
        part = np.zeros((self.side, self._vectors.shape[1]), self._dtype)
        part[real] = self._vectors[items[real]]
        parts = part, real, self._groups[rows].astype(np.int32)
        part, real, groups = put(parts, self.mesh, whole=self._whole)
        return _prepared(self._similarity_fn, part, real, groups, self._centre)


@functools.partial(jax.jit, static_argnums=0)
def _prepared(similarity_fn, vectors, real, groups, centre):
    seen, offsets = similarity_fn(vectors, centre)
    return Tile(jnp.where(real[:, None], seen, 0), jnp.where(real, offsets, -jnp.inf), groups)


def plain(vectors: np.ndarray, side: int, *, mesh: Mesh | None = None, whole: bool = False):
    """Vectors as they are, in tiles."""
    height = side if mesh is None or whole else side * mesh.size
    items = padded(np.arange(len(vectors)), height)
    centre = np.zeros(vectors.shape[1])
    return Tiles(
        vectors,
        items,
        items,
        centre=centre,
        similarity_fn=euclidean,
        side=height,
        mesh=mesh,
        whole=whole,
    )


# Many devices: each has its own rows of a tall tile, and all of the tile these are held to. The
# kernels below run on each as they would alone, so the numbers are those of one device, and nothing
# is exchanged.


def mesh_of(devices: Sequence[jax.Device] | None, *, rows: int) -> Mesh | None:
    """The devices (None: this process's) if each gets a tile of rows; None where one is enough."""
    devices = jax.local_devices() if devices is None else list(devices)
    # One named device is a mesh too, unless it is where arrays go anyway.
    if len(devices) == 1 and devices[0] == jax.local_devices()[0]:
        return None
    return Mesh(np.array(devices), ("rows",)) if rows >= len(devices) else None


def put(arrays, mesh: Mesh | None, *, whole: bool = False):
    if mesh is None:
        return jax.tree.map(jnp.asarray, arrays)
    return jax.device_put(arrays, NamedSharding(mesh, _SPECS["w" if whole else "r"]))


def over(mesh: Mesh | None, kernel: Callable, roles: str) -> Callable:
    """`kernel` on each device of `mesh`, with its rows (r) or the whole (w) of an argument."""
    return kernel if mesh is None else _mapped(mesh, kernel, roles)


_SPECS = {"r": PartitionSpec("rows"), "w": PartitionSpec()}


@functools.cache
def _mapped(mesh: Mesh, kernel: Callable, roles: str) -> Callable:
    specs = tuple(_SPECS[role] for role in roles)
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=_SPECS["r"]))
