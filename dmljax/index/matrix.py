"""The vectors of an index in one memory-mapped file, derived from its database.

`matrix-VERSION.bin` holds the row numbers [n] in int64 and, from the next multiple of 64 bytes on,
the vectors [n, d] in float32. `matrix.json` names the file with its digest, and is replaced at
once: a reader sees the old file or the new one.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index.errors import Damaged

_FORMAT = 1
_DERIVED = ("matrix", "graph", "codes")


@dataclasses.dataclass(frozen=True)
class Position:
    """What of a database a derived file holds: rows up to `last_row`, as of change `version`."""

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
    *,
    name: str = "matrix",
    dtype: type = np.float32,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes rows and vectors, which come in ascending batches, and then the manifest.

    The vectors are `[n dimension]` of `dtype`: the vectors of the index, or their codes in a file
    of another `name`. `facts` are further fields of the manifest.
    """
    path = folder / f"{name}-{position.version}-{os.getpid()}.bin"
    bytes_per_row = np.dtype(dtype).itemsize * dimension
    start, written = _start_of_vectors(position.count), 0
    with files.atomic_writer(path, "wb") as file:
        for rows, vectors in batches:
            file.seek(8 * written)
            file.write(rows.astype(np.int64).tobytes())
            file.seek(start + bytes_per_row * written)
            file.write(vectors.astype(dtype, copy=False).tobytes())
            written += len(rows)
        if written != position.count:
            raise Damaged(
                f"{folder}: {written} vectors were read, and {position.count} items are counted: "
                "restore the folder from a backup, or make the index again"
            )
        file.truncate(start + bytes_per_row * written)
    write_manifest(folder, name, path, position, {"dimension": dimension, **(facts or {})})


def _start_of_vectors(count: int) -> int:
    return -(-8 * count // 64) * 64


def read(folder: pathlib.Path, *, identity: str, dimension: int) -> Matrix | str | None:
    """The matrix; None if there is none; what is wrong with it, if it is damaged."""
    opened = open_derived(folder, "matrix", identity)
    if opened is None or isinstance(opened, str):
        return opened
    return mapped(*opened, dimension)


def mapped(
    manifest: Mapping[str, Any], file: io.BufferedReader, dimension: int, dtype: type = np.float32
) -> Matrix | str:
    """The arrays of an opened file, mapped into memory; what is wrong with its size."""
    count, start = manifest["count"], _start_of_vectors(manifest["count"])
    size = np.dtype(dtype).itemsize * dimension * count
    with file:
        if manifest["dimension"] != dimension or manifest["bytes"] != start + size:
            return f"{file.name} does not have the size that its manifest says"
        content = (
            np.asarray(np.memmap(file, np.uint8, mode="r")) if count else np.zeros(0, np.uint8)
        )
    rows = content[: 8 * count].view(np.int64)
    vectors: np.ndarray = content[start:].view(dtype).reshape(count, dimension)
    return Matrix(manifest["version"], manifest["last_row"], rows, vectors)


def position_of(folder: pathlib.Path) -> tuple[int, int]:
    """The version and the last row of the matrix on the disk; -1 and 0 without one."""
    try:
        manifest = reading.json_value((folder / "matrix.json").read_bytes())
        return int(manifest["version"]), int(manifest["last_row"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1, 0


def write_manifest(
    folder: pathlib.Path, name: str, path: pathlib.Path, position: Position, facts: dict[str, Any]
) -> None:
    """Makes the new file `path` the current one, and deletes the previous ones."""
    manifest = {"format": _FORMAT, "file": path.name, "bytes": path.stat().st_size}
    manifest |= {"sha256": files.sha256(path)} | dataclasses.asdict(position) | facts
    files.write_json(folder / f"{name}.json", manifest | {"digest": _digest(manifest)}, indent=1)
    for other in folder.glob(f"{name}-*"):
        if other != path:
            other.unlink(missing_ok=True)


def tidy(folder: pathlib.Path) -> None:
    """Deletes files that a killed writer left, and derived files that no manifest names."""
    for path in folder.glob("*.tmp"):
        path.unlink(missing_ok=True)
    for name in _DERIVED:
        current = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            current = reading.json_value((folder / f"{name}.json").read_bytes())["file"]
        for path in folder.glob(f"{name}-*"):
            if path.name != current:
                path.unlink(missing_ok=True)


def open_derived(
    folder: pathlib.Path, name: str, identity: str
) -> tuple[dict[str, Any], io.BufferedReader] | str | None:
    """The manifest and the open file, both verified; what is wrong; or None if there is none."""
    path = folder / f"{name}.json"
    for _ in range(3):  # a writer may replace both files in between
        try:
            manifest = reading.json_value(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return f"{path} cannot be read: {error}"
        if not isinstance(manifest, dict) or manifest.pop("digest", None) != _digest(manifest):
            return f"{path} was changed: its digest differs"
        if manifest.get("format") != _FORMAT or manifest.get("identity") != identity:
            return f"{path} belongs to another index or another version of dmljax"
        try:
            file = (folder / manifest["file"]).open("rb")
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{folder / manifest['file']} cannot be read: {error}"
        if problem := _problem(file, manifest):
            file.close()
            return f"{file.name} {problem}"
        return manifest, file
    return f"{folder / manifest['file']} is missing"


def _problem(file: io.BufferedReader, manifest: dict[str, Any]) -> str | None:
    try:
        size = os.fstat(file.fileno()).st_size
        if size != manifest["bytes"]:
            return f"has {size} bytes, not {manifest['bytes']}"
        if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"]:
            return "was changed: its digest differs"
        file.seek(0)
    except OSError as error:
        return f"cannot be read: {error}"
    return None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
