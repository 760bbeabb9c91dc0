"""k-means: Lloyd's iterations in tiles, with a start by k-means++."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from dmljax.retrieval import inputs, sharding, tiles
from dmljax.retrieval.inputs import Embeddings
from dmljax.retrieval.sharding import REPLICATED, SHARDED
from dmljax.retrieval.tiles import Tile, Tiles

__all__ = ["KMeans", "kmeans"]


class KMeans(NamedTuple):
    """`inertia` is the sum of squared distances between points and their assigned centers."""

    centers: Float[np.ndarray, "k d"]
    assignment: Int[np.ndarray, "n"]
    inertia: float


def kmeans(
    embeddings: Embeddings,
    *,
    k: int,
    seed: int = 0,
    starts: int = 1,
    trials: int | None = 1,
    iterations: int = 100,
    tolerance: float = 0.0,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
    share: tuple[int, int] | None = None,
    sum_fn: Callable[[np.ndarray], np.ndarray] | None = None,
) -> KMeans:
    """Lloyd's iterations from a k-means++ start (Arthur & Vassilvitskii, 2007).

    * `starts`: k-means runs this many times, and the run with the least inertia counts, the
      earliest of equals. The first run is the same as with `starts=1`.
    * `trials`: how many candidates are drawn for each center. The one that reduces the inertia most
      becomes the center ("greedy" k-means++). None: 2 + log k, as in scikit-learn.
    * `iterations`: Lloyd's iterations at most. `tolerance`: they also end when the centers move by
      less than this share of the mean variance of a dimension (summed squares).

    * `share=(i, n)`: this process is the i-th of n that call this with the same points. Each finds
      the centers of its part of the points, and `sum_fn` returns the sum of an array of float64
      over all of them. The result is the same as of one process, bit for bit. With `trials`
      above 1, every process draws all starts itself.

    `trials=None, iterations=300, tolerance=1e-4` are the values of scikit-learn's `KMeans`.

    Without a tolerance it stops when no point changes its cluster. An empty cluster takes the point
    that is farthest from its center. A point whose center did not move is compared with the moved
    centers only: its other distances are the same as before, and so is the result.

    >>> embeddings = np.array([[0.0], [2.0], [10.0], [12.0]])
    >>> clusters = retrieval.kmeans(embeddings, k=2)
    >>> sorted(clusters.centers[:, 0].tolist()), clusters.inertia
    ([1.0, 11.0], 4.0)
    """
    tile = tiles.choose_tile(tile, devices)
    points, _, origin = inputs.check_vectors(embeddings, None)
    n = len(points)
    inputs.check_k(k, n, noun=" clusters", of="embeddings")
    if starts < 1:
        raise ValueError(f"starts={starts} must be at least 1, such as 10")
    trials = 2 + int(np.log(k)) if trials is None else trials
    if trials < 1:
        raise ValueError(f"trials={trials} must be at least 1, or None for 2 + log k")
    if (share is None) != (sum_fn is None):
        raise ValueError("share and sum_fn go together: give both, or neither")
    side = tiles.choose_side(n, tile)
    dtype = inputs.compute_dtype(points)
    points = points.astype(dtype) - origin.astype(dtype)
    squared_norms = np.vecdot(points, points).astype(np.float64)
    search = _Search(side, devices, share or (0, 1), sum_fn)
    point_tiles = search.tiles(points)
    least_shift = tolerance * float(points.var(axis=0, dtype=np.float64).mean())
    rng = np.random.default_rng(seed)
    best = None
    for _ in range(starts):
        if trials == 1:
            chosen = _draw_starts(points, point_tiles, squared_norms, k, rng, search)
        else:
            chosen = _draw_greedily(points, squared_norms, k, rng, trials)
        limits = iterations, least_shift
        clusters = _lloyd(points, points[chosen], point_tiles, squared_norms, limits, search)
        if best is None or clusters.inertia < best.inertia:
            best = clusters
    assert best is not None
    return best._replace(centers=best.centers + origin.astype(dtype))


class _Search(NamedTuple):
    """Who compares which points with all centers: a part of the tiles of this process."""

    side: int
    devices: Sequence[jax.Device] | None = None
    share: tuple[int, int] = (0, 1)
    sum_fn: Callable[[np.ndarray], np.ndarray] | None = None

    def rows(self, count: int) -> slice:
        """The rows of this process, of `count`. They are whole tiles, as in one process."""
        first, last = sharding.bounds(self.share, -(-count // self.side))
        return slice(first * self.side, last * self.side)

    def tiles(self, points: Float[np.ndarray, "n d"]) -> Tiles | None:
        """The tiles of this process, or None if it has none."""
        points = points[self.rows(len(points))]
        if not len(points):
            return None
        # A device without points would only compute padding.
        mesh = sharding.choose_mesh(self.devices, tiles=-(-len(points) // self.side))
        return tiles.plain_tiles(points, self.side, mesh=mesh)

    def joined(
        self, count: int, *parts: Shaped[np.ndarray, "m"]
    ) -> tuple[Shaped[np.ndarray, "n"], ...]:
        """The arrays of all rows; each process gives its own rows as `parts`."""
        if self.sum_fn is None:
            return parts
        rows = np.zeros((len(parts), count))  # float64 holds float32 and indices exactly
        for row, part in zip(rows, parts, strict=True):
            row[self.rows(count)] = part
        return tuple(
            row.astype(part.dtype) for row, part in zip(self.sum_fn(rows), parts, strict=True)
        )


def _lloyd(
    points: Float[np.ndarray, "n d"],
    centers: Float[np.ndarray, "k d"],
    point_tiles: Tiles | None,
    squared_norms: Float[np.ndarray, "n"],
    limits: tuple[int, float],
    search: _Search,
) -> KMeans:
    """Lloyd's iterations from `centers`, which are changed in place.

    `limits` are the number of iterations, and the sum of squared moves of the centers that ends
    them.
    """
    n, k = len(points), len(centers)
    (iterations, least_shift), has_settled = limits, False
    # `similarities` are x'c - |c|^2 / 2 of every point x and its center c.
    assignment, similarities = np.full(n, -1), np.full(n, -np.inf, points.dtype)
    has_moved = np.ones(k, bool)
    for _ in range(iterations):
        previous = assignment.copy()
        is_kept = (assignment >= 0) & ~has_moved[assignment]
        if not is_kept.any():
            similarities, assignment = _closest(points, centers, search, point_tiles)
        elif has_moved.any():
            _reassign(points, centers, has_moved, is_kept, assignment, similarities, search)
        refilled = _fill_empty(points, centers, assignment, squared_norms - 2.0 * similarities)
        switched = previous != assignment
        if has_settled or not switched.any():
            break
        changed = np.union1d(previous[switched & (previous >= 0)], assignment[switched])
        old_centers = centers[changed]
        _move_centers(points, centers, assignment, changed)
        has_settled = float(np.sum((centers[changed] - old_centers) ** 2)) <= least_shift
        has_moved = np.zeros(k, bool)
        has_moved[changed] = (centers[changed] != old_centers).any(axis=1)
        has_moved[refilled] = True
    differences = points - centers[assignment]
    inertia = float(np.vecdot(differences, differences).sum(dtype=np.float64))
    return KMeans(centers, assignment, inertia)


def _draw_starts(
    points: Float[np.ndarray, "n d"],
    point_tiles: Tiles | None,
    squared_norms: Float[np.ndarray, "n"],
    k: int,
    rng: np.random.Generator,
    search: _Search,
) -> Int[np.ndarray, "k"]:
    """k-means++: each next start is drawn with probability ~ its squared distance to the others.

    Starts are drawn in batches, from the distances before the batch. Each draw is then accepted
    with probability (distance now / distance before the batch). This is rejection sampling, so the
    distribution is exactly as if starts were drawn one by one.
    """
    chosen = [int(rng.integers(len(points)))]
    distances = np.full(len(points), np.inf)  # squared, to the nearest chosen point
    batch = chosen
    while True:
        nearest, _ = _closest(points, points[batch], search, point_tiles)
        distances = np.minimum(distances, squared_norms - 2.0 * nearest)
        # A distance of zero comes out as a rounding error, which must not be drawn.
        distances[distances < 1e-6 * squared_norms] = 0
        distances[chosen] = 0
        if len(chosen) == k:
            return np.array(chosen)
        cumulative = np.cumsum(distances)
        if not cumulative[-1] > 0:  # fewer distinct points than clusters
            others = np.setdiff1d(np.arange(len(points)), chosen)
            return np.append(chosen, rng.permutation(others)[: k - len(chosen)])
        size = min(search.side, len(chosen))
        draws = np.searchsorted(cumulative, rng.random(size) * cumulative[-1], "right")
        draws = np.minimum(draws, len(points) - 1)
        before, uniforms = distances[draws], rng.random(len(draws))
        now, drawn = before.copy(), points[draws]
        between = squared_norms[draws][:, None] + squared_norms[draws] - 2.0 * (drawn @ drawn.T)
        batch = []
        for i in range(len(draws)):
            if len(chosen) < k and uniforms[i] * before[i] < now[i]:
                batch.append(int(draws[i]))
                chosen.append(int(draws[i]))
                now = np.where(draws == draws[i], 0, np.minimum(now, between[i]))


def _draw_greedily(
    points: Float[np.ndarray, "n d"],
    squared_norms: Float[np.ndarray, "n"],
    k: int,
    rng: np.random.Generator,
    trials: int,
) -> Int[np.ndarray, "k"]:
    """k-means++ that takes the best of several candidates for each center, as scikit-learn does."""
    chosen = [int(rng.integers(len(points)))]
    candidates, distances = np.array(chosen), np.full(len(points), np.inf)
    while True:
        between = (
            squared_norms[candidates][:, None]
            + squared_norms
            - 2.0 * (points[candidates] @ points.T)
        )
        between = np.minimum(distances, np.maximum(between, 0))  # [trials n]
        between[np.arange(len(candidates)), candidates] = 0
        best = int(np.argmin(between.sum(axis=1)))
        distances = between[best]
        if len(candidates) > 1:
            chosen.append(int(candidates[best]))
        if len(chosen) == k:
            return np.array(chosen)
        cumulative = np.cumsum(distances)
        candidates = np.searchsorted(cumulative, rng.random(trials) * cumulative[-1])
        candidates = np.minimum(candidates, len(points) - 1)


def _reassign(
    points: Float[np.ndarray, "n d"],
    centers: Float[np.ndarray, "k d"],
    has_moved: Bool[np.ndarray, "k"],
    is_kept: Bool[np.ndarray, "n"],
    assignment: Int[np.ndarray, "n"],
    similarities: Float[np.ndarray, "n"],
    search: _Search,
) -> None:
    """The closest centers, in place: points with `is_kept` are compared with moved centers only."""
    searched, kept = np.flatnonzero(~is_kept), np.flatnonzero(is_kept)
    similarities[searched], assignment[searched] = _closest(points[searched], centers, search)
    moved = np.flatnonzero(has_moved)
    candidates, numbers = _closest(points[kept], centers[moved], search)
    clusters = moved[numbers]
    is_tie = (candidates == similarities[kept]) & (clusters < assignment[kept])
    wins = (candidates > similarities[kept]) | is_tie
    similarities[kept[wins]], assignment[kept[wins]] = candidates[wins], clusters[wins]


def _fill_empty(
    points: Float[np.ndarray, "n d"],
    centers: Float[np.ndarray, "k d"],
    assignment: Int[np.ndarray, "n"],
    distances: Float[np.ndarray, "n"],
) -> Int[np.ndarray, "m"]:
    """Gives empty clusters the farthest points of larger ones, in place; returns which."""
    sizes = np.bincount(assignment, minlength=len(centers))
    empty = np.flatnonzero(sizes == 0)
    if not len(empty):
        return empty
    refilled = []
    farthest = iter(np.argsort(-distances, kind="stable"))
    for cluster in empty:
        for point in farthest:
            if sizes[assignment[point]] > 1 and (points[point] != centers[assignment[point]]).any():
                sizes[assignment[point]] -= 1
                assignment[point] = cluster
                refilled.append(cluster)
                break
    return np.array(refilled, int)


def _move_centers(
    points: Float[np.ndarray, "n d"],
    centers: Float[np.ndarray, "k d"],
    assignment: Int[np.ndarray, "n"],
    changed: Int[np.ndarray, "m"],
) -> None:
    """Moves the centers of the clusters `changed` to their means; empty clusters keep theirs."""
    members = np.flatnonzero(np.isin(assignment, changed))
    members = members[np.argsort(assignment[members], kind="stable")]
    clusters, starts, sizes = np.unique(assignment[members], return_index=True, return_counts=True)
    # In double precision the mean of equal points is that point, bit for bit.
    sums = np.add.reduceat(points[members], starts, axis=0, dtype=np.float64)
    centers[clusters] = sums / sizes[:, None]


def _closest(
    points: Float[np.ndarray, "n d"],
    centers: Float[np.ndarray, "k d"],
    search: _Search,
    point_tiles: Tiles | None = None,
) -> tuple[Float[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """max over c of x'c - |c|^2 / 2, and the first c that reaches it."""
    n, side = len(points), search.side
    point_tiles = search.tiles(points) if point_tiles is None else point_tiles
    best, numbers = np.zeros(0, points.dtype), np.zeros(0, np.int64)
    if point_tiles is not None:
        best, numbers = _closest_of_tiles(point_tiles, centers, side)
    count = len(range(*search.rows(n).indices(n)))  # the last tile has padding
    return search.joined(n, best[:count], numbers[:count])  # type: ignore[return-value]


