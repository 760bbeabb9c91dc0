"""The rows that a search of an embedded index reads: the matrix, later rows, deletions."""

from __future__ import annotations

import numpy as np

from dmljax.index import nearest, tuning
from dmljax.index.graph import Graph
from dmljax.index.matrix import Matrix

__all__ = ["Rows", "View"]

_SELECTIVE = 0.05  # filters that leave a smaller share of the rows are searched exactly
_MOST_CANDIDATES = 4096


class Rows:
    """Vectors with ascending row numbers. Rows can be appended, and marked as deleted."""

    def __init__(self, rows: np.ndarray, vectors: np.ndarray):
        self._rows, self._vectors = rows, vectors
        self._alive = np.ones(len(rows), bool)
        self._count = len(rows)
        self.deleted = 0

    @property
    def rows(self) -> np.ndarray:
        return self._rows[: self._count]

    @property
    def vectors(self) -> np.ndarray:
        return self._vectors[: self._count]

    @property
    def alive(self) -> np.ndarray:
        return self._alive[: self._count]

    def append(self, rows: np.ndarray, vectors: np.ndarray) -> None:
        """Adds rows after the last one; the arrays grow by doubling."""
        needed = self._count + len(rows)
        if needed > len(self._rows):
            size = max(needed, 2 * self._count, 64)
            for name in ("_rows", "_vectors", "_alive"):
                old = getattr(self, name)
                new = np.zeros((size, *old.shape[1:]), old.dtype)
                new[: self._count] = old[: self._count]
                setattr(self, name, new)
        self._rows[self._count : needed] = rows
        self._vectors[self._count : needed] = vectors
        self._alive[self._count : needed] = True
        self._count = needed

    def delete(self, rows: np.ndarray) -> None:
        """Marks the `rows` that are in this block as deleted."""
        positions, exists = self.find(rows)
        self._alive[positions[exists]] = False
        self.deleted = self._count - int(self.alive.sum())

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of row numbers, and whether they are here."""
        positions = np.searchsorted(self.rows, rows)
        exists = positions < self._count
        exists[exists] = self.rows[positions[exists]] == np.asarray(rows)[exists]
        return positions, exists

    def mask(self, allowed: np.ndarray | None) -> np.ndarray | None:
        """The rows that count [n]: alive, and among the `allowed` row numbers. None means all."""
        if allowed is None:
            return self.alive if self.deleted else None
        mask = np.zeros(self._count, bool)
        positions, exists = self.find(allowed)
        mask[positions[exists]] = True
        return mask & self.alive if self.deleted else mask


class View:
    """The vectors of an index as they were at change `version`."""

    def __init__(self, matrix: Matrix | None, *, dimension: int, similarity: str):
        self._similarity = similarity
        empty = np.zeros(0, np.int64), np.zeros((0, dimension), np.float32)
        self.version = self.matrix_version = -1 if matrix is None else matrix.version
        self.last_row = 0 if matrix is None else matrix.last_row
        self.main = Rows(*(empty if matrix is None else (matrix.rows, matrix.vectors)))
        self.tail = Rows(*empty)
        self.graph: Graph | None = None

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
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """`exact`, with the graph's candidates instead of the rows that it holds.

        Where the graph leaves fewer than k rows that match, the search is exact.
        """
        graph = self.graph
        if graph is None:
            return self.exact(queries, k, allowed=allowed)
        size, wanted = max(len(graph.nodes), 1), k + tuning.MORE
        if allowed is not None:
            share = len(allowed) / size
            wanted = tuning.MORE + int(1.5 * k / max(share, 1e-9))
            if share < _SELECTIVE or wanted > _MOST_CANDIDATES:
                return self.exact(queries, k, allowed=allowed)
        tails = self.exact(queries, k, allowed=allowed, after=graph.last_row)
        results = []
        for query, near, (rows, _) in zip(
            queries, graph.search(queries, wanted), tails, strict=True
        ):
            if allowed is not None:
                positions = np.searchsorted(allowed, near)
                positions[positions == len(allowed)] = 0
                near = near[allowed[positions] == near] if len(allowed) else near[:0]
            near = np.concatenate([near, rows])
            vectors, exists = self.vectors_of(near)
            if exists.sum() < min(k, size if allowed is None else len(allowed)):
                results += self.exact(query[None], k, allowed=allowed)
            else:
                results.append(self._rank(query, near[exists], vectors[exists], k))
        return results

    def _rank(
        self, query: np.ndarray, rows: np.ndarray, vectors: np.ndarray, k: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best k of candidates: their rows and similarities."""
        values = nearest.similarities(query, vectors, similarity=self._similarity)
        order = nearest.best(values, rows, k)
        return rows[order], values[order]
