"""The folder of an embedded index: which generation counts, and who writes.

photos.index/
    index.json           {"format": 1, "generation": "generation-1"}, replaced at once
    writer.lock          locked by the process that writes; says which
    generation-1/        items.db and what is derived from it
    generation-2/        an index of another model, while `reindex` fills it
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from typing import IO

from dmljax.files import locks
from dmljax.files import writing as files
from dmljax.index.errors import Damaged, InvalidInput, Locked

__all__ = ["POINTER", "create", "current", "generations", "lock", "point", "sync", "tidy"]

POINTER = "index.json"
_FORMAT = 1


def lock(folder: pathlib.Path) -> IO[str]:
    """Keeps other writers out for as long as the returned file is open."""
    try:
        return locks.lock(folder / "writer.lock")
    except locks.Taken as owner:
        raise Locked(
            f"{folder} is being written by {owner}: wait for it, or end it; reading is possible"
        ) from None


def create(path: pathlib.Path) -> tuple[pathlib.Path, IO[str]]:
    """A locked folder beside `path`, which a rename makes the index; `path` must not exist."""
    if path.is_symlink() or path.exists():
        problem = "is an index already: open it" if (path / POINTER).exists() else "exists already"
        raise InvalidInput(f"{path} {problem}, or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    for other in path.parent.glob(f".{glob_escape(path.name)}.*.tmp"):
        if not _alive(other.name.split(".")[-2]):
            shutil.rmtree(other, ignore_errors=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    return temporary, lock(temporary)


def _alive(number: str) -> bool:
    """Whether the process of this number, which fills a folder, still runs."""
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def glob_escape(name: str) -> str:
    """A pattern that matches only `name`."""
    return re.sub(r"([*?[])", r"[\1]", name)


def current(folder: pathlib.Path) -> str:
    """The name of the generation that counts."""
    path = folder / POINTER
    try:
        pointer = json.loads(path.read_bytes())
        number, name = pointer["format"], pointer["generation"]
    except (FileNotFoundError, NotADirectoryError):
        problem = "does not exist" if not folder.exists() else f"has no {POINTER}"
        raise FileNotFoundError(f"{folder} {problem}: it is no index of dmljax") from None
    except (ValueError, KeyError, TypeError):
        raise Damaged(
            f"{path} was damaged: it names the folder that counts, such as "
            '{"format": 1, "generation": "generation-1"}'
        ) from None
    if number != _FORMAT:
        raise InvalidInput(
            f"{folder} has format {number}, this version of dmljax reads {_FORMAT}: update dmljax"
        )
    if not isinstance(name, str) or not re.fullmatch(r"generation-\d{1,9}", name):
        raise Damaged(f"{path} was damaged: it names the folder {name!r}")
    return name


def point(folder: pathlib.Path, generation: str) -> None:
    """Makes a generation the one that counts."""
    files.write_json(folder / POINTER, {"format": _FORMAT, "generation": generation})
    sync(folder)


def generations(folder: pathlib.Path) -> list[str]:
    """The names of all generations, the oldest first."""
    return sorted(
        (p.name for p in folder.glob("generation-*") if re.fullmatch(r"generation-\d+", p.name)),
        key=lambda name: int(name.partition("-")[2]),
    )


def tidy(folder: pathlib.Path) -> None:
    """Deletes generations before the one that counts, which a kill may have left."""
    name = current(folder)
    for other in generations(folder):
        if int(other.partition("-")[2]) < int(name.partition("-")[2]):
            shutil.rmtree(folder / other, ignore_errors=True)


def sync(folder: pathlib.Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
