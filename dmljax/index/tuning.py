"""When an index has a graph for approximate search, and how wide each search of it is.

Every store measures its graph here, and its search in two stages (`codes.py`), so a recall means
the same everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dmljax.index import nearest

GRAPH_FROM = 50_000  # items from which on a graph is built by default
CONNECTIVITY, EXPANSION_ADD = 16, 128  # M and ef_construction of HNSW
WANTED_RECALL = 0.95  # unless somebody asks for another; a graph that misses it is not used
K = 10  # the recall is measured at 10
MORE = 6  # candidates beyond k, because half precision may order them wrongly
_WIDTHS = (16, 32, 64, 128, 256, 512)
CANDIDATES = (*_WIDTHS, 1024, 2048)  # of the first stage of a search in two stages
_QUERIES = 300  # of each kind that measure the recall
_STRANGE = 0.05  # share of the measured queries whose best hits are left out of `least`


class Question(NamedTuple):
    """Queries of one kind that measure a recall."""

    queries: np.ndarray  # [q d]
    own: np.ndarray  # [q]: the row that does not count among the neighbors of a query, or -1


class Measured(NamedTuple):
    """A search width, and the recall@10 that it reaches for each kind of queries.

    Of a query whose best hit is below the similarity `least`, nothing was measured.
    """

    width: int
    recalls: dict[str, float]
    least: float | None


def questions(
    vectors: np.ndarray, rows: np.ndarray, *, similarity: str, count: int = _QUERIES
) -> dict[str, Question]:
    """Queries of three kinds, made from up to `count` stored `vectors` [n d] with numbers `rows`.

    Stored vectors are nodes of the graph, which finds their neighbors easily. Queries of users are
    none: perturbed vectors are at half the mean distance of two items from a stored one, and
    vectors between two items are far from all.
    """
    chosen = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64)
    stored, rng = vectors[chosen].astype(np.float64), np.random.default_rng(0)
    others = stored[rng.permutation(len(stored))]
    noise = rng.normal(size=stored.shape)
    noise /= np.maximum(np.linalg.norm(noise, axis=1, keepdims=True), 1e-12)
    distance = np.linalg.norm(stored - others, axis=1).mean() if len(stored) else 0.0
    made = {"perturbed": stored + 0.5 * distance * noise, "between": (stored + others) / 2}
    nobody = np.full(len(stored), -1)
    results = {"stored": Question(vectors[chosen], rows[chosen])}
    for name, queries in made.items():
        unit = nearest.unit_vectors(queries) if similarity == "cosine" else queries
        results[name] = Question(unit.astype(np.float32), nobody)
    return results


def tune(
    search_fn: Callable[[str, int], Iterable[Iterable[int]]],
    truth: Mapping[str, Sequence[Iterable[int]]],
    own: Mapping[str, Sequence[int]],
    wanted: float,
    widths: Sequence[int] = _WIDTHS,
) -> tuple[int, dict[str, float]]:
    """The smallest search width (ef) whose recall@10 is `wanted` for every kind, or the largest.

    And the recall@10 of each kind.

    `search_fn(kind, width)` returns the rows that the graph finds for each query of a kind, and
    `truth` holds the rows of an exact search. `own` rows do not count among the neighbors.
    """
    for width in widths:
        recalls = {}
        for kind, exact_rows in truth.items():
            shares = []
            near_rows = search_fn(kind, width)
            for row, exact, near in zip(own[kind], exact_rows, near_rows, strict=True):
                others = [other for other in exact if other != row][:K]
                shares.append(len({*others} & {*near}) / len(others) if others else 1.0)
            recalls[kind] = float(np.mean(shares)) if shares else 1.0
        if min(recalls.values()) >= wanted:
            break
    return width, recalls


def measured(
    search_fn: Callable[[np.ndarray, int, int], Iterable[Iterable[int]]],
    rows: np.ndarray,
    vectors: np.ndarray,
    *,
    similarity: str,
    wanted: float,
    widths: Sequence[int] = _WIDTHS,
) -> Measured:
    """`tune` on `questions` of the stored `vectors` [n, d] with row numbers `rows` [n].

    `search_fn(queries, k, width)` returns the rows that a search of this width finds.
    """
    k = min(K + 1, len(rows))
    asked = questions(vectors, rows, similarity=similarity)
    truth: dict[str, list[list[int]]] = {}
    best: dict[str, list[float]] = {}
    for kind, (queries, _) in asked.items():
        candidates = nearest.candidates(queries, vectors, k, similarity=similarity)
        truth[kind], best[kind] = [], []
        for query, places in zip(queries, candidates, strict=True):
            values = nearest.similarities(query, vectors[places], similarity=similarity)
            order = nearest.best(values, rows[places], k)
            truth[kind].append(rows[places[order]].tolist())
            best[kind] += values[order[:1]].tolist()

    def search(kind: str, width: int) -> Iterable[Iterable[int]]:
        return search_fn(asked[kind].queries, k, width)

    own = {kind: question.own.tolist() for kind, question in asked.items()}
    return Measured(*tune(search, truth, own, wanted, widths), least(best))


def least(best: Mapping[str, Sequence[float]]) -> float | None:
    """The similarity that nearly all best hits of the queries have, of the strangest kind.

    A query whose best hit is less similar resembles none that was measured, so nobody knows the
    recall of its answer: it is compared with every item. None without queries.
    """
    return min((float(np.quantile(x, _STRANGE)) for x in best.values() if x), default=None)


def is_strange(similarities: Sequence[float] | np.ndarray, least: float | None) -> bool:
    """Whether the best of the hits of a query, best first, is less similar than `least`."""
    return least is not None and len(similarities) > 0 and bool(similarities[0] < least)


def width_for(tuned: int, k: int) -> int:
    """The search width of a search for k rows."""
    return max(tuned, k + k // 2)
