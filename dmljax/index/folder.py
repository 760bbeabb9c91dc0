"""The folder of an index: which generation is current, and who writes.

photos.index/
    index.json           {"format": 2, "generation": "generation-1"}, replaced at once
    writer.lock          locked by the process that writes; names it
    generation-1/        items.db and vectors-N.bin
    generation-2/        an index of another model, while `reindex` fills it
"""

import contextlib
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import IO

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index import inputs
from dmljax.index.inputs import Damaged, InvalidInput, Locked, Unavailable

_POINTER = "index.json"
_FORMAT = 2
_OWN = re.compile(r"writer\.lock|generation-.*|.*\.tmp")  # in a folder without a pointer


def name_of(generation: int) -> str:
    """Returns the name of the folder of a generation."""
    return f"generation-{generation}"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[IO[str]]:
    """Excludes other writers for as long as the file is open. An error in the block closes it."""
    try:
        lock = files.lock(folder / "writer.lock")
    except files.Taken as owner:
        raise Locked(
            f"{folder} is being written by {owner}: wait for it, or end it; reading is possible"
        ) from None
    except OSError as error:
        problem = f"cannot be written: {error.strerror}. The call changed nothing"
        raise Unavailable(f"{folder} {problem}") from error
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


@contextlib.contextmanager
def created(path: pathlib.Path) -> Iterator[IO[str]]:
    """Locks the folder of a new index, which gets its pointer last; an error deletes it.

    A folder that a killed `created` or `discard` left is used again.
    """
    if path.is_symlink() or path.exists():
        is_index = path.is_symlink() or not path.is_dir() or (path / _POINTER).exists()
        if is_index or not all(_OWN.fullmatch(entry.name) for entry in path.iterdir()):
            raise InvalidInput(f"{path} exists already: open it, or choose another name")
    files.make_folder(path)
    with locked(path) as lock:
        for leftover in path.glob("generation-*"):
            shutil.rmtree(leftover)
        try:
            yield lock
        except BaseException:
            discard(path)
            raise


def discard(path: pathlib.Path) -> None:
    """Deletes an index, or what a failed creation left of it."""
    (path / _POINTER).unlink(missing_ok=True)
    files.sync(path)
    shutil.rmtree(path, ignore_errors=True)


def current(folder: pathlib.Path) -> int:
    """Returns the number of the current generation."""
    path = folder / _POINTER
    try:
        pointer = reading.json_value(path.read_bytes())
        version, name = pointer["format"], pointer["generation"]
        match = re.fullmatch(r"generation-(\d{1,9})", name)
    except (FileNotFoundError, NotADirectoryError):
        problem = "does not exist" if not folder.exists() else f"has no {_POINTER}"
        raise FileNotFoundError(f"{folder} {problem}: it is not an index of dmljax") from None
    except (ValueError, KeyError, TypeError):
        version, match = _FORMAT, None
    inputs.check_format(version, _FORMAT, folder)
    if match is None:
        raise Damaged(
            f"{path} was damaged: it names the current folder, such as "
            f'{{"format": {_FORMAT}, "generation": "generation-1"}}'
        )
    return int(match[1])


def size(folder: pathlib.Path) -> int:
    """Returns the bytes of the files of a folder, in which a writer may replace some meanwhile."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def point(folder: pathlib.Path, generation: int) -> None:
    """Makes a generation the current one."""
    files.write_json(folder / _POINTER, {"format": _FORMAT, "generation": name_of(generation)})
    files.sync(folder)


def tidy(folder: pathlib.Path) -> int:
    """Deletes earlier generations and leftovers of killed writers; returns the current one."""
    generation = current(folder)
    for path in (*folder.glob("*.tmp"), *folder.glob("generation-*/*.tmp")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in folder.glob("generation-*"):
        match = re.fullmatch(r"generation-(\d+)", path.name)
        if match and int(match[1]) < generation:
            shutil.rmtree(path, ignore_errors=True)
    return generation
