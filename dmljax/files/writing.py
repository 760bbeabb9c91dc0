"""Files that are written completely or not at all, their hashes, and locks."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import types
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """Yields a file that appears under `path` when the block ends without an error.

    The content goes to a temporary file in the same folder, is flushed to the disk and then renamed
    to `path`; the rename is flushed, too. After an error, a kill or a loss of power in the block,
    `path` is what it was before.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: {path.parent} is not a folder; make it first"
        )
    try:
        with temporary.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.filename = error.filename or str(path)  # an error of `write` has none
        raise


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a new folder, which is renamed to `path` when the block ends without an error."""
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        make_folder(temporary)
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            sync(file)
        os.rename(temporary, path)
        sync(path.parent)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_array(path: str | os.PathLike, array: np.ndarray) -> None:
    """Writes an array to `path` as `.npy`, completely or not at all."""
    with atomic_writer(path, "wb") as file:
        # NumPy writes into a file by `tofile`, whose error does not say that the disk is full.
        np.save(types.SimpleNamespace(write=file.write), array)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes `text` to `path`, completely or not at all."""
    with atomic_writer(path) as file:
        file.write(text)


def write_json(path: str | os.PathLike, content: Any, *, indent: int | None = None) -> None:
    """Writes `content` as JSON to `path`, completely or not at all."""
    write_text(path, json.dumps(content, indent=indent) + "\n")


def finite(value: Any) -> Any:
    """Returns plain data with None in place of NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(path: str | os.PathLike) -> None:
    """Makes a folder and its parents, unless they exist, and flushes their names to the disk."""
    path = pathlib.Path(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def sync(path: str | os.PathLike) -> None:
    """Flushes a file, or the names in a folder, to the disk.

    Folders that may not be read, or whose file system cannot flush folders, are left as they are.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL) or not os.path.isdir(path):
            raise


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of names, types, shapes and values, whatever file holds them."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        total.update(np.asarray(tensors[name], order="C").tobytes())
    return total.hexdigest()


def json_digest(content: Any) -> str:
    """Returns the SHA-256 of a JSON value, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256(path: str | os.PathLike, algorithm: str = "sha256") -> str:
    """Returns the SHA-256 of a file, or another hash, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def digest_once(path: str | os.PathLike, algorithm: str = "sha256") -> str:
    """Returns the hash of a large file, computed once per process unless the file changes."""
    file = os.stat(path)
    state = (file.st_size, file.st_mtime_ns, file.st_ino)
    return _hash_of_state(os.path.realpath(path), algorithm, *state)


@functools.lru_cache(maxsize=64)
def _hash_of_state(path: str, algorithm: str, *state: int) -> str:
    return sha256(path, algorithm)


class Taken(Exception):
    """Another process holds the lock. The message names the owner if it is known."""


def lock(path: pathlib.Path, *, shared: bool = False, wait: bool = False) -> IO[str]:
    """Locks the file `path`, and returns it open: closing the file releases the lock.

    An exclusive lock writes the process and the host into the file, and `Taken` names them.
    `shared` locks only exclude exclusive locks. With `wait`, the call waits until the lock is free.
    A child process that inherits the file also holds the lock.
    """
    # The file may be read-only; NFS gives shared locks only on files that can be read.
    file = path.open("r" if shared and path.exists() else "a+")
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
        if not shared:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise Taken(owner) from None
    except BaseException:
        file.close()
        raise
    return file
