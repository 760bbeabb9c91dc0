"""k-means, in tiles."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dmljax.retrieval import tiles
from dmljax.retrieval.tiles import Embeddings, Tile, Tiles

__all__ = ["KMeans", "kmeans"]


class KMeans(NamedTuple):
    """`inertia` is the sum of squared distances to the assigned centres."""

    centres: Float[np.ndarray, "k d"]
    assignment: Int[np.ndarray, "n"]
    inertia: float


def kmeans(
    embeddings: Embeddings,
    *,
    k: int,
    seed: int = 0,
    iterations: int = 100,
    tile: int = 1024,
    devices: Sequence[jax.Device] | None = None,
) -> KMeans:
    """Lloyd's iterations from a k-means++ start (Arthur & Vassilvitskii, 2007).

    Distances that cannot have changed are not computed again: a point whose centre stayed is held
    to the moved centres only, which gives the same assignment. An empty cluster takes the point
    that is farthest from its centre. Stops when no point changes its cluster.
    """
    points, _, centre, side = tiles.prepare(embeddings, None, tile)
    n = len(points)
    if not 1 <= k <= n:
        raise ValueError(f"k={k} clusters, but there are {n} embeddings: choose k from 1 to {n}")
    dtype = tiles.dtype_of(points)
    points = points.astype(dtype) - centre.astype(dtype)
    squares = np.vecdot(points, points).astype(np.float64)
    mesh = tiles.mesh_of(devices, rows=-(-n // side))
    everything = tiles.plain(points, side, mesh=mesh)
    rng = np.random.default_rng(seed)
    centres = points[_seeds(points, everything, squares, k, rng, side)]
    assignment, best = np.full(n, -1), np.full(n, -np.inf, dtype)
    moved = np.ones(k, bool)
    for _ in range(iterations):
        before = assignment.copy()
        stays = (assignment >= 0) & ~moved[assignment]
        if not stays.any():
            best, assignment = _closest(points, centres, side, rows=everything)
        elif moved.any():
            again, rest = np.flatnonzero(~stays), np.flatnonzero(stays)
            best[again], assignment[again] = _closest(points[again], centres, side, mesh=mesh)
            which = np.flatnonzero(moved)
            near, at = _closest(points[rest], centres[which], side, mesh=mesh)
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
    rows: Tiles,
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
        near, _ = _closest(points, points[fresh], side, rows=rows)
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
    points: np.ndarray,
    centres: np.ndarray,
    side: int,
    *,
    rows: Tiles | None = None,
    mesh: Mesh | None = None,
) -> tuple[Float[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """max over c of x'c - |c|^2 / 2, and the first c that has it."""
    if rows is None:
        enough = mesh is not None and len(points) > side * (mesh.size - 1)
        rows = tiles.plain(points, side, mesh=mesh if enough else None)
    width = tiles.side_of(len(centres), side)
    columns = tiles.plain(centres, width, mesh=rows.mesh, whole=True)
    closer, first = (
        tiles.over(rows.mesh, kernel, roles)
        for kernel, roles in ((_closer, "rrrww"), (_first, "rr"))
    )
    lanes = rows.side, width // tiles.SLICES
    found = []
    for i in range(len(rows)):
        tile = rows[i]
        start = np.full(lanes, -np.inf, tile.vectors.dtype), np.zeros(lanes, np.int32)
        best, at = tiles.put(start, rows.mesh)
        for c in range(len(columns)):
            best, at = closer(best, at, tile.vectors, columns[c], np.int32(c * width))
        found.append(first(best, at))
    best, at = (np.concatenate(a)[: len(points)] for a in zip(*found, strict=True))
    return best, at.astype(np.int64)


@jax.jit
def _closer(
    best: Array, at: Array, points: Array, columns: Tile, first: Array
) -> tuple[Array, Array]:
    x = jnp.matmul(points, columns.vectors.T, precision=jax.lax.Precision.HIGHEST)
    x = x + columns.offsets[None]
    width = x.shape[1] // tiles.SLICES
    for s, part in enumerate(jnp.split(x, tiles.SLICES, axis=1)):
        better = part > best
        best = jnp.where(better, part, best)
        at = jnp.where(better, first + s * width, at)
    return best, at


@jax.jit
def _first(best: Array, at: Array) -> tuple[Array, Array]:
    top = jnp.max(best, axis=1)
    at = at + jnp.arange(at.shape[1], dtype=at.dtype)[None]
    return top, jnp.min(jnp.where(best == top[:, None], at, jnp.iinfo(at.dtype).max), axis=1)
