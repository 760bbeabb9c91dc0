"""The vectors that a search of an index in a folder reads: a memory-mapped file and later rows.

`matrix.bin` is derived from the database, and replaced as a whole. It holds a header (JSON in 4
KiB), the vectors [n, d] in float32, the row numbers [n] in int64, and the SHA-256 of all of this.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index import nearest
from dmljax.index.errors import Damaged
from dmljax.index.nearest import Similarity

NAME = "matrix.bin"
_HEADER, _DIGEST = 4096, 32  # bytes
_CHUNK = 1 << 20


class Position(NamedTuple):
    """The state of a database that a matrix holds: rows up to `last_row` at change `version`."""

    identity: str
    version: int
    last_row: int
    items: int
    dimension: int


def write(
    folder: pathlib.Path, batches: Iterable[tuple[np.ndarray, np.ndarray]], position: Position
) -> None:
    """Writes rows and vectors [n, dimension], which come in ascending batches."""
    with files.atomic_writer(folder / NAME, "wb") as file:
        digest, rows = hashlib.sha256(), [np.zeros(0, np.int64)]

        def append(content: bytes) -> None:
            digest.update(content)
            file.write(content)

        append(json.dumps(position._asdict()).encode().ljust(_HEADER))
        for numbers, vectors in batches:
            append(vectors.astype("<f4", copy=False).tobytes())
            rows.append(numbers)
        all_rows = np.concatenate(rows)
        if len(all_rows) != position.items:
            raise Damaged(
                f"{folder}: {len(all_rows)} vectors were read, but {position.items} items are "
                "counted: restore the folder from a backup, or make the index again"
            )
        append(bytes(_padding(position)) + all_rows.astype("<i8").tobytes())
        file.write(digest.digest())


def _padding(position: Position) -> int:
    """Returns the number of bytes between the vectors and the row numbers."""
    return -4 * position.items * position.dimension % 8


def read(
    folder: pathlib.Path, *, identity: str, dimension: int
) -> tuple[Position, "Block"] | str | None:
    """Maps the matrix into memory; None if it does not exist; a message if it is damaged."""
    path = folder / NAME
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
            # `mmap` would turn an error of the disk into a crash, so all is read once before.
            digest = hashlib.sha256(header)
            left = os.fstat(file.fileno()).st_size - len(header) - _DIGEST
            while left > 0 and (chunk := file.read(min(left, _CHUNK))):
                digest.update(chunk)
                left -= len(chunk)
            if file.read() != digest.digest():
                return f"{path} was changed: its digest differs"
            position = Position(**reading.json_value(header))
            if (position.identity, position.dimension) != (identity, dimension):
                return f"{path} belongs to another index"
            content = np.asarray(np.memmap(file, np.uint8, mode="r"))
        stop = _HEADER + 4 * position.items * dimension
        vectors = content[_HEADER:stop].view("<f4").reshape(position.items, dimension)
        rows = content[stop + _padding(position) : -_DIGEST].view("<i8")
        return position, Block(rows, vectors)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        return f"{path} cannot be read: {error}"


def position(folder: pathlib.Path) -> tuple[int, int]:
    """Returns the version and the last row of the matrix on the disk; -1 and 0 without one."""
    try:
        with (folder / NAME).open("rb") as file:
            header = Position(**reading.json_value(file.read(_HEADER)))
        return int(header.version), int(header.last_row)
    except (OSError, ValueError, TypeError):
        return -1, 0


class Block:
    """Vectors with ascending row numbers, some of them deleted."""

    def __init__(self, rows: np.ndarray, vectors: np.ndarray):
        self.rows, self.vectors = rows, vectors  # [n] int64, [n, d] float32
        self.alive = np.ones(len(rows), bool)

    def find(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions of the `rows` that exist, and which of them exist."""
        positions = np.searchsorted(self.rows, rows)
        exists = positions < len(self.rows)
        exists[exists] = self.rows[positions[exists]] == rows[exists]
        return positions[exists], exists

    def among(self, allowed: np.ndarray | None) -> nearest.Block:
        """Returns the rows that are alive, and `allowed`; None allows all."""
        where = self.alive
        if allowed is not None:
            where = np.zeros(len(self.rows), bool)
            where[self.find(allowed)[0]] = True
            where &= self.alive
        return nearest.Block(self.rows, self.vectors, where)


class View:
    """The vectors of an index as they were at change `version`, from none or from a matrix."""

    def __init__(self, dimension: int, stored: tuple[Position, Block] | None):
        self._tail = Block(np.zeros(0, np.int64), np.zeros((0, dimension), np.float32))
        self._main, self.version, self.last_row = self._tail, -1, 0
        if stored is not None:
            position, self._main = stored
            self.version, self.last_row = position.version, position.last_row
        self.matrix_version = self.version

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
            self._tail = Block(np.concatenate([tail.rows, *rows]), vectors)
            self._tail.alive[: len(tail.rows)] = tail.alive
            self.last_row = int(rows[-1][-1])
        for block in (self._main, self._tail):
            block.alive[block.find(deleted)[0]] = False
        self.version = version

    @property
    def behind(self) -> int:
        """Counts the rows that the matrix lacks, and the deleted ones that it still has."""
        return len(self._tail.rows) + int((~self._main.alive).sum())

    def vectors_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns the vectors [n, d] of `rows` that exist."""
        vectors = np.zeros((len(rows), self._tail.vectors.shape[1]), np.float32)
        for block in (self._main, self._tail):
            positions, exists = block.find(rows)
            vectors[exists] = block.vectors[positions]
        return vectors

    def search(
        self, queries: np.ndarray, k: int, similarity: Similarity, allowed: np.ndarray | None
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns rows and similarities of the best k of each query, among `allowed` rows."""
        blocks = [block.among(allowed) for block in (self._main, self._tail)]
        return nearest.search(queries, blocks, k, similarity)
