"""Exact ranks and nearest neighbours by counting, in tiles."""

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dmljax.retrieval import tiles
from dmljax.retrieval.tiles import Embeddings, Labels, SimilarityFn, Tile, Tiles, euclidean

__all__ = ["Ranks", "nearest", "ranks"]

_GROUP = 8  # thresholds counted by one pass over a tile
_SORTED_FROM = 64  # from this many positives on, sorting whole rows beats comparing with each
_AHEAD = 4  # tiles of similarities that may wait in the queue, each with its memory
_HELD = 8  # blocks of queries that meet a tile of the gallery while it is on the devices
_STRIP = 1 << 24  # similarities held at once where whole rows are sorted


class Ranks(NamedTuple):
    """`ranks[i, j]` is the rank of the j-th best positive of query `queries[i]`; 0 is padding."""

    queries: Int[np.ndarray, "q"]
    ranks: Int[np.ndarray, "q r"]


class _Queries(NamedTuple):
    """A block of queries, where their positives start among the gallery's slots, how many."""

    items: Int[np.ndarray, "n"]
    starts: Int[np.ndarray, "n"]
    sizes: Int[np.ndarray, "n"]
    own: Int[np.ndarray, "n"]  # the slot of the query itself, -1 where the gallery is another set

    @property
    def positives(self) -> Int[np.ndarray, "n"]:
        return self.sizes - ((self.own >= 0) & (self.sizes > 0))

    @property
    def few(self) -> Bool[np.ndarray, "n"]:
        """Those whose positives are counted one by one."""
        return (self.positives > 0) & (self.positives < _SORTED_FROM)

    def part(self, rows) -> "_Queries":
        return _Queries(*(a[rows] for a in self))


