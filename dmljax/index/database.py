"""The SQLite file of an index in a folder: tables, checksums, and errors in one line."""

import contextlib
import json
import pathlib
import re
import secrets
import sqlite3
import urllib.parse
import zlib
from collections.abc import Iterator, Sequence
from sqlite3 import Connection
from typing import Any

import numpy as np

from dmljax.files import reading
from dmljax.index import base, inputs
from dmljax.index.errors import Damaged, Unavailable
from dmljax.index.filters import Dialect
from dmljax.index.inputs import Settings

_FORMAT = 1
# A row number is never used twice, and the vector of a row never changes: replacing an item gives
# it a new row. `deleted` tells the matrix and open readers which rows no longer exist.
_TABLES = """
create table settings (
    only integer primary key check (only = 1), format integer not null, model text not null,
    dimension integer not null, similarity text not null, identity text not null,
    version integer not null, items integer not null
);
create table items (
    row integer primary key autoincrement, id text not null unique, metadata text not null,
    checksum integer not null, folder text, stamp text
);
create table vectors (row integer primary key, vector blob not null);
create table deleted (row integer primary key, version integer not null);
create index deleted_version on deleted (version);
"""
DIALECT = Dialect(
    type="json_type(metadata, ?)",
    each="json_each(metadata)",
    tests={
        "bool": "json_type(metadata, ?) {}",
        "text": "json_type(metadata, ?) = 'text' and json_extract(metadata, ?) {}",
        "number": "json_type(metadata, ?) in ('integer', 'real') and json_extract(metadata, ?) {}",
    },
    ids="in (select value from json_each(?))",
    # SQLite compares the path of a field with the stored text, which is escaped in this way.
    field_fn=lambda field: "$." + json.dumps(field, ensure_ascii=False),
    value_fn=lambda value: json.dumps(value) if isinstance(value, bool) else value,
    list_fn=lambda values: json.dumps(values, ensure_ascii=False),
)
_BUSY_SECONDS = 10
_OPCODES = 10_000  # instructions of SQLite between two calls of `STOP_FN`: less than 1 ms
_PERMISSIONS = "it cannot be opened or written; check the permissions"
_PROBLEMS = {
    sqlite3.SQLITE_FULL: "the disk is full. The call changed nothing; free space and repeat it",
    sqlite3.SQLITE_BUSY: f"another process has locked it for {_BUSY_SECONDS} seconds; try again",
    sqlite3.SQLITE_INTERRUPT: "the call was stopped at its time limit. It changed nothing",
    **dict.fromkeys(
        (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN), _PERMISSIONS
    ),
}


class ItemChanged(Damaged):
    """One item differs from what was added; others may be intact."""


