"""The rows that a search of an embedded index reads: the matrix, later rows, deletions."""

from collections.abc import Iterable
from typing import TypeVar

import numpy as np

from dmljax.index import nearest, tuning
from dmljax.index.codes import Codes
from dmljax.index.graph import Graph
from dmljax.index.matrix import Matrix
from dmljax.index.rows import Rows

T = TypeVar("T")


class Answers(list[T]):
    """What a search returns for each query. `exact`: every item was compared with every query."""

    def __init__(self, answers: Iterable[T] = (), *, exact: bool = True):
        super().__init__(answers)
        self.exact = exact


class View:
    """The vectors of an index as they were at change `version`."""

    def __init__(self, matrix: Matrix | None, *, dimension: int, similarity: str):
        self._similarity = similarity
        empty = np.zeros(0, np.int64), np.zeros((0, dimension), np.float32)
        self.version = self.matrix_version = -1 if matrix is None else matrix.version
        self.last_row = 0 if matrix is None else matrix.last_row
        self.main = Rows(*(empty if matrix is None else (matrix.rows, matrix.vectors)))
        self.tail = Rows(*empty)
        self.graph: Graph | Codes | None = None

    def append(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Adds rows after the last one."""
        self.tail.append(rows, vectors)
        self.last_row = int(rows[-1])

    def delete(self, rows: np.ndarray, *, version: int) -> None:
        """Marks rows that are deleted at a new version."""
        if len(rows):
            self.main.delete(rows)
            self.tail.delete(rows)
            if self.graph is not None:
                self.graph.delete(rows)
        self.version = version

    @property
    def behind(self) -> int:
        """How many rows the matrix lacks or has too many."""
        return len(self.tail.rows) + self.main.deleted

    def vectors_of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Vectors [n, d] of the `rows`, and whether each row exists [n]."""
        vectors = np.zeros((len(rows), self.main.vectors.shape[1]), np.float32)
        exists = np.zeros(len(rows), bool)
        for block in (self.main, self.tail):
            positions, present = block.find(rows)
            present[present] = block.alive[positions[present]]
            vectors[present] = block.vectors[positions[present]]
            exists |= present
        return vectors, exists

    def exact(
        self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None, after: int = 0
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and similarities of the best k of each query, among `allowed` rows after `after`."""
        rows = [np.zeros(0, np.int64) for _ in queries]
        vectors = [np.zeros((0, queries.shape[1]), np.float32) for _ in queries]
        for block in (self.main, self.tail):
            first = int(np.searchsorted(block.rows, after, side="right")) if after else 0
            if first == len(block.rows):
                continue
            where = block.mask(allowed)
            where = None if where is None else where[first:]
            chosen = nearest.candidates(
                queries, block.vectors[first:], k, similarity=self._similarity, where=where
            )
            for i, positions in enumerate(chosen):
                rows[i] = np.concatenate([rows[i], block.rows[first + positions]])
                vectors[i] = np.concatenate([vectors[i], block.vectors[first + positions]])
        return [self._rank(q, r, v, k) for q, r, v in zip(queries, rows, vectors, strict=True)]

    def approximate(
        self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None
    ) -> Answers[tuple[np.ndarray, np.ndarray]]:
        """`exact`, with candidates of the graph, or of the codes, instead of the rows they hold.

        Queries for which they leave fewer than k rows that match are compared with every item, and
        so are strange ones, for which the recall is not known: see `tuning.least`.
        """
        graph = self.graph
        near = None if graph is None else graph.search(queries, k, allowed=allowed)
        if graph is None or near is None:
            return Answers(self.exact(queries, k, allowed=allowed))
        tails = self.exact(queries, k, allowed=allowed, after=graph.last_row)
        least = min(k, graph.size if allowed is None else len(allowed))
        results: list[tuple[np.ndarray, np.ndarray]] = []
        uncertain = []
        for i, (rows, (tail_rows, _)) in enumerate(zip(near, tails, strict=True)):
            candidates = np.concatenate([rows, tail_rows])
            vectors, exists = self.vectors_of(candidates)
            results.append(self._rank(queries[i], candidates[exists], vectors[exists], k))
            if exists.sum() < least or tuning.is_strange(results[i][1], graph.least):
                uncertain.append(i)
        if uncertain:
            exact = self.exact(queries[uncertain], k, allowed=allowed)
            for i, answer in zip(uncertain, exact, strict=True):
                results[i] = answer
        return Answers(results, exact=len(uncertain) == len(queries))

    def _rank(
        self, query: np.ndarray, rows: np.ndarray, vectors: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best k of candidates: their rows and similarities."""
        values = nearest.similarities(query, vectors, similarity=self._similarity)
        order = nearest.best(values, rows, k)
        return rows[order], values[order]
