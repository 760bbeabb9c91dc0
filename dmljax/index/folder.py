"""The folder of an embedded index: which generation counts, and who writes.

photos.index/
    index.json           {"format": 1, "generation": "generation-1"}, replaced at once
    writer.lock          locked by the process that writes; says which
    generation-1/        items.db, what is derived from it, and the note of `sources`
    generation-2/        an index of another model, while `reindex` fills it
"""

import contextlib
import errno
import glob
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import IO

from dmljax.files import locks, reading
from dmljax.files import writing as files
from dmljax.index import inputs
from dmljax.index.errors import Damaged, InvalidInput, Locked, Unavailable

_POINTER = "index.json"
_FORMAT = 1


def name_of(generation: int) -> str:
    """The folder of a generation."""
    return f"generation-{generation}"


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[IO[str]]:
    """Keeps other writers out for as long as the file is open. An error in the block closes it."""
    try:
        lock = locks.lock(folder / "writer.lock")
    except locks.Taken as owner:
        raise Locked(
            f"{folder} is being written by {owner}: wait for it, or end it; reading is possible"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Unavailable(
                f"{folder}: the disk is full. The call changed nothing; free space and repeat it"
            ) from error
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise Unavailable(
            f"{folder} may only be read here ({error.strerror}): change the permissions, or copy it"
        ) from error
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


def create(path: pathlib.Path) -> tuple[pathlib.Path, IO[str]]:
    """A locked folder beside `path`, which a rename makes the index; `path` must not exist."""
    if path.is_symlink() or path.exists():
        is_index = (path / _POINTER).exists()
        problem = "is an index: open it, or" if is_index else f"has no {_POINTER}:"
        raise InvalidInput(f"{path} exists already and {problem} choose another name")
    files.make_folder(path.parent)
    for other in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if not _alive(other.name.split(".")[-2]):
            shutil.rmtree(other, ignore_errors=True)
    temporary = temporary_of(path)
    temporary.mkdir()
    try:
        with locked(temporary) as lock:
            return temporary, lock
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def temporary_of(path: pathlib.Path) -> pathlib.Path:
    """The folder beside an index, of this process, that a rename makes the index, or deletes.

    If the process is killed, the next `create` deletes it.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _alive(number: str) -> bool:
    """Whether the process of this number, which fills a folder, still runs."""
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True


def current(folder: pathlib.Path) -> int:
    """The number of the generation that counts."""
    path = folder / _POINTER
    try:
        pointer = reading.json_value(path.read_bytes())
        version, name = pointer["format"], pointer["generation"]
        match = re.fullmatch(r"generation-(\d{1,9})", name)
    except (FileNotFoundError, NotADirectoryError):
        problem = "does not exist" if not folder.exists() else f"has no {_POINTER}"
        raise FileNotFoundError(f"{folder} {problem}: it is no index of dmljax") from None
    except (ValueError, KeyError, TypeError):
        version, match = _FORMAT, None
    inputs.check_format(version, _FORMAT, folder)
    if match is None:
        raise Damaged(
            f"{path} was damaged: it names the folder that counts, such as "
            '{"format": 1, "generation": "generation-1"}'
        )
    return int(match[1])


def signature(folder: pathlib.Path, file: str = _POINTER) -> tuple[int, ...] | None:
    """What changes when a file is replaced (by default: the index); None if it does not exist."""
    try:
        status = (folder / file).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def size(folder: pathlib.Path) -> int:
    """The bytes of the files of a folder, in which a writer may replace some meanwhile."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def point(folder: pathlib.Path, generation: int) -> None:
    """Makes a generation the one that counts."""
    files.write_json(folder / _POINTER, {"format": _FORMAT, "generation": name_of(generation)})
    files.sync(folder)


def tidy(folder: pathlib.Path) -> int:
    """Deletes earlier generations and what killed writers left; the number of the current one."""
    generation = current(folder)
    for path in folder.glob("*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in folder.glob("generation-*"):
        match = re.fullmatch(r"generation-(\d+)", path.name)
        if match and int(match[1]) < generation:
            shutil.rmtree(path, ignore_errors=True)
    return generation