def connect(path: pathlib.Path, *, write: bool, create: bool = False) -> Connection:
    """Opens a connection in autocommit mode that any thread may use, one at a time."""
    if write:
        connection = _open(path, "rwc" if create else "rw")
        mode = connection.execute("pragma journal_mode=wal").fetchone()[0]
        if mode != "wal":
            raise Unavailable(f"{path}: this file system does not allow SQLite's WAL ({mode})")
        connection.execute("pragma synchronous=full")
        return connection
    connection = _open(path, "ro")
    try:
        connection.execute("select * from settings").fetchone()
        return connection
    except sqlite3.Error as error:
        connection.close()
        # In a folder that may not be written, SQLite cannot make the -shm file of a reader.
        if _code(error) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    wal = path.with_name(path.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        raise Unavailable(
            f"{path}: the last changes are in {wal.name}, and reading them needs a new file in the "
            "folder, which may not be written. Open the index once where it may be (dmljax index "
            "check), then copy or mount it again"
        )
    return _open(path, "ro&immutable=1")


def _open(path: pathlib.Path, mode: str) -> Connection:
    address = f"file:{urllib.parse.quote(str(path.absolute()))}?mode={mode}"
    connection = sqlite3.connect(
        address, uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS
    )
    connection.execute("pragma trusted_schema=off")
    connection.execute("pragma cell_size_check=on")
    return connection


def create(file: pathlib.Path, settings: Settings) -> None:
    """Creates an empty database."""
    row = (_FORMAT, *settings, secrets.token_hex(16), 0, 0)
    with (
        one_line_errors(file),
        contextlib.closing(connect(file, write=True, create=True)) as connection,
        transaction(connection, write=True),
    ):
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute("insert into settings values (1, ?, ?, ?, ?, ?, ?, ?)", row)


@contextlib.contextmanager
def transaction(connection: Connection, *, write: bool = False) -> Iterator[Connection]:
    """Commits at the end of the block, and rolls back after an error or at `base.STOP_FN`."""
    connection.execute("begin immediate" if write else "begin")
    connection.set_progress_handler(base.STOP_FN.get(), _OPCODES)
    try:
        yield connection
        connection.execute("commit")
    except BaseException:
        connection.set_progress_handler(None, 0)
        with contextlib.suppress(sqlite3.Error):
            connection.execute("rollback")
        raise
    finally:
        connection.set_progress_handler(None, 0)


def damaged(path: pathlib.Path, problem: Any) -> Damaged:
    """Returns the error for a database that differs from what was written, with the way out."""
    return Damaged(
        f"{path}: the database is damaged ({problem}). Restore the folder from a backup, or make "
        f"the index again; what can be read is saved by `sqlite3 {path.name} .recover`"
    )


@contextlib.contextmanager
def one_line_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of SQLite into `Unavailable` or `Damaged`.

    Whoever reads "damaged" puts a backup in the place of the database. So most errors are another
    one: a statement that is too large, a disk that is full.
    """
    try:
        yield
    except sqlite3.Error as error:
        if _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or re.search(
            "malformed|no such (table|column)", str(error)
        ):
            raise damaged(path, error) from error
        problem = _PROBLEMS.get(_code(error), "The call changed nothing")
        raise Unavailable(f"{path}: {error}: {problem}") from error


def _code(error: sqlite3.Error) -> int:
    """Returns the primary code of an error; text that is not UTF-8 is an error without a code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 255


def stored(
    connection: Connection, condition: str = "true", parameters: Sequence[Any] = ()
) -> sqlite3.Cursor:
    """Selects row, id, metadata, checksum and vector of items by row; a missing vector is None."""
    return connection.execute(
        "select row, id, metadata, checksum, vector from items "
        f"left join vectors using (row) where {condition} order by row",
        parameters,
    )


def checksum(name: Any, metadata: Any, vector: Any) -> int:
    """Returns the CRC-32 of a stored item; -1 if damage changed the type of a value."""
    if not (isinstance(name, str) and isinstance(metadata, str) and isinstance(vector, bytes)):
        return -1
    return zlib.crc32(vector, zlib.crc32(metadata.encode(), zlib.crc32(name.encode())))


def verify(path: pathlib.Path, name: Any, metadata: Any, total: Any, vector: Any) -> None:
    """Raises `ItemChanged` unless the checksum of an item is the stored one."""
    if checksum(name, metadata, vector) != total:
        raise ItemChanged(
            f"{path}: item {inputs.shorten(name)} is not what was added: its checksum differs. Add "
            "it again with replace=True (dmljax index add --replace), or restore the folder from a "
            "backup; `dmljax index check` lists all such items"
        )


def decode_metadata(path: pathlib.Path, text: str) -> dict[str, Any]:
    """Returns the metadata of an item; raises for text that only a forged checksum can fit."""
    try:
        metadata = reading.json_value(text)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise damaged(path, "the metadata of an item is not a JSON object")
    return metadata


def decode_vectors(path: pathlib.Path, blobs: list[bytes], dimension: int) -> np.ndarray:
    """Returns vectors [n, d] from stored bytes."""
    if not all(len(blob) == 4 * dimension for blob in blobs):
        raise damaged(path, "a vector has another length")
    return np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), dimension)
