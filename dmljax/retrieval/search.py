"""Exact ranks and nearest neighbours by counting, in tiles."""

import concurrent.futures
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dmljax.retrieval import tiles
from dmljax.retrieval.tiles import Embeddings, Labels, SimilarityFn, Tile, euclidean

__all__ = ["Ranks", "nearest", "ranks"]

_GROUP = 8  # thresholds counted by one pass over a tile
_SORTED_FROM = 64  # from this many positives on, sorting whole rows beats comparing with each
_AHEAD = 4  # tiles of similarities that may wait in the queue, each with its memory
_STRIP = 1 << 24  # similarities held at once where whole rows are sorted


class Ranks(NamedTuple):
    """`ranks[i, j]` is the rank of the j-th best positive of query `queries[i]`; 0 is padding."""

    queries: Int[np.ndarray, "q"]
    ranks: Int[np.ndarray, "q r"]


class _Queries(NamedTuple):
    """One tile of queries, where their positives start among the gallery's slots, how many."""

    tile: Tile
    items: Int[np.ndarray, "n"]
    starts: Int[np.ndarray, "n"]
    sizes: Int[np.ndarray, "n"]
    own: Int[np.ndarray, "n"]  # the slot of the query itself, -1 where the gallery is another set

    @property
    def positives(self) -> Int[np.ndarray, "n"]:
        return self.sizes - ((self.own >= 0) & (self.sizes > 0))


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
    embeddings, gallery_, centre, side = tiles.prepare(embeddings, gallery, tile)
    own, others = _codes(labels, gallery_labels, len(embeddings), len(gallery_), gallery is None)
    slots, starts, sizes = _layout(own, others, side)
    load = functools.partial(tiles.tiles_of, centre=centre, similarity_fn=similarity_fn, side=side)
    columns = load(gallery_, slots, np.where(slots < 0, -1, others[slots]))
    if gallery is None:
        items, lines, place = slots, columns, np.where(slots < 0, -1, np.arange(len(slots)))
    else:
        items = np.flatnonzero(sizes[own] > 0)
        items = items[np.argsort(starts[own[items]], kind="stable")]
        items = tiles.padded(items, side)
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


def nearest(
    queries: Embeddings,
    gallery: Embeddings | None = None,
    *,
    k: int,
    similarity_fn: SimilarityFn = euclidean,
    tile: int = 1024,
) -> tuple[Int[np.ndarray, "q k"], Float[np.ndarray, "q k"]]:
    """Indices and similarities of the k most similar items, best first, ties by index."""
    queries, gallery_, centre, side = tiles.prepare(queries, gallery, tile)
    n = len(gallery_) - (gallery is None)
    if not 1 <= k <= n:
        raise ValueError(f"k={k}, but there are {n} items to find: choose k from 1 to {n}")
    load = functools.partial(tiles.tiles_of, centre=centre, similarity_fn=similarity_fn, side=side)
    slots = tiles.padded(np.arange(len(gallery_)), side)
    columns = load(gallery_, slots, slots)
    rows = tiles.padded(np.arange(len(queries)), side)
    lines = columns if gallery is None else load(queries, rows, np.full(len(rows), -2))
    out = []
    for line in lines:
        best = jnp.full((side, k), -jnp.inf, line.vectors.dtype), jnp.zeros((side, k), jnp.int32)
        for c, column in enumerate(columns):
            best = _merge(*best, line, column, c * side)
        out.append([np.asarray(a) for a in best])
    similarities, indices = (np.concatenate(a)[: len(queries)] for a in zip(*out, strict=True))
    return indices, similarities


def _counted(
    queries: list[_Queries], columns: list[Tile], few: set[int], *, mirrored: bool
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


def _thresholds(query: _Queries, columns: list[Tile]) -> list[Float[Array, "n r"]]:
    """Similarities of the positives, best first, taken from the products that count negatives.

    Another kernel might round differently, and a negative equal to a positive would not be tied.
    """
    valid = query.positives > 0
    side = len(query.items)
    first = query.starts[valid].min() // side
    last = -(-(query.starts + query.sizes)[valid].max() // side)
    found = [np.asarray(tiles.similarities(query.tile, columns[c])) for c in range(first, last)]
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


def _sorted(query: _Queries, columns: list[Tile]) -> Iterator[Ranks]:
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
                strip[:, c * side : (c + 1) * side] = tiles.similarities(part.tile, column)
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
