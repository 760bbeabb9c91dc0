"""Rows of vectors, or of codes of vectors, that can be appended and marked as deleted."""

import numpy as np


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