def _closest_of_tiles(
    point_tiles: Tiles, centers: Float[np.ndarray, "k d"], side: int
) -> tuple[Float[np.ndarray, "m"], Int[np.ndarray, "m"]]:
    mesh = point_tiles.mesh
    width = tiles.choose_side(len(centers), side)
    center_tiles = tiles.plain_tiles(centers, width, mesh=mesh, spec=REPLICATED)
    update = sharding.on_mesh(mesh, _update, SHARDED, SHARDED, SHARDED, REPLICATED, REPLICATED)
    reduce = sharding.on_mesh(mesh, _reduce, SHARDED, SHARDED)
    shape = point_tiles.side, width // tiles.SLICES
    results = []
    for i in range(len(point_tiles)):
        vectors = point_tiles[i].vectors
        nothing = np.full(shape, -np.inf, vectors.dtype), np.zeros(shape, np.int32)
        best, numbers = sharding.put(nothing, mesh)
        for j in range(len(center_tiles)):
            best, numbers = update(best, numbers, vectors, center_tiles[j], np.int32(j * width))
        results.append(reduce(best, numbers))
    best, numbers = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
    return best, numbers.astype(np.int64)


# As in `counting`, a tile is folded into slices, because reductions along rows are slow on CPUs.


@jax.jit
def _update(
    best: Float[Array, "b s"],
    numbers: Int[Array, "b s"],
    points: Float[Array, "b d"],
    centers: Tile,
    start: Int[Array, ""],
) -> tuple[Float[Array, "b s"], Int[Array, "b s"]]:
    """The best similarity in each column of the folded tile, and where its slice starts."""
    x = jnp.matmul(points, centers.vectors.T, precision=jax.lax.Precision.HIGHEST)
    x = x + centers.offsets[None]
    width = x.shape[1] // tiles.SLICES
    for s, similarities in enumerate(jnp.split(x, tiles.SLICES, axis=1)):
        is_better = similarities > best
        best = jnp.where(is_better, similarities, best)
        numbers = jnp.where(is_better, start + s * width, numbers)
    return best, numbers


@jax.jit
def _reduce(
    best: Float[Array, "b s"], numbers: Int[Array, "b s"]
) -> tuple[Float[Array, "b"], Int[Array, "b"]]:
    """The best similarity of each point, and the lowest number of a center that reaches it."""
    top = jnp.max(best, axis=1)
    numbers = numbers + jnp.arange(numbers.shape[1], dtype=numbers.dtype)[None]
    largest = jnp.iinfo(numbers.dtype).max
    return top, jnp.min(jnp.where(best == top[:, None], numbers, largest), axis=1)
