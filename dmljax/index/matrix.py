"""The vectors of an index in one memory-mapped file, derived from its database.

`matrix.bin` is replaced as a whole. It holds a header (JSON in 4 KiB), the vectors [n, d] in
float32, the row numbers [n] in int64, and the SHA-256 of all of this.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index.errors import Damaged

NAME = "matrix.bin"
_HEADER, _DIGEST = 4096, 32  # bytes
_CHUNK = 1 << 20


class Position(NamedTuple):
    """The state of a database that a matrix holds: rows up to `last_row` at change `version`."""

    identity: str
    version: int
    last_row: int
    count: int


class Matrix(NamedTuple):
    """Rows in ascending order, as the database had them at change `version`."""

    version: int
    last_row: int
    rows: np.ndarray  # [n] int64
    vectors: np.ndarray  # [n, d] float32


def write(
    folder: pathlib.Path,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    position: Position,
    dimension: int,
) -> None:
    """Writes rows and vectors [n, dimension], which come in ascending batches."""
    header = json.dumps({**position._asdict(), "dimension": dimension}).encode()
    with files.atomic_writer(folder / NAME, "wb") as file:
        digest, rows = hashlib.sha256(), [np.zeros(0, np.int64)]

        def append(content: bytes) -> None:
            digest.update(content)
            file.write(content)

        append(header.ljust(_HEADER))
        for numbers, vectors in batches:
            append(vectors.astype("<f4", copy=False).tobytes())
            rows.append(numbers)
        all_rows = np.concatenate(rows)
        if len(all_rows) != position.count:
            raise Damaged(
                f"{folder}: {len(all_rows)} vectors were read, but {position.count} items are "
                "counted: restore the folder from a backup, or make the index again"
            )
        append(bytes(_padding(position.count, dimension)) + all_rows.astype("<i8").tobytes())
        file.write(digest.digest())


def _padding(count: int, dimension: int) -> int:
    """Returns the number of bytes between the vectors and the row numbers."""
    return -4 * count * dimension % 8


def read(folder: pathlib.Path, *, identity: str, dimension: int) -> Matrix | str | None:
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
            found = _parsed(header)
            if (found["identity"], found["dimension"]) != (identity, dimension):
                return f"{path} belongs to another index"
            content = np.asarray(np.memmap(file, np.uint8, mode="r"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read: {error}"
    count, start = found["count"], _HEADER + 4 * found["count"] * dimension
    vectors: np.ndarray = content[_HEADER:start].view("<f4").reshape(count, dimension)
    rows = content[start + _padding(count, dimension) : -_DIGEST].view("<i8")
    return Matrix(found["version"], found["last_row"], rows, vectors)


def position(folder: pathlib.Path) -> tuple[int, int]:
    """Returns the version and the last row of the matrix on the disk; -1 and 0 without one."""
    try:
        with (folder / NAME).open("rb") as file:
            header = _parsed(file.read(_HEADER))
        return int(header["version"]), int(header["last_row"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0


def _parsed(header: bytes) -> dict[str, Any]:
    content = reading.json_value(header)
    if not isinstance(content, dict):
        raise ValueError("its header is not an object")
    return content
