"""k-means: Lloyd's iterations in tiles, with a start by k-means++."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from dmljax.retrieval import inputs, tiles
from dmljax.retrieval.inputs import Embeddings
from dmljax.retrieval.neighbors import search
from dmljax.retrieval.rules import product
from dmljax.retrieval.tiles import REPLICATED, Tiles

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
    """Runs Lloyd's iterations from a k-means++ start (Arthur & Vassilvitskii, 2007).

    * `starts`: k-means runs this many times, and the run with the least inertia counts, the
      earliest of equals. The first run is the same as with `starts=1`.
    * `trials`: the candidates that are drawn for each center. The one that reduces the inertia most
      becomes the center ("greedy" k-means++). None: 2 + log k, as in scikit-learn.
    * `iterations`: the most iterations of Lloyd. `tolerance`: they also end when the centers move
      by less than this fraction of the mean variance of a dimension (summed squares).
    * `share=(i, n)`: this process is the i-th of n that call this with the same points. Each finds
      the centers of its part of the points, and `sum_fn` returns the sum of an array of float64
      over all of them. The result is that of one process, bit for bit.

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
    vectors, _, origin = inputs.check_vectors(embeddings, None)
    inputs.check_k(k, len(vectors), of="embeddings")
    trials = 2 + int(np.log(k)) if trials is None else trials
    if starts < 1 or trials < 1:
        raise ValueError(
            f"`starts` and `trials` must be at least 1, got {starts} and {trials}: give "
            "trials=None for 2 + log k"
        )
    inputs.check_share(share, sum_fn)
    dtype = inputs.compute_dtype(vectors)
    vectors = vectors.astype(dtype) - origin.astype(dtype)
    side = tiles.choose_side(len(vectors), tile)
    points = _Points(vectors, side, devices, share or (0, 1), sum_fn)
    least_shift = tolerance * float(vectors.var(axis=0, dtype=np.float64).mean())
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(starts):
        draw = points.draw(k, rng) if trials == 1 else points.draw_greedily(k, rng, trials)
        runs.append(points.lloyd(vectors[draw], iterations, least_shift))
    best = min(runs, key=lambda run: run.inertia)
    return best._replace(centers=best.centers + origin.astype(dtype))


