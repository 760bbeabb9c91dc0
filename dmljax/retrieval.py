"""Exact ranks, nearest neighbours and k-means, in tiles: nothing of size [queries, gallery] exists.

Arrays may be numpy, memory-mapped or jax; integers and half precision are computed in float32.
Shared arguments: `gallery` (and `gallery_labels`) is what is searched; without it the embeddings
search themselves, and each item is excluded from its own ranking by its index. `similarity_fn` is
`euclidean` (squared or not: the ranks are the same) or `cosine`. `tile`, a multiple of 128, is the
side of the blocks of similarities and bounds the memory.
"""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

__all__ = [
    "Embeddings",
    "KMeans",
    "Labels",
    "Ranks",
    "SimilarityFn",
    "cosine",
    "euclidean",
    "kmeans",
    "nearest",
    "ranks",
]

Embeddings = Float[Array, "b d"] | np.ndarray
Labels = Int[Array, "b"] | np.ndarray
SimilarityFn = Callable[[Array, Array], tuple[Array, Array]]

_LEAST = 128  # the smallest tile: data smaller than this is padded
_SLICES = 16  # a tile is folded into this many slices, so that sums run over whole vectors
_GROUP = 8  # thresholds counted by one pass over a tile
_SORTED_FROM = 64  # from this many positives on, sorting whole rows beats comparing with each
_AHEAD = 4  # tiles of similarities that may wait in the queue, each with its memory
_STRIP = 1 << 24  # similarities held at once where whole rows are sorted


class Ranks(NamedTuple):
    """`ranks[i, j]` is the rank of the j-th best positive of query `queries[i]`; 0 is padding."""

    queries: Int[np.ndarray, "q"]
    ranks: Int[np.ndarray, "q r"]


class KMeans(NamedTuple):
    """`inertia` is the sum of squared distances to the assigned centres."""

    centres: Float[np.ndarray, "k d"]
    assignment: Int[np.ndarray, "n"]
    inertia: float


class _Tile(NamedTuple):
    """Items as the kernels see them. Padding has zero vectors and offset -inf: it never ranks."""

    vectors: Float[Array, "n d"]
    offsets: Float[Array, "n"]
    groups: Int[Array, "n"]


class _Queries(NamedTuple):
    """One tile of queries, where their positives start among the gallery's slots, how many."""

    tile: _Tile
    items: Int[np.ndarray, "n"]
    starts: Int[np.ndarray, "n"]
    sizes: Int[np.ndarray, "n"]
    own: Int[np.ndarray, "n"]  # the slot of the query itself, -1 where the gallery is another set

    @property
    def positives(self) -> Int[np.ndarray, "n"]:
        return self.sizes - ((self.own >= 0) & (self.sizes > 0))


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


