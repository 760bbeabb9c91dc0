"""A digest of a data set that does not depend on the folder in which it lies."""

import hashlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from dmljax.data.splits import MARKS, Records, Split, Splits, images_of

_SAMPLED = 64  # files whose size, or records whose content, is a part of the digest


def digest(splits: Splits) -> str:
    """Computes the SHA-256 of a data set: labels, names, marks, and the identity of records.

    * Arrays: every pixel.
    * Files: their paths relative to the folder that contains all of them, and the size of 64 files
      of each split. So a data set may move, but a changed file may remain unnoticed: `dmljax
      doctor` reads all files.
    * Records with a method `fingerprint()`: the text that it returns, unless it is None.
    * Other records: the content of 64 of them.
    """
    total = hashlib.sha256()
    splits = Splits(*map(images_of, splits))
    paths = [path for split in splits for path in _paths(split.records)]
    parent = os.path.commonpath(paths) if paths else ""
    for name, split in zip(Splits._fields, splits, strict=True):
        total.update(json.dumps([name, len(split), split.names]).encode())
        for field in ("labels", *MARKS):
            rows = getattr(split, field)
            if rows is not None:
                total.update(field.encode() + np.ascontiguousarray(rows).astype("<i8").tobytes())
        for piece in _identity(split, parent):
            total.update(len(piece).to_bytes(8, "little") + piece)
    return total.hexdigest()


def digest_of_images(split: Split) -> str:
    """Computes the SHA-256 of the images of a split, which changes with any of its files.

    It counts the paths below the common folder, the size and the time of change of every file.
    """
    total = hashlib.sha256(str(len(split)).encode())
    if split.boxes is not None:
        total.update(np.ascontiguousarray(split.boxes).astype("<i8").tobytes())
    if paths := _paths(split.records):
        parent = os.path.commonpath(paths)
        for path in paths:
            total.update(f"{path.removeprefix(parent)} {_size_and_time(path)}\n".encode())
    else:
        for piece in _identity(split, ""):
            total.update(len(piece).to_bytes(8, "little") + piece)
    return total.hexdigest()


def _size_and_time(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _paths(records: Records) -> list[str]:
    """Returns the absolute paths of records that are files, otherwise nothing."""
    if isinstance(records, list | tuple) and records and isinstance(records[0], str | pathlib.Path):
        return [os.path.abspath(path) for path in records]
    return []


def _identity(split: Split, parent: str) -> Iterable[bytes]:
    records = split.records
    if isinstance(records, np.ndarray):
        yield f"{records.dtype} {records.shape}".encode()
        yield np.ascontiguousarray(records).tobytes()
        return
    fingerprint_fn = getattr(records, "fingerprint", lambda: None)
    if (fingerprint := fingerprint_fn()) is not None:
        yield fingerprint.encode()
        return
    count = min(_SAMPLED, len(split))
    sampled = np.unique(np.linspace(0, max(len(split) - 1, 0), count).astype(int))
    if paths := _paths(records):
        yield "\n".join(path.removeprefix(parent) for path in paths).encode()
        yield json.dumps([_size(paths[i]) for i in sampled]).encode()
        return
    for i in sampled:
        yield _content(records[int(i)])


def _size(path: str) -> int | None:
    """Returns the size of a file, or None: the reader reports missing files."""
    return os.path.getsize(path) if os.path.isfile(path) else None


def _content(record: Any) -> bytes:
    if isinstance(record, bytes):
        return record
    if isinstance(record, str | pathlib.Path):
        return f"{os.path.basename(record)} {_size(os.fspath(record))}".encode()
    return np.ascontiguousarray(record).tobytes()
