"""When an index has a graph for approximate search, and how wide each search of it is.

Every store measures its graph here, and its search in two stages (`codes.py`), so a recall means
the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmljax.index import nearest

__all__ = [
    "CANDIDATES",
    "CONNECTIVITY",
    "EXPANSION_ADD",
    "GRAPH_FROM",
    "LEAST_RECALL",
    "MORE",
    "K",
    "measured",
    "tune",
    "width_for",
]

GRAPH_FROM = 50_000  # items from which on a graph is built by default
CONNECTIVITY, EXPANSION_ADD = 16, 128  # M and ef_construction of HNSW
LEAST_RECALL = 0.95  # a graph that does not reach it is not used
K = 10  # the recall is measured at 10
MORE = 6  # candidates beyond k, because half precision may order them wrongly
_TARGET_RECALL = 0.98
_WIDTHS = (16, 32, 64, 128, 256, 512)
CANDIDATES = (*_WIDTHS, 1024, 2048)  # of the first stage of a search in two stages
_QUERIES = 1000  # stored vectors that measure the recall


def tune(
    search_fn: Callable[[int], Iterable[Iterable[int]]],
    truth: Sequence[Iterable[int]],
    rows: Sequence[int],
    widths: Sequence[int] = _WIDTHS,
) -> tuple[int, float]:
    """The smallest search width (ef) with a recall@10 of 0.98, or the largest one; its recall.

    Queries are stored vectors with the row numbers `rows`; a row does not count among its own
    neighbors. `search_fn` returns the rows that the graph finds for each query with a given width,
    and `truth` holds the rows of an exact search.
    """
    width, recall = widths[0], 1.0
    for width in widths:
        shares = []
        for row, exact, near in zip(rows, truth, search_fn(width), strict=True):
            others = set(exact) - {row}
            shares.append(len(others & set(near)) / len(others) if others else 1.0)
        recall = float(np.mean(shares)) if shares else 1.0
        if recall >= _TARGET_RECALL:
            break
    return width, recall


def measured(
    search_fn: Callable[[np.ndarray, int, int], Iterable[Iterable[int]]],
    rows: np.ndarray,
    vectors: np.ndarray,
    *,
    similarity: str,
    widths: Sequence[int] = _WIDTHS,
) -> tuple[int, float]:
    """`tune` on up to 1,000 of the stored `vectors` [n, d] with row numbers `rows` [n].

    `search_fn(queries, k, width)` returns the rows that a search of this width finds.
    """
    chosen = np.linspace(0, len(rows) - 1, min(_QUERIES, len(rows))).astype(np.int64)
    queries, k = vectors[chosen], min(K + 1, len(rows))
    truth = []
    candidates = nearest.candidates(queries, vectors, k, similarity=similarity)
    for query, places in zip(queries, candidates, strict=True):
        values = nearest.similarities(query, vectors[places], similarity=similarity)
        truth.append(rows[places[nearest.best(values, rows[places], k)]].tolist())

    def search(width: int) -> Iterable[Iterable[int]]:
        return search_fn(queries, k, width)

    return tune(search, truth, rows[chosen].tolist(), widths)


def width_for(tuned: int, k: int) -> int:
    """The search width of a search for k rows."""
    return max(tuned, k + k // 2)
