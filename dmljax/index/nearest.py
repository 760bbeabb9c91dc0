"""Exact nearest neighbors among rows in memory or in a memory-mapped file.

A product in float32 selects candidates, and sums in float64 rank the candidates. So a result does
not depend on the number of queries in a call or on the position of a row, and equal vectors have
equal similarities.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

_ROWS = 1 << 16  # tile size of the rows
_QUERIES = 64  # tile size of the queries: 16 MiB of similarities
_FEW_QUERIES = 4  # up to 4 queries are compared one by one: a matrix product is not faster
_GROUP = 128  # rows in a group: the maximum of each group gives a first bound
_SPARSE = 0.2  # if a smaller fraction of the rows is allowed, they are copied before the comparison


class Similarity(NamedTuple):
    """How an index compares vectors. A larger similarity is always better.

    A further similarity is one more row of `SIMILARITIES`.
    """

    name: str
    description: str
    score_fn: Callable[[np.ndarray, np.ndarray], np.ndarray]
    """(query [d], vectors [n d]) -> float64 [n], summed in one order for all rows."""
    screen_fn: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    """(products [q n], queries, vectors) -> scores that order the rows as the similarity does, and
    a bound of their errors for each query. It may write into the products."""
    needs_unit: bool  # whether vectors must have the length 1
    is_distance: bool  # whether it is a negative distance, which people read without the sign
    sentence: str  # of a bundle's card
    limits: tuple[float, float]  # the smallest and the largest possible value
    operator: str  # of pgvector, which orders rows by it


def _cosine(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    return np.multiply(vectors, query[None], dtype=np.float64).sum(axis=1)


def _screen_cosine(
    products: np.ndarray, queries: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return products, np.broadcast_to(_relative_error(queries), len(queries))


def _minus_distance(query: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    differences = np.subtract(vectors, query[None], dtype=np.float64)
    return -np.sqrt(np.square(differences, out=differences).sum(axis=1))


def _screen_distance(
    products: np.ndarray, queries: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Orders rows x by q x - x x / 2, as their distances to q do."""
    squares = np.einsum("nd,nd->n", vectors, vectors)
    products -= np.float32(0.5) * squares
    longest = np.sqrt(squares.max())
    lengths = np.linalg.norm(queries, axis=1)
    return products, _relative_error(queries) * longest * (lengths + longest)


def _relative_error(queries: np.ndarray) -> np.float32:
    """Bounds the relative error of a product of d numbers in float32."""
    return np.float32(5e-7 + 2e-7 * np.sqrt(queries.shape[1]))


SIMILARITIES = {
    similarity.name: similarity
    for similarity in (
        Similarity(
            "cosine",
            "the cosine",
            _cosine,
            _screen_cosine,
            needs_unit=True,
            is_distance=False,
            sentence="unit vectors, compared by their cosine",
            limits=(-1, 1),
            operator="<=>",
        ),
        Similarity(
            "euclidean",
            "minus the Euclidean distance",
            _minus_distance,
            _screen_distance,
            needs_unit=False,
            is_distance=True,
            sentence="compared by distance",
            limits=(-np.inf, 0),
            operator="<->",
        ),
    )
}


def best(rows: np.ndarray, values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns row numbers and similarities of the best k, best first.

    Of equal similarities, the lower row number comes first: the item that was added earlier. Every
    store ranks its candidates by this function.
    """
    order = np.lexsort((rows, -values))[:k]
    return rows[order], values[order]


def search(
    queries: np.ndarray,
    vectors: np.ndarray,
    k: int,
    similarity: Similarity,
    *,
    where: np.ndarray,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns positions and similarities of the best k of each query, as `best` orders them.

    `where [n]` marks the `vectors [n d]` that count.
    """
    results = [(np.zeros(0, np.int64), np.zeros(0))] * len(queries)
    for start in range(0, len(queries), _QUERIES):
        batch = queries[start : start + _QUERIES]
        for rows, tile in _tiles(vectors, where):
            if len(batch) <= _FEW_QUERIES:  # reads the rows at the speed of memory, in one thread
                products = np.stack([np.einsum("nd,d->n", tile, query) for query in batch])
            else:
                products = batch @ tile.T
            scores, errors = similarity.screen_fn(products, batch, tile)
            if not (counts := where[rows]).all():
                scores[:, ~counts] = -np.inf
            for i, (query, error) in enumerate(zip(batch, errors, strict=True)):
                near = _largest(scores[i], 2 * error, k)
                values = similarity.score_fn(query, tile[near])
                old_rows, old_values = results[start + i]
                results[start + i] = best(
                    np.concatenate([old_rows, rows[near]]), np.concatenate([old_values, values]), k
                )
    return results


def _tiles(vectors: np.ndarray, where: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields positions and vectors that are compared at a time; of few marked ones, a copy."""
    for start in range(0, len(vectors), _ROWS):
        marked = where[start : start + _ROWS]
        if not marked.any():
            continue
        if marked.mean() < _SPARSE:
            rows = start + np.flatnonzero(marked)
            yield rows, vectors[rows]
        else:
            yield np.arange(start, start + len(marked)), vectors[start : start + _ROWS]


def _largest(scores: np.ndarray, reach: np.float32, k: int) -> np.ndarray:
    """Returns positions of finite scores that are at most `reach` below the k-th largest."""
    near = np.arange(len(scores))
    groups = len(scores) // _GROUP
    if groups >= 4 * k:
        # k groups have a score of at least the k-th largest maximum: a bound in one quick pass.
        maxima = scores[: groups * _GROUP].reshape(groups, _GROUP).max(axis=1)
        near = np.flatnonzero(scores >= np.partition(maxima, groups - k)[groups - k] - reach)
    if len(near) > k:
        subset = scores[near]
        near = near[subset >= np.partition(subset, len(subset) - k)[len(subset) - k] - reach]
    return near[scores[near] > -np.inf]
