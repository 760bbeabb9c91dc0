"""Files that are written completely or not at all, and their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any

__all__ = ["atomic_writer", "sha256", "write_json", "write_text"]


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """A file that appears under `path` when the block ends without an error.

    The content goes to a temporary file in the same folder, is flushed to the disk and then renamed
    to `path`. After an error, or a kill, `path` is what it was before.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path`, completely or not at all."""
    with atomic_writer(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike, content: Any, *, indent: int | None = None) -> None:
    """Writes `content` as JSON to `path`, completely or not at all."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


def sha256(path: str | os.PathLike) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
