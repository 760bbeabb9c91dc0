"""Exact nearest neighbors among rows in memory or in a memory-mapped file.

A product in float32 selects candidates, and sums in float64 order the candidates. So a result does
not depend on the number of queries in a call or on the position of a row, and equal vectors have
equal similarities.

The similarity of two vectors is their cosine ("cosine", of unit vectors), or minus their Euclidean
distance ("euclidean"). A larger similarity is always better.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

SIMILARITIES = ("cosine", "euclidean")
_ROWS = 1 << 16  # rows that are compared at once
_QUERIES = 64  # queries that are compared at once: 16 MiB of similarities
_FEW_QUERIES = 4  # up to 4 queries are compared one by one: a matrix product is not faster
_GROUP = 128  # rows in a group: the maximum of each group gives a first bound
_SPARSE = 0.2  # if a smaller share of the rows is allowed, they are copied before the comparison
_MOST_CANDIDATES = 4096  # beyond k in a block; if there are more, float64 picks the best k at once


def similarities(query: np.ndarray, vectors: np.ndarray, *, similarity: str) -> np.ndarray:
    """[n] of a query [d] and rows [n, d], summed in float64 in one order for all rows."""
    if similarity == "cosine":
        return np.multiply(vectors, query[None], dtype=np.float64).sum(axis=1)
    differences = np.subtract(vectors, query[None], dtype=np.float64)
    return -np.sqrt(np.square(differences, out=differences).sum(axis=1))


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Vectors [n, d] divided by their lengths, float32; 0 stays 0."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(norms == 0, 1, norms)).astype(np.float32)


def prefix(vectors: np.ndarray, dim: int) -> np.ndarray:
    """The first `dim` numbers of vectors [n, d] as unit vectors float32 [n, dim]; 0 stays 0."""
    return unit_vectors(np.asarray(vectors)[:, :dim])


def check_prefix(prefix: int | None, prefixes: Sequence[int], model: str) -> None:
    """Raises unless `prefix` is None or one of those with which the `model` was trained."""
    if prefix is None or prefix in prefixes:
        return
    numbers = ", ".join(map(str, prefixes))
    trained = f"with the prefixes {numbers}" if numbers else "without prefixes: leave it out"
    raise ValueError(f"prefix={prefix}: {model} was trained {trained}")


def candidates(
    queries: np.ndarray,
    vectors: np.ndarray,
    k: int,
    *,
    similarity: str,
    where: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Positions of the best k rows of each query, and of rows that float32 may confuse with them.

    `where` [n] marks the rows that count.
    """
    results: list[np.ndarray] = []
    for start in range(0, len(queries), _QUERIES):
        few = queries[start : start + _QUERIES]
        results += _candidates(few, vectors, k, where, similarity)
    return results


class _Kept(NamedTuple):
    """The candidates of a query among the rows so far; `errors` bound the errors of the scores."""

    places: np.ndarray
    scores: np.ndarray
    errors: np.ndarray


def _candidates(
    queries: np.ndarray, vectors: np.ndarray, k: int, where: np.ndarray | None, similarity: str
) -> list[np.ndarray]:
    positions = None
    if where is not None:
        allowed = np.flatnonzero(where)
        if len(allowed) == len(vectors):
            where = None
        elif len(allowed) < _SPARSE * len(vectors):
            positions, where = allowed, None
    count = len(vectors) if positions is None else len(positions)
    nothing = np.zeros(0, np.float32)
    kept = [_Kept(np.zeros(0, np.int64), nothing, nothing) for _ in queries]
    for start in range(0, count, _ROWS):
        stop = min(start + _ROWS, count)
        block = vectors[start:stop] if positions is None else vectors[positions[start:stop]]
        if len(queries) <= _FEW_QUERIES:  # reads the rows at the speed of memory, in one thread
            scores = np.stack([np.einsum("nd,d->n", block, query) for query in queries])
        else:
            scores = queries @ block.T
        halves = None
        if similarity == "euclidean":  # q x - x x / 2 orders rows as the distance does
            halves = np.float32(0.5) * np.einsum("nd,nd->n", block, block)
            scores -= halves
        errors = _errors(queries, halves)
        if where is not None:
            scores[:, ~where[start:stop]] = -np.inf
        for i, (row, error) in enumerate(zip(scores, errors, strict=True)):
            chosen = _largest(row, error, k)
            if len(chosen) > k + _MOST_CANDIDATES:
                values = similarities(queries[i], block[chosen], similarity=similarity)
                chosen = np.sort(chosen[best(values, chosen, k)])
            places = start + chosen if positions is None else positions[start + chosen]
            values, error = row[chosen], np.broadcast_to(error, row.shape)[chosen]
            if len(kept[i].places):
                places = np.concatenate([kept[i].places, places])
                values = np.concatenate([kept[i].scores, values])
                error = np.concatenate([kept[i].errors, error])
                kept_rows = _largest(values, error, k)
                places, values, error = places[kept_rows], values[kept_rows], error[kept_rows]
            kept[i] = _Kept(places, values, error)
    return [best_rows.places for best_rows in kept]


def _errors(queries: np.ndarray, halves: np.ndarray | None) -> list[np.ndarray]:
    """Bounds of the errors of the scores [n] of each query: one number [], or one for each row [n].

    `halves` [n] are half of the squared lengths of the rows; None stands for unit vectors.
    """
    share = np.asarray(5e-7 + 2e-7 * np.sqrt(queries.shape[1]), np.float32)
    if halves is None:
        return [share] * len(queries)
    lengths = np.sqrt(2 * halves)
    return [share * (np.linalg.norm(query) * lengths + 2 * halves) for query in queries]


def _largest(values: np.ndarray, errors: np.ndarray, k: int) -> np.ndarray:
    """Positions of finite values that may be among the k largest, given their possible errors."""
    if len(values) <= k:
        return np.flatnonzero(values > -np.inf)
    if errors.ndim:
        least, most, reach = values - errors, values + errors, np.float32(0)
    else:  # the same, without two more arrays
        least, most, reach = values, values, np.float32(2 * errors)
    chosen, subset = None, least
    groups = len(values) // _GROUP
    if groups >= 4 * k:
        # k groups have a value of at least the k-th largest maximum: a bound in one quick pass.
        maxima = least[: groups * _GROUP].reshape(groups, _GROUP).max(axis=1)
        bound = np.partition(maxima, groups - k)[groups - k] - reach
        chosen = np.flatnonzero(most >= bound)
        subset, most = least[chosen], most[chosen]
    if len(subset) > k:
        bound = np.partition(subset, len(subset) - k)[len(subset) - k] - reach
        passing = most >= bound
        chosen = np.flatnonzero(passing) if chosen is None else chosen[passing]
    assert chosen is not None
    return chosen[values[chosen] > -np.inf]


def best(values: np.ndarray, rows: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k largest values, in order; of equal values the lower row comes first."""
    return np.lexsort((rows, -values))[:k]
