"""Exact nearest neighbors among rows in memory or in a memory-mapped file.

A product in float32 selects candidates, and sums in float64 rank the candidates. So a result does
not depend on the number of queries in a call or on the position of a row, and equal vectors have
equal similarities.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_ROWS = 1 << 16  # tile size of the rows
_QUERIES = 64  # tile size of the queries: 16 MiB of similarities
_FEW_QUERIES = 4  # up to 4 queries are compared one by one: a matrix product is not faster
_GROUP = 128  # rows in a group: the maximum of each group gives a first bound
_SPARSE = 0.2  # if a smaller fraction of the rows is allowed, they are copied before the comparison
_MOST_CANDIDATES = 4096  # beyond k in a tile; if there are more, float64 picks the best k at once


class Similarity(NamedTuple):
    """How an index compares vectors. A larger similarity is always better.

    A further similarity is one more row of `SIMILARITIES`.
    """

    name: str
    description: str
    score_fn: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """(query [d], vectors [n d]) -> float64 [n], summed in one order for all rows."""
    screen_fn: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, list[np.ndarray]]]
    """(products [q n], queries, vectors) -> scores that order the rows as the similarity does, and
    for each query a bound of their errors, [] or [n]. It may write into the products."""
    needs_unit: bool  # whether vectors must have the length 1
    limits: tuple[float, float]  # the smallest and the largest possible value
    operator: str  # of pgvector, which orders rows by it


def _cosine(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.multiply(vectors, query[None], dtype=np.float64).sum(axis=1)


def _screen_cosine(
    products: np.ndarray, queries: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    return products, [np.asarray(_relative_error(queries))] * len(queries)


def _minus_distance(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    differences = np.subtract(vectors, query[None], dtype=np.float64)
    return -np.sqrt(np.square(differences, out=differences).sum(axis=1))


def _screen_distance(
    products: np.ndarray, queries: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Orders rows x by q x - x x / 2, as their distances to q do."""
    halves = np.float32(0.5) * np.einsum("nd,nd->n", vectors, vectors)
    products -= halves
    lengths, error = np.sqrt(2 * halves), _relative_error(queries)
    return products, [error * (np.linalg.norm(x) * lengths + 2 * halves) for x in queries]


def _relative_error(queries: np.ndarray) -> np.float32:
    """Bounds the relative error of a product of d numbers in float32."""
    return np.float32(5e-7 + 2e-7 * np.sqrt(queries.shape[1]))


SIMILARITIES = {
    similarity.name: similarity
    for similarity in (
        Similarity("cosine", "the cosine", _cosine, _screen_cosine, True, (-1, 1), "<=>"),
        Similarity(
            "euclidean",
            "minus the Euclidean distance",
            _minus_distance,
            _screen_distance,
            False,
            (-np.inf, 0),
            "<->",
        ),
    )
}


def best(
    query: np.ndarray, rows: np.ndarray, vectors: np.ndarray, k: int, similarity: Similarity
) -> tuple[np.ndarray, np.ndarray]:
    """Returns row numbers and similarities of the best k of the `rows`, best first.

    Of equal similarities, the lower row number comes first: the item that was added earlier. Every
    store ranks its candidates by this function.
    """
    values = similarity.score_fn(query, vectors)
    order = np.lexsort((rows, -values))[:k]
    return rows[order], values[order]


def candidates(
    queries: np.ndarray,
    vectors: np.ndarray,
    k: int,
    similarity: Similarity,
    *,
    where: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Returns for each query the positions of a few rows that include its best k.

    They are the best k by float32, and all rows that rounding may have put behind them. `where` [n]
    marks the rows that count.
    """
    results: list[np.ndarray] = []
    for start in range(0, len(queries), _QUERIES):
        results += _candidates(queries[start : start + _QUERIES], vectors, k, similarity, where)
    return results


class _Kept(NamedTuple):
    """The candidates of a query so far; `errors` bound the errors of the scores."""

    positions: np.ndarray
    scores: np.ndarray
    errors: np.ndarray


def _candidates(
    queries: np.ndarray,
    vectors: np.ndarray,
    k: int,
    similarity: Similarity,
    where: np.ndarray | None,
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
            products = np.stack([np.einsum("nd,d->n", block, query) for query in queries])
        else:
            products = queries @ block.T
        scores, errors = similarity.screen_fn(products, queries, block)
        if where is not None:
            scores[:, ~where[start:stop]] = -np.inf
        for i, (row, error) in enumerate(zip(scores, errors, strict=True)):
            chosen = _largest(row, error, k)
            if len(chosen) > k + _MOST_CANDIDATES:
                chosen = np.sort(best(queries[i], chosen, block[chosen], k, similarity)[0])
            new = start + chosen if positions is None else positions[start + chosen]
            values, error = row[chosen], np.broadcast_to(error, row.shape)[chosen]
            if len(kept[i].positions):
                new = np.concatenate([kept[i].positions, new])
                values = np.concatenate([kept[i].scores, values])
                error = np.concatenate([kept[i].errors, error])
                largest = _largest(values, error, k)
                new, values, error = new[largest], values[largest], error[largest]
            kept[i] = _Kept(new, values, error)
    return [rows.positions for rows in kept]


def _largest(values: np.ndarray, errors: np.ndarray, k: int) -> np.ndarray:
    """Returns positions of finite values that may be among the k largest, given their errors."""
    if len(values) <= k:
        return np.flatnonzero(values > -np.inf)
    if errors.ndim:
        low, high, reach = values - errors, values + errors, np.float32(0)
    else:  # the same, without two more arrays
        low, high, reach = values, values, np.float32(2 * errors)
    chosen, subset = None, low
    groups = len(values) // _GROUP
    if groups >= 4 * k:
        # k groups have a value of at least the k-th largest maximum: a bound in one quick pass.
        maxima = low[: groups * _GROUP].reshape(groups, _GROUP).max(axis=1)
        bound = np.partition(maxima, groups - k)[groups - k] - reach
        chosen = np.flatnonzero(high >= bound)
        subset, high = low[chosen], high[chosen]
    if len(subset) > k:
        bound = np.partition(subset, len(subset) - k)[len(subset) - k] - reach
        passing = high >= bound
        chosen = np.flatnonzero(passing) if chosen is None else chosen[passing]
    assert chosen is not None
    return chosen[values[chosen] > -np.inf]