def ranks(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
) -> Iterator[Ranks]:
    """rank of the j-th positive = j + #{negatives at least as similar}: tied negatives go ahead.

    Queries come in blocks and in no promised order; those without a positive do not come.
    """
    embeddings, gallery_, centre, side = _prepared(embeddings, gallery, tile)
    own, others = _codes(labels, gallery_labels, len(embeddings), len(gallery_), gallery is None)
    slots, starts, sizes = _layout(own, others, side)
    load = functools.partial(_tiles, centre=centre, similarity_fn=similarity_fn, side=side)
    columns = load(gallery_, slots, np.where(slots < 0, -1, others[slots]))
    if gallery is None:
        items, lines, place = slots, columns, np.where(slots < 0, -1, np.arange(len(slots)))
    else:
        items = np.flatnonzero(sizes[own] > 0)
        items = items[np.argsort(starts[own[items]], kind="stable")]
        items = _padded(items, side)
        # No class is -2, so that padding of queries meets no padding of the gallery.
        lines = load(embeddings, items, np.where(items < 0, -2, own[items]))
        place = np.full(len(items), -1)
    known = np.where(items < 0, 0, sizes[own[items]])
    queries = [
        _Queries(
            lines[i // side],
            *(a[i : i + side] for a in (items, starts[own[items]], known)),
            place[i : i + side],
        )
        for i in range(0, len(items), side)
    ]
    most = np.array([q.positives.max() for q in queries])
    few = {int(i) for i in np.flatnonzero((most > 0) & (most < _SORTED_FROM))}
    yield from _counted(queries, columns, few, mirrored=gallery is None and _symmetric(columns[0]))
    for i in np.flatnonzero(most >= _SORTED_FROM):
        yield from _sorted(queries[i], columns)


def _counted(
    queries: list[_Queries], columns: list[_Tile], few: set[int], *, mirrored: bool
) -> Iterator[Ranks]:
    """Ranks of the queries `few`, whose positives are thresholds for every tile to be held to.

    Mirrored, queries and gallery are the same tiles: each product serves its rows and its columns.
    """
    thresholds = {i: _thresholds(queries[i], columns) for i in few}
    counts = {i: [jnp.zeros(t.shape, jnp.int32) for t in thresholds[i]] for i in few}
    for i, query in enumerate(queries):
        for j in range(i if mirrored else 0, len(columns)):
            down = mirrored and j != i and j in few
            if not (down or i in few):
                continue
            negatives = _negatives(query.tile, columns[j])
            if i in few:
                pairs = zip(counts[i], thresholds[i], strict=True)
                counts[i] = [_count(c, negatives, t) for c, t in pairs]
            if down:
                pairs = zip(counts[j], thresholds[j], strict=True)
                counts[j] = [_count_down(c, negatives, t) for c, t in pairs]
            if j % _AHEAD == 0:
                jax.block_until_ready((counts.get(i), counts.get(j)))
    for i in sorted(few):
        ahead = np.concatenate([np.asarray(c) for c in counts[i]], axis=1)
        yield from _ranks_of(queries[i], ahead)


def _ranks_of(query: _Queries, ahead: Int[np.ndarray, "n r"]) -> Iterator[Ranks]:
    place = np.arange(1, ahead.shape[1] + 1)
    valid = place <= query.positives[:, None]
    rows = np.flatnonzero(valid[:, 0])
    yield Ranks(query.items[rows], np.where(valid, ahead + place, 0)[rows])


def _thresholds(query: _Queries, columns: list[_Tile]) -> list[Float[Array, "n r"]]:
    """Similarities of the positives, best first, taken from the products that count negatives.

    Another kernel might round differently, and a negative equal to a positive would not be tied.
    """
    valid = query.positives > 0
    side = len(query.items)
    first = query.starts[valid].min() // side
    last = -(-(query.starts + query.sizes)[valid].max() // side)
    found = [np.asarray(_similarities(query.tile, columns[c])) for c in range(first, last)]
    found = np.concatenate(found, axis=1)
    step = np.arange(query.sizes[valid].max())
    slots = query.starts[:, None] + step
    positive = valid[:, None] & (step < query.sizes[:, None]) & (slots != query.own[:, None])
    at = np.clip(slots - first * side, 0, found.shape[1] - 1)
    found = np.where(positive, np.take_along_axis(found, at, axis=1), -np.inf)
    found = -np.sort(-found, axis=1)[:, : query.positives.max()]
    width = -(-found.shape[1] // _GROUP) * _GROUP
    out = np.full((side, width), np.inf, found.dtype)
    out[:, : found.shape[1]] = np.where(np.isneginf(found), np.inf, found)
    return [jnp.asarray(out[:, i : i + _GROUP]) for i in range(0, width, _GROUP)]


def _sorted(query: _Queries, columns: list[_Tile]) -> Iterator[Ranks]:
    """Ranks of queries with many positives, from whole rows sorted on the host, strip by strip."""
    side = len(query.items)
    total = side * len(columns)
    height = side
    while height > 8 and height * total > _STRIP:
        height //= 2
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for i in range(0, side, height):
            part = _Queries(*(jax.tree.map(lambda a, i=i: a[i : i + height], f) for f in query))
            strip = np.empty((height, total), part.tile.vectors.dtype)
            for c, column in enumerate(columns):
                strip[:, c * side : (c + 1) * side] = _similarities(part.tile, column)
            ahead = np.zeros((height, max(1, part.positives.max())), np.int64)

            def fill(row: int, part=part, strip=strip, ahead=ahead) -> None:
                start, size, own = part.starts[row], part.sizes[row], part.own[row]
                if not (count := part.positives[row]):
                    return
                if own >= 0:
                    strip[row, own] = -np.inf
                positives = np.sort(strip[row, start : start + size])[::-1][:count]
                strip[row, start : start + size] = -np.inf
                strip[row].sort()
                ahead[row, :count] = total - np.searchsorted(strip[row], positives)

            list(pool.map(fill, range(height)))
            yield from _ranks_of(part, ahead)


def nearest(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    *,
    k: int,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
) -> tuple[Int[np.ndarray, "q k"], Float[np.ndarray, "q k"]]:
    """Indices and similarities of the k most similar items, best first, ties by index."""
    queries, gallery_, centre, side = _prepared(queries, gallery, tile)
    n = len(gallery_) - (gallery is None)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}, but there are {n} items to find: choose k from 1 to {n}")
    load = functools.partial(_tiles, centre=centre, similarity_fn=similarity_fn, side=side)
    slots = _padded(np.arange(len(gallery_)), side)
    columns = load(gallery_, slots, slots)
    rows = _padded(np.arange(len(queries)), side)
    lines = columns if gallery is None else load(queries, rows, np.full(len(rows), -2))
    out = []
    for line in lines:
        best = jnp.full((side, k), -jnp.inf, line.vectors.dtype), jnp.zeros((side, k), jnp.int32)
        for c, column in enumerate(columns):
            best = _merge(*best, line, column, c * side)
        out.append([np.asarray(a) for a in best])
    similarities, indices = (np.concatenate(a)[: len(queries)] for a in zip(*out, strict=True))
    return indices, similarities


def kmeans(
    embeddings: Embeddings,
    *,
    k: int,
    seed: int = 0,
    iterations: int = 100,
    tile: int = 1024,
) -> KMeans:
    """Lloyd's iterations from a k-means++ start (Arthur & Vassilvitskii, 2007).

    Distances that cannot have changed are not computed again: a point whose centre stayed is held
    to the moved centres only, which gives the same assignment. An empty cluster takes the point
    that is farthest from its centre. Stops when no point changes its cluster.
    """
    points, _, centre, side = _prepared(embeddings, None, tile)
    n = len(points)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} clusters, but there are {n} embeddings: choose k from 1 to {n}")
    dtype = _dtype(points)
    points = points.astype(dtype) - centre.astype(dtype)
    squares = np.vecdot(points, points).astype(np.float64)
    everything = _plain(points, side)
    rng = np.random.default_rng(seed)
    centres = points[_seeds(points, everything, squares, k, rng, side)]
    assignment, best = np.full(n, -1), np.full(n, -np.inf, dtype)
    moved = np.ones(k, bool)
    for _ in range(iterations):
        before = assignment.copy()
        stays = (assignment >= 0) & ~moved[assignment]
        if not stays.any():
            best, assignment = _closest(points, centres, side, tiles=everything)
        elif moved.any():
            again, rest = np.flatnonzero(~stays), np.flatnonzero(stays)
            best[again], assignment[again] = _closest(points[again], centres, side)
            which = np.flatnonzero(moved)
            near, at = _closest(points[rest], centres[which], side)
            at = which[at]
            wins = (near > best[rest]) | ((near == best[rest]) & (at < assignment[rest]))
            best[rest[wins]], assignment[rest[wins]] = near[wins], at[wins]
        filled = _repair(points, centres, assignment, squares - 2.0 * best)
        switched = before != assignment
        if not switched.any():
            break
        touched = np.union1d(before[switched & (before >= 0)], assignment[switched])
        old = centres[touched]
        _recentre(points, centres, assignment, touched)
        moved = np.zeros(k, bool)
        moved[touched] = (centres[touched] != old).any(axis=1)
        moved[filled] = True
    gaps = points - centres[assignment]
    inertia = float(np.vecdot(gaps, gaps).sum(dtype=np.float64))
    return KMeans(centres + centre.astype(dtype), assignment, inertia)


def _seeds(
    points: np.ndarray,
    tiles: list[_Tile],
    squares: np.ndarray,
    k: int,
    rng: np.random.Generator,
    side: int,
) -> Int[np.ndarray, "k"]:
    """k-means++ in batches: the next start is drawn with probability ~ squared distance.

    A batch is drawn with the distances known before it; each draw is then accepted with the
    probability present / known distance. That is rejection sampling, so the law is the exact one.
    """
    chosen = [int(rng.integers(len(points)))]
    gaps = np.full(len(points), np.inf)
    fresh = chosen
    while True:
        near, _ = _closest(points, points[fresh], side, tiles=tiles)
        gaps = np.minimum(gaps, squares - 2.0 * near)
        # What cancellation leaves of a distance of zero must not be drawn.
        gaps[gaps < 1e-6 * squares] = 0
        gaps[chosen] = 0
        if len(chosen) == k:
            return np.array(chosen)
        total = np.cumsum(gaps)
        if not total[-1] > 0:  # fewer distinct points than clusters
            rest = np.setdiff1d(np.arange(len(points)), chosen)
            return np.append(chosen, rng.permutation(rest)[: k - len(chosen)])
        draws = np.searchsorted(total, rng.random(min(side, len(chosen))) * total[-1], "right")
        draws = np.minimum(draws, len(points) - 1)
        known, chance = gaps[draws], rng.random(len(draws))
        present, drawn = known.copy(), points[draws]
        between = squares[draws][:, None] + squares[draws] - 2.0 * (drawn @ drawn.T)
        fresh = []
        for i in range(len(draws)):
            if len(chosen) < k and chance[i] * known[i] < present[i]:
                fresh.append(int(draws[i]))
                chosen.append(int(draws[i]))
                present = np.where(draws == draws[i], 0, np.minimum(present, between[i]))


def _repair(
    points: np.ndarray, centres: np.ndarray, assignment: np.ndarray, gaps: np.ndarray
) -> Int[np.ndarray, "m"]:
    """Gives every empty cluster the farthest point of a larger one, in place."""
    sizes = np.bincount(assignment, minlength=len(centres))
    empty = np.flatnonzero(sizes == 0)
    if not len(empty):
        return empty
    filled = []
    farthest = iter(np.argsort(-gaps, kind="stable"))
    for cluster in empty:
        for point in farthest:
            if sizes[assignment[point]] > 1 and (points[point] != centres[assignment[point]]).any():
                sizes[assignment[point]] -= 1
                assignment[point] = cluster
                filled.append(cluster)
                break
    return np.array(filled, int)


def _recentre(
    points: np.ndarray, centres: np.ndarray, assignment: np.ndarray, touched: np.ndarray
) -> None:
    """Moves the centres of the clusters `touched` to their means; an empty one stays."""
    members = np.flatnonzero(np.isin(assignment, touched))
    members = members[np.argsort(assignment[members], kind="stable")]
    filled, starts, sizes = np.unique(assignment[members], return_index=True, return_counts=True)
    # In double precision the mean of equal points is that point, bit for bit.
    sums = np.add.reduceat(points[members], starts, axis=0, dtype=np.float64)
    centres[filled] = sums / sizes[:, None]


def _closest(
    points: np.ndarray, centres: np.ndarray, side: int, *, tiles: list[_Tile] | None = None
) -> tuple[Float[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """max over c of x'c - |c|^2 / 2, and the first c that has it."""
    width = _side(len(centres), side)
    columns = _plain(centres, width)
    found = []
    for tile in _plain(points, side) if tiles is None else tiles:
        lanes = width // _SLICES
        best = jnp.full((side, lanes), -jnp.inf, tile.vectors.dtype)
        at = jnp.zeros((side, lanes), jnp.int32)
        for c, column in enumerate(columns):
            best, at = _closer(best, at, tile.vectors, column, c * width)
        found.append(_first(best, at))
    best, at = (np.concatenate(a)[: len(points)] for a in zip(*found, strict=True))
    return best, at.astype(np.int64)


# Kernels. XLA's reductions along rows and columns run element by element on CPU, and cost more than
# the product they follow. Folding a tile into slices that are added up whole keeps the vector units
# busy; the few sums left over at the end do not matter.


@jax.jit
def _similarities(rows: _Tile, columns: _Tile) -> Float[Array, "b n"]:
    products = jnp.matmul(rows.vectors, columns.vectors.T, precision=jax.lax.Precision.HIGHEST)
    return products + (rows.offsets[:, None] + columns.offsets[None])


@jax.jit
def _negatives(rows: _Tile, columns: _Tile) -> Float[Array, "b n"]:
    """Similarities, with those of one's own group taken out of the running."""
    same = rows.groups[:, None] == columns.groups[None]
    return jnp.where(same, -jnp.inf, _similarities(rows, columns))


def _packed(slices: list[Array], thresholds: list[Array]) -> Array:
    """Counts of four thresholds to a word of four bytes: [2, ...], each byte at most _SLICES."""
    words = []
    for w in range(0, _GROUP, 4):
        word = jnp.zeros(slices[0].shape, jnp.uint32)
        for part in slices:
            for f in range(4):
                word += jnp.where(part >= thresholds[w + f], jnp.uint32(1 << 8 * f), jnp.uint32(0))
        words.append(word)
    return jnp.stack(words)


def _unpacked(words: Array, *, axis: int) -> Int[Array, "b r"]:
    fields = jnp.stack([(words >> 8 * f) & 255 for f in range(4)], axis=1)  # [2 4 ...]
    return jnp.sum(fields.astype(jnp.int32), axis=axis).reshape(_GROUP, -1).T


@jax.jit
def _count(counts: Array, x: Array, thresholds: Array) -> Int[Array, "b r"]:
    """Adds, for every row, how many of its similarities reach each threshold."""
    slices = jnp.split(x, _SLICES, axis=1)
    words = _packed(slices, [thresholds[:, j, None] for j in range(_GROUP)])
    return counts + _unpacked(words, axis=3)


@jax.jit
def _count_down(counts: Array, x: Array, thresholds: Array) -> Int[Array, "b r"]:
    """The same for every column."""
    slices = jnp.split(x, _SLICES, axis=0)
    words = _packed(slices, [thresholds.T[j, None] for j in range(_GROUP)])
    return counts + _unpacked(words, axis=2)


@jax.jit
def _merge(
    similarities: Array, indices: Array, rows: _Tile, columns: _Tile, first: Array
) -> tuple[Array, Array]:
    found = _negatives(rows, columns)
    at = jnp.broadcast_to(first + jnp.arange(found.shape[1], dtype=jnp.int32)[None], found.shape)
    # Equal values keep their order, so what was found earlier, with a lower index, stays ahead.
    found = jnp.concatenate([similarities, found], axis=1)
    best, order = jax.lax.top_k(found, similarities.shape[1])
    return best, jnp.take_along_axis(jnp.concatenate([indices, at], axis=1), order, axis=1)


@jax.jit
def _closer(
    best: Array, at: Array, points: Array, columns: _Tile, first: Array
) -> tuple[Array, Array]:
    x = jnp.matmul(points, columns.vectors.T, precision=jax.lax.Precision.HIGHEST)
    x = x + columns.offsets[None]
    width = x.shape[1] // _SLICES
    for s, part in enumerate(jnp.split(x, _SLICES, axis=1)):
        better = part > best
        best = jnp.where(better, part, best)
        at = jnp.where(better, first + s * width, at)
    return best, at


@jax.jit
def _first(best: Array, at: Array) -> tuple[Array, Array]:
    top = jnp.max(best, axis=1)
    at = at + jnp.arange(at.shape[1], dtype=at.dtype)[None]
    return top, jnp.min(jnp.where(best == top[:, None], at, jnp.iinfo(at.dtype).max), axis=1)


def _symmetric(tile: _Tile) -> bool:
    """Whether this backend's product gives x'y and y'x the same bits: most do, for a price some do
    not, and a tie would be lost there."""
    x = _similarities(tile, tile)
    return bool(jnp.all(x == x.T))


# Data on its way in.


def _prepared(
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
    return embeddings, gallery, centre, _side(max(len(embeddings), len(gallery)), tile)


def _checked(vectors: Embeddings, name: str) -> tuple[np.ndarray, Float[np.ndarray, "d"]]:
    """The array and, rounded, its mean. Subtracting that keeps far-off data from cancelling."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(
            f"{name} have shape {vectors.shape}: give an array [items, dimensions], not empty"
        )
    dtype = _dtype(vectors)
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


def _dtype(vectors: np.ndarray) -> np.dtype:
    dtype = jnp.promote_types(jax.dtypes.canonicalize_dtype(vectors.dtype), jnp.float32)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"embeddings are {vectors.dtype}: give real numbers")
    return np.dtype(dtype)


def _side(n: int, tile: int) -> int:
    """Small data get small tiles, of few different sizes, since each size is compiled."""
    return min(tile, max(_LEAST, 1 << (n - 1).bit_length()))


def _padded(items: Int[np.ndarray, "n"], side: int) -> Int[np.ndarray, "m"]:
    return np.pad(items, (0, -len(items) % side), constant_values=-1)


def _tiles(
    vectors: np.ndarray,
    items: Int[np.ndarray, "m"],
    groups: Int[np.ndarray, "m"],
    *,
    centre: np.ndarray,
    similarity_fn: SimilarityFn,
    side: int,
) -> list[_Tile]:
    """`vectors[items]` on the device, in tiles; an item of -1 is padding."""
    dtype = _dtype(vectors)
    middle = jnp.asarray(centre.astype(dtype))
    prepare = jax.jit(similarity_fn)
    out = []
    for i in range(0, len(items), side):
        real = items[i : i + side] >= 0
        part = np.zeros((side, vectors.shape[1]), dtype)
        part[real] = vectors[items[i : i + side][real]]
        seen, offsets = prepare(jnp.asarray(part), middle)
        seen = jnp.where(real[:, None], seen, 0)
        offsets = jnp.where(real, offsets, -jnp.inf)
        out.append(_Tile(seen, offsets, jnp.asarray(groups[i : i + side], jnp.int32)))
    return out


def _plain(vectors: np.ndarray, side: int) -> list[_Tile]:
    items = _padded(np.arange(len(vectors)), side)
    centre = np.zeros(vectors.shape[1])
    return _tiles(vectors, items, items, centre=centre, similarity_fn=euclidean, side=side)


def _codes(
    labels: Labels, gallery_labels: Labels | None, n: int, m: int, same: bool
) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "m"]]:
    """Labels as 0..c-1, compared as integers: as float32, labels above 2^24 would collide."""
    if same != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together: give both, or neither")
    labels = np.asarray(labels)
    others = labels if same else np.asarray(gallery_labels)
    for name, array, size in (("labels", labels, n), ("gallery_labels", others, m)):
        if array.shape != (size,):
            raise ValueError(f"{name} have shape {array.shape}, but there are {size} embeddings")
    if np.result_type(labels, others).kind not in "iub":
        raise ValueError(
            f"labels are {labels.dtype} and {others.dtype}: give integers of one signedness "
            "(np.unique(names, return_inverse=True)[1] makes them of names)"
        )
    _, codes = np.unique(np.concatenate([labels, others]), return_inverse=True)
    return codes[:n], codes[:n] if same else codes[n:]


def _layout(
    own: Int[np.ndarray, "n"], others: Int[np.ndarray, "m"], side: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots of the gallery: the item in each (-1 is padding), and each class's first and number.

    Classes lie together, small ones first, so that a tile of queries finds its positives in few
    tiles and has about as many for each; classes nobody asks for come before all.
    """
    classes = max(own.max(), others.max()) + 1
    sizes = np.bincount(others, minlength=classes)
    asked = np.bincount(own, minlength=classes) > 0
    order = np.lexsort((np.arange(classes), sizes, asked))
    starts = np.zeros(classes, np.int64)
    end = 0
    for label in order:
        size = int(sizes[label])
        if end % side + size > side >= size:  # a class that fits into one tile is not cut
            end += -end % side
        starts[label] = end
        end += size
    slots = np.full(end + -end % side, -1)
    items = np.argsort(starts[others], kind="stable")
    label = others[items]
    firsts = np.cumsum(sizes[order]) - sizes[order]
    within = np.empty(classes, np.int64)
    within[order] = firsts
    slots[starts[label] + np.arange(len(items)) - within[label]] = items
    return slots, starts, sizes