def ranks(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
) -> Iterator[Ranks]:
    """rank of the j-th positive = j + #{negatives at least as similar}: tied negatives go ahead.

    Queries come in blocks and in no promised order; those without a positive do not come.
    """
    embeddings, gallery_, centre, side = tiles.prepare(embeddings, gallery, tile)
    own, others = _codes(labels, gallery_labels, len(embeddings), len(gallery_), gallery is None)
    slots, starts, sizes = _layout(own, others, side)
    load = functools.partial(Tiles, centre=centre, similarity_fn=similarity_fn)
    if gallery is None:
        items = slots
    else:
        items = np.flatnonzero(sizes[own] > 0)
        items = items[np.argsort(starts[own[items]], kind="stable")]
    mesh = tiles.mesh_of(devices, rows=-(-len(items) // side))
    groups = np.where(slots < 0, -1, others[slots])
    columns = load(gallery_, slots, groups, side=side, mesh=mesh, whole=True)
    height = side if mesh is None else side * mesh.size
    items = tiles.padded(items, height)
    if gallery is None:
        place = np.where(items < 0, -1, np.arange(len(items)))
        lines = columns if mesh is None else None
    else:
        place, lines = np.full(len(items), -1), None
    if lines is None:
        # No class is -2, so that padding of queries meets no padding of the gallery.
        groups = np.where(items < 0, -2, own[items])
        lines = load(embeddings, items, groups, side=height, mesh=mesh)
    known = np.where(items < 0, 0, sizes[own[items]])
    queries = _Queries(items, starts[own[items]], known, place)
    blocks = [queries.part(slice(i, i + height)) for i in range(0, len(items), height)]
    if any(block.few.any() for block in blocks):
        mirrored = gallery is None and _symmetric(tiles.put(_one(lines[0], side), None))
        yield from _counted(blocks, lines, columns, mirrored=mirrored)
    many = queries.part(queries.positives >= _SORTED_FROM)
    if len(many.items):
        if mesh is not None:
            groups = np.where(slots < 0, -1, others[slots])
            columns = load(gallery_, slots, groups, side=side)
        yield from _sorted(many, functools.partial(load, embeddings), columns)


def nearest(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    *,
    k: int,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Int[np.ndarray, "q k"], Float[np.ndarray, "q k"]]:
    """Indices and similarities of the k most similar items, best first, ties by index."""
    queries, gallery_, centre, side = tiles.prepare(queries, gallery, tile)
    n = len(gallery_) - (gallery is None)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}, but there are {n} items to find: choose k from 1 to {n}")
    mesh = tiles.mesh_of(devices, rows=-(-len(queries) // side))
    height = side if mesh is None else side * mesh.size
    load = functools.partial(Tiles, centre=centre, similarity_fn=similarity_fn, mesh=mesh)
    slots = tiles.padded(np.arange(len(gallery_)), side)
    columns = load(gallery_, slots, slots, side=side, whole=True)
    rows = tiles.padded(np.arange(len(queries)), height)
    lines = load(queries, rows, rows if gallery is None else np.full(len(rows), -2), side=height)
    merge = tiles.over(mesh, _merge, "rrrww")
    out = []
    for start in range(0, len(lines), _HELD):
        held = [lines[i] for i in range(start, min(start + _HELD, len(lines)))]
        dtype = held[0].vectors.dtype
        first = np.full((height, k), -np.inf, dtype), np.zeros((height, k), np.int32)
        found = [tiles.put(first, mesh) for _ in held]
        for c in range(len(columns)):
            column, at = columns[c], np.int32(c * side)
            found = [merge(*best, line, column, at) for best, line in zip(found, held, strict=True)]
            jax.block_until_ready(found)
        out += [[np.asarray(a) for a in best] for best in found]
    similarities, indices = (np.concatenate(a)[: len(queries)] for a in zip(*out, strict=True))
    return indices, similarities


def _counted(
    blocks: list[_Queries], lines: Tiles, columns: Tiles, *, mirrored: bool
) -> Iterator[Ranks]:
    """Ranks of queries with few positives, which are thresholds for every tile to be held to.

    Mirrored, queries and gallery are the same items: products above the diagonal of blocks serve
    their rows and their columns.
    """
    mesh, side = lines.mesh, columns.side
    wide = lines.side // side  # tiles to a block, one for each device
    negatives_ = tiles.over(mesh, _negatives, "rw")
    count, count_down = (
        tiles.over(mesh, kernel, roles) for kernel, roles in ((_count, "rrr"), (_count_down, "rrw"))
    )
    few = {b: block for b, block in enumerate(blocks) if block.few.any()}
    levels = {b: _thresholds(block, lines[b], mesh, columns) for b, block in few.items()}

    def split(b, rows=slice(None), whole=False):
        parts = [levels[b][rows, i : i + _GROUP] for i in range(0, levels[b].shape[1], _GROUP)]
        return tiles.put(parts, mesh, whole=whole)

    def nothing(b):
        shape = lines.side, _GROUP
        return tiles.put([np.zeros(shape, np.int32)] * (levels[b].shape[1] // _GROUP), mesh)

    across = {b: (nothing(b), split(b)) for b in few}
    down = {}
    if mirrored:
        for b, block in few.items():
            for t in range(wide):
                rows = slice(t * side, (t + 1) * side)
                if block.few[rows].any():
                    same = wide == 1  # then its rows are its columns
                    down[b * wide + t] = nothing(b), across[b][1] if same else split(b, rows, True)
    queued = 0
    for start in range(0, len(blocks), _HELD):
        group = range(start, min(start + _HELD, len(blocks)))
        held = {}
        for j in range(start * wide if mirrored else 0, len(columns)):
            column = None
            for b in group:
                above = mirrored and j in down and j >= (b + 1) * wide
                if not (above or b in few) or (mirrored and j < b * wide):
                    continue
                column = columns[j] if column is None else column
                held[b] = held.get(b) or lines[b]
                negatives = negatives_(held[b], column)
                if b in few:
                    counts, limits = across[b]
                    pairs = zip(counts, limits, strict=True)
                    across[b] = [count(c, negatives, t) for c, t in pairs], limits
                if above:
                    counts, limits = down[j]
                    pairs = zip(counts, limits, strict=True)
                    down[j] = [count_down(c, negatives, t) for c, t in pairs], limits
                queued += 1
                if queued % _AHEAD == 0:
                    jax.block_until_ready((across.get(b), down.get(j)))
    for b, block in few.items():
        ahead = np.concatenate([np.asarray(c) for c in across[b][0]], axis=1)
        for t in range(wide):
            if (j := b * wide + t) in down:
                found = np.concatenate([np.asarray(c) for c in down[j][0]], axis=1)
                # Each device has counted its own rows.
                found = found.reshape(-1, side, found.shape[1]).sum(axis=0)
                ahead[t * side : (t + 1) * side] += found
        yield from _ranks_of(block, np.where(block.few, block.positives, 0), ahead)


def _one(tile: Tile, side: int) -> Tile:
    """The first rows of a tile, on the host."""
    return jax.tree.map(lambda a: np.asarray(a)[:side], tile)


def _ranks_of(
    query: _Queries, positives: Int[np.ndarray, "n"], ahead: Int[np.ndarray, "n r"]
) -> Iterator[Ranks]:
    place = np.arange(1, ahead.shape[1] + 1)
    valid = place <= positives[:, None]
    rows = np.flatnonzero(valid[:, 0])
    yield Ranks(query.items[rows], np.where(valid, ahead + place, 0)[rows])


def _thresholds(
    query: _Queries, line: Tile, mesh: Mesh | None, columns: Tiles
) -> Float[np.ndarray, "n r"]:
    """Similarities of the positives, best first, taken from the products that count negatives.

    Another kernel might round differently, and a negative equal to a positive would not be tied.
    """
    side, few = columns.side, query.few
    similarities = tiles.over(mesh, tiles.similarities, "rw")
    step = np.arange(query.sizes[few].max())
    slots = query.starts[:, None] + step
    positive = few[:, None] & (step < query.sizes[:, None]) & (slots != query.own[:, None])
    rows, places = np.nonzero(positive)
    slots = slots[rows, places]
    found = np.full(positive.shape, -np.inf, line.vectors.dtype)
    order = np.argsort(slots // side, kind="stable")
    which, begin = np.unique(slots[order] // side, return_index=True)
    for c, part in zip(which, np.split(order, begin[1:]), strict=True):
        x = np.asarray(similarities(line, columns[int(c)]))
        found[rows[part], places[part]] = x[rows[part], slots[part] - c * side]
    most = query.positives[few].max()
    found = -np.sort(-found, axis=1)[:, :most]
    out = np.full((len(found), -(-most // _GROUP) * _GROUP), np.inf, found.dtype)
    out[:, :most] = np.where(np.isneginf(found), np.inf, found)
    return out


def _sorted(queries: _Queries, load: Callable, columns: Tiles) -> Iterator[Ranks]:
    """Ranks of queries with many positives, from whole rows sorted on the host, strip by strip.

    On one device: the sorting takes the time.
    """
    side = columns.side
    total = side * len(columns)
    height = tiles.side_of(len(queries.items), side)
    while height > 8 and height * total > _STRIP:
        height //= 2
    items = tiles.padded(queries.items, height)
    lines = load(items, np.where(items < 0, -2, 0), side=height)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for i in range(len(lines)):
            part = queries.part(slice(i * height, (i + 1) * height))
            strip = np.empty((height, total), lines[i].vectors.dtype)
            for c in range(len(columns)):
                strip[:, c * side : (c + 1) * side] = tiles.similarities(lines[i], columns[c])
            ahead = np.zeros((len(part.items), part.positives.max()), np.int64)

            def fill(row: int, part=part, strip=strip, ahead=ahead) -> None:
                start, size, own = part.starts[row], part.sizes[row], part.own[row]
                count = part.positives[row]
                if own >= 0:
                    strip[row, own] = -np.inf
                positives = np.sort(strip[row, start : start + size])[::-1][:count]
                strip[row, start : start + size] = -np.inf
                strip[row].sort()
                ahead[row, :count] = total - np.searchsorted(strip[row], positives)

            list(pool.map(fill, range(len(part.items))))
            yield from _ranks_of(part, part.positives, ahead)


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


# Kernels. XLA's reductions along rows and columns run element by element on CPU, and cost more than
# the product they follow. Folding a tile into slices that are added up whole keeps the vector units
# busy; the few sums left over at the end do not matter.


@jax.jit
def _negatives(rows: Tile, columns: Tile) -> Float[Array, "b n"]:
    """Similarities, with those of one's own group taken out of the running."""
    same = rows.groups[:, None] == columns.groups[None]
    return jnp.where(same, -jnp.inf, tiles.similarities(rows, columns))


def _packed(slices: list[Array], thresholds: list[Array]) -> Array:
    """Counts of four thresholds to a word of four bytes: [2, ...], each byte at most SLICES."""
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
    slices = jnp.split(x, tiles.SLICES, axis=1)
    words = _packed(slices, [thresholds[:, j, None] for j in range(_GROUP)])
    return counts + _unpacked(words, axis=3)


@jax.jit
def _count_down(counts: Array, x: Array, thresholds: Array) -> Int[Array, "b r"]:
    """The same for every column."""
    slices = jnp.split(x, tiles.SLICES, axis=0)
    words = _packed(slices, [thresholds.T[j, None] for j in range(_GROUP)])
    return counts + _unpacked(words, axis=2)


@jax.jit
def _merge(
    similarities: Array, indices: Array, rows: Tile, columns: Tile, first: Array
) -> tuple[Array, Array]:
    found = _negatives(rows, columns)
    at = jnp.broadcast_to(first + jnp.arange(found.shape[1], dtype=jnp.int32)[None], found.shape)
    # Equal values keep their order, so what was found earlier, with a lower index, stays ahead.
    found = jnp.concatenate([similarities, found], axis=1)
    best, order = jax.lax.top_k(found, similarities.shape[1])
    return best, jnp.take_along_axis(jnp.concatenate([indices, at], axis=1), order, axis=1)


def _symmetric(tile: Tile) -> bool:
    """Whether this backend's product gives x'y and y'x the same bits: most do, for a price some do
    not, and a tie would be lost there."""
    x = tiles.similarities(tile, tile)
    return bool(jnp.all(x == x.T))
