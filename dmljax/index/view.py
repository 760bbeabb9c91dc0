"""The vectors that a search of an index in a folder reads: the matrix and the rows after it."""

from collections.abc import Sequence

import numpy as np

from dmljax.index import nearest
from dmljax.index.matrix import Matrix
from dmljax.index.nearest import Similarity


class _Block:
    """Vectors with ascending row numbers, some of them deleted."""

    def __init__(self, rows: np.ndarray, vectors: np.ndarray):
        self.rows, self.vectors = rows, vectors
        self.alive = np.ones(len(rows), bool)

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions of row numbers, and which of them exist."""
        positions = np.searchsorted(self.rows, rows)
        exists = positions < len(self.rows)
        exists[exists] = self.rows[positions[exists]] == rows[exists]
        return positions, exists

    def mask(self, allowed: np.ndarray | None) -> np.ndarray | None:
        """Returns the rows that count [n]: alive, and among the `allowed`. None means all."""
        if allowed is None:
            return None if self.alive.all() else self.alive
        mask = np.zeros(len(self.rows), bool)
        positions, exists = self.find(allowed)
        mask[positions[exists]] = True
        return mask & self.alive


class View:
    """The vectors of an index as they were at change `version`."""

    def __init__(self, matrix: Matrix | None, *, dimension: int, similarity: Similarity):
        self._similarity = similarity
        empty = np.zeros(0, np.int64), np.zeros((0, dimension), np.float32)
        self.version = self.matrix_version = -1 if matrix is None else matrix.version
        self.last_row = 0 if matrix is None else matrix.last_row
        self._main = _Block(*(empty if matrix is None else (matrix.rows, matrix.vectors)))
        self._tail = _Block(*empty)

    def update(
        self,
        batches: Sequence[tuple[np.ndarray, np.ndarray]],
        deleted: np.ndarray,
        *,
        version: int,
    ) -> None:
        """Adds batches of rows and vectors after the last one, and leaves out `deleted` rows."""
        if batches:
            tail, rows = self._tail, [rows for rows, _ in batches]
            vectors = np.concatenate([tail.vectors, *(vectors for _, vectors in batches)])
            self._tail = _Block(np.concatenate([tail.rows, *rows]), vectors)
            self._tail.alive[: len(tail.rows)] = tail.alive
            self.last_row = int(rows[-1][-1])
        for block in (self._main, self._tail):
            positions, exists = block.find(deleted)
            block.alive[positions[exists]] = False
        self.version = version

    @property
    def behind(self) -> int:
        """The number of rows that the matrix lacks or has too many."""
        return len(self._tail.rows) + int((~self._main.alive).sum())

    def vectors_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors [n, d] of `rows` that exist."""
        vectors = np.zeros((len(rows), self._main.vectors.shape[1]), np.float32)
        for block in (self._main, self._tail):
            positions, exists = block.find(rows)
            vectors[exists] = block.vectors[positions[exists]]
        return vectors

    def search(
        self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns rows and similarities of the best k of each query, among `allowed` rows."""
        chosen: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in queries]
        for block in (self._main, self._tail):
            near = nearest.candidates(
                queries, block.vectors, k, self._similarity, where=block.mask(allowed)
            )
            for i, positions in enumerate(near):
                chosen[i].append((block.rows[positions], block.vectors[positions]))
        results = []
        for query, parts in zip(queries, chosen, strict=True):
            rows = np.concatenate([rows for rows, _ in parts])
            vectors = np.concatenate([vectors for _, vectors in parts])
            results.append(nearest.best(query, rows, vectors, k, self._similarity))
        return results
