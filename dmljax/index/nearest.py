"""Exact nearest neighbors among rows in memory or in a memory-mapped file.

float32 products select candidates, and float64 sums of the candidates order them. So a result
depends neither on how many queries are asked together nor on where a row is stored, and equal
vectors have equal similarities.
"""

from __future__ import annotations

import numpy as np

__all__ = ["best", "candidates", "similarities"]

_ROWS = 1 << 16  # rows that are compared at once
_QUERIES = 64  # queries that are compared at once: 16 MiB of similarities
_FEW_QUERIES = 4  # so few are compared one by one: a product with one vector gains no speed
_GROUP = 128  # rows whose largest similarity is compared first
_SPARSE = 0.2  # fewer allowed rows than this share are copied together before they are compared
_MOST_TIES = 4096


def similarities(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """The cosines of a query [d] and rows [n, d], summed in float64 in one order for all rows."""
    return np.multiply(vectors, query[None], dtype=np.float64).sum(axis=1)


def candidates(
    queries: np.ndarray, vectors: np.ndarray, k: int, *, where: np.ndarray | None = None
) -> list[np.ndarray]:
    """Positions of the best k rows of each query, and of rows that float32 cannot tell from them.

    `where` [n] marks the rows that count.
    """
    results: list[np.ndarray] = []
    for start in range(0, len(queries), _QUERIES):
        results += _candidates(queries[start : start + _QUERIES], vectors, k, where)
    return results


def _candidates(
    queries: np.ndarray, vectors: np.ndarray, k: int, where: np.ndarray | None
) -> list[np.ndarray]:
    positions = None
    if where is not None:
        allowed = np.flatnonzero(where)
        if len(allowed) == len(vectors):
            where = None
        elif len(allowed) < _SPARSE * len(vectors):
            positions, where = allowed, None
    count = len(vectors) if positions is None else len(positions)
    tolerance = 1e-6 + 4e-7 * np.sqrt(vectors.shape[1])
    kept = [(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in queries]
    for start in range(0, count, _ROWS):
        stop = min(start + _ROWS, count)
        block = vectors[start:stop] if positions is None else vectors[positions[start:stop]]
        if len(queries) <= _FEW_QUERIES:  # reads the rows at the speed of memory, in one thread
            products = np.stack([np.einsum("nd,d->n", block, query) for query in queries])
        else:
            products = queries @ block.T
        if where is not None:
            products[:, ~where[start:stop]] = -np.inf
        for i, row in enumerate(products):
            chosen = _largest(row, k, tolerance)
            places = start + chosen if positions is None else positions[start + chosen]
            merged = np.concatenate([kept[i][0], places]), np.concatenate([kept[i][1], row[chosen]])
            if len(merged[0]) > len(places):
                again = _largest(merged[1], k, tolerance)
                merged = merged[0][again], merged[1][again]
            kept[i] = merged
    return [places for places, _ in kept]


def _largest(values: np.ndarray, k: int, tolerance: float) -> np.ndarray:
    """Positions of the k largest finite values, and of those within `tolerance` of the last."""
    if len(values) <= k:
        return np.flatnonzero(values > -np.inf)
    groups = len(values) // _GROUP
    if groups >= 4 * k:
        # k groups have a value of at least the k-th largest maximum: a bound in one quick pass.
        maxima = values[: groups * _GROUP].reshape(groups, _GROUP).max(axis=1)
        bound = np.partition(maxima, groups - k)[groups - k] - tolerance
        chosen = np.flatnonzero(values >= bound)
        subset = values[chosen]
    else:
        chosen, subset = np.arange(len(values)), values
    if len(subset) > k:
        least = np.partition(subset, len(subset) - k)[len(subset) - k] - tolerance
        chosen = chosen[subset >= least]
    chosen = chosen[values[chosen] > -np.inf]
    if len(chosen) > k + _MOST_TIES:  # so many equal vectors: those that come first
        order = np.argsort(-values[chosen], kind="stable")
        chosen = np.sort(chosen[order[: k + _MOST_TIES]])
    return chosen


def best(values: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """The order of the k largest values; of equal ones, that of the lower row comes first."""
    return np.lexsort((rows, -values))[:k]