class _Points:
    """The points; this process compares its share of them with all centers."""

    def __init__(
        self,
        vectors: Float[np.ndarray, "n d"],
        side: int,
        devices: Sequence[jax.Device] | None = None,
        share: tuple[int, int] = (0, 1),
        sum_fn: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        self.vectors, self._side, self._devices = vectors, side, devices
        self._share, self._sum_fn = share, sum_fn
        self._squared_norms = np.vecdot(vectors, vectors).astype(np.float64)
        self._own, self._tiles = self._own_tiles(vectors)

    def closest(
        self, centers: Float[np.ndarray, "k d"], rows: Int[np.ndarray, "m"] | None = None
    ) -> tuple[Float[np.ndarray, "m"], Int[np.ndarray, "m"]]:
        """Returns max over c of x'c - |c|^2 / 2 for the points `rows`, and the first such c."""
        vectors, own, point_tiles = self.vectors, self._own, self._tiles
        if rows is not None:
            vectors = vectors[rows]
            own, point_tiles = self._own_tiles(vectors)
        side = tiles.choose_side(len(centers), self._side)
        center_tiles = Tiles(centers, side=side, mesh=point_tiles.mesh, spec=REPLICATED)
        results = np.zeros((2, len(vectors)))  # float64 holds float32 and indices exactly
        if len(point_tiles):
            for result, array in zip(results, search(point_tiles, center_tiles, k=1), strict=True):
                result[own] = array[: own.stop - own.start, 0]
        similarities, indices = results if self._sum_fn is None else self._sum_fn(results)
        return similarities.astype(vectors.dtype), indices.astype(np.int64)

    def _own_tiles(self, vectors: Float[np.ndarray, "n d"]) -> tuple[slice, Tiles]:
        """Returns the rows of this process, whole tiles as in one process, and their tiles."""
        share = inputs.share_rows(-(-len(vectors) // self._side), self._share)
        own = slice(share.start * self._side, min(share.stop * self._side, len(vectors)))
        # A device without points would only compute padding.
        mesh = tiles.choose_mesh(self._devices, count=share.stop - share.start)
        return own, Tiles(vectors[own], side=self._side, similarity_fn=product, mesh=mesh)

    def lloyd(
        self, centers: Float[np.ndarray, "k d"], iterations: int, least_shift: float
    ) -> KMeans:
        """Runs Lloyd's iterations from `centers`, which it changes.

        They end when the sum of squared moves of the centers is at most `least_shift`.
        """
        points, k = self.vectors, len(centers)
        # `similarities` are x'c - |c|^2 / 2 of every point x and its center c.
        assignment, similarities = np.full(len(points), -1), np.full(len(points), -np.inf)
        has_moved, has_settled = np.ones(k, bool), False
        for _ in range(iterations):
            previous = assignment.copy()
            is_kept = (assignment >= 0) & ~has_moved[assignment]
            if not is_kept.any():
                similarities, assignment = self.closest(centers)
            elif has_moved.any():
                self.reassign(centers, has_moved, is_kept, assignment, similarities)
            distances = self._squared_norms - 2.0 * similarities
            refilled = _fill_empty(points, centers, assignment, distances)
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

    def reassign(
        self,
        centers: Float[np.ndarray, "k d"],
        has_moved: Bool[np.ndarray, "k"],
        is_kept: Bool[np.ndarray, "n"],
        assignment: Int[np.ndarray, "n"],
        similarities: Float[np.ndarray, "n"],
    ) -> None:
        """Updates the closest centers; compares `is_kept` points with the moved centers only."""
        searched, kept = np.flatnonzero(~is_kept), np.flatnonzero(is_kept)
        similarities[searched], assignment[searched] = self.closest(centers, searched)
        moved = np.flatnonzero(has_moved)
        candidates, indices = self.closest(centers[moved], kept)
        clusters = moved[indices]
        is_tie = (candidates == similarities[kept]) & (clusters < assignment[kept])
        wins = (candidates > similarities[kept]) | is_tie
        similarities[kept[wins]], assignment[kept[wins]] = candidates[wins], clusters[wins]

    def draw(self, k: int, rng: np.random.Generator) -> Int[np.ndarray, "k"]:
        """Draws each next start with probability ~ its squared distance to the others (k-means++).

        Starts are drawn in batches, from the distances before the batch. Each draw is then accepted
        with probability (distance now / distance before the batch). This is rejection sampling, so
        the distribution is exactly as if starts were drawn one by one.
        """
        points, norms = self.vectors, self._squared_norms
        chosen = [int(rng.integers(len(points)))]
        distances = np.full(len(points), np.inf)  # squared, to the nearest chosen point
        batch = chosen
        while True:
            nearest, _ = self.closest(points[batch])
            distances = np.minimum(distances, norms - 2.0 * nearest)
            # A distance of zero comes out as a rounding error, which must not be drawn.
            distances[distances < 1e-6 * norms] = 0
            distances[chosen] = 0
            if len(chosen) == k:
                return np.array(chosen)
            cumulative = np.cumsum(distances)
            if not cumulative[-1] > 0:  # fewer distinct points than clusters
                others = np.setdiff1d(np.arange(len(points)), chosen)
                return np.append(chosen, rng.permutation(others)[: k - len(chosen)])
            size = min(self._side, len(chosen))
            draws = np.searchsorted(cumulative, rng.random(size) * cumulative[-1], "right")
            draws = np.minimum(draws, len(points) - 1)
            before, uniforms = distances[draws], rng.random(len(draws))
            now, drawn = before.copy(), points[draws]
            between = norms[draws][:, None] + norms[draws] - 2.0 * (drawn @ drawn.T)
            batch = []
            for i in range(len(draws)):
                if len(chosen) < k and uniforms[i] * before[i] < now[i]:
                    batch.append(int(draws[i]))
                    chosen.append(int(draws[i]))
                    now = np.where(draws == draws[i], 0, np.minimum(now, between[i]))

    def draw_greedily(self, k: int, rng: np.random.Generator, trials: int) -> Int[np.ndarray, "k"]:
        """Draws several candidates for each start and takes the best, as scikit-learn does."""
        points, norms = self.vectors, self._squared_norms
        chosen = [int(rng.integers(len(points)))]
        candidates, distances = np.array(chosen), np.full(len(points), np.inf)
        while True:
            between = norms[candidates][:, None] + norms - 2.0 * (points[candidates] @ points.T)
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


def _fill_empty(
    points: Float[np.ndarray, "n d"],
    centers: Float[np.ndarray, "k d"],
    assignment: Int[np.ndarray, "n"],
    distances: Float[np.ndarray, "n"],
) -> Int[np.ndarray, "m"]:
    """Gives empty clusters the farthest points of larger ones; returns these clusters."""
    sizes = np.bincount(assignment, minlength=len(centers))
    empty = np.flatnonzero(sizes == 0)
    refilled = 0
    for point in np.argsort(-distances, kind="stable") if len(empty) else ():
        cluster = assignment[point]
        if sizes[cluster] > 1 and (points[point] != centers[cluster]).any():
            sizes[cluster] -= 1
            assignment[point] = empty[refilled]
            refilled += 1
            if refilled == len(empty):
                break
    return empty[:refilled]


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
