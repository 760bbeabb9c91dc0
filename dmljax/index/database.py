"""The SQLite file of an index in a folder: connections, tables, and errors in one line."""

import contextlib
import json
import pathlib
import re
import secrets
import sqlite3
import urllib.parse
import zlib
from collections.abc import Iterable, Iterator, Sequence
from sqlite3 import Connection
from typing import Any, NamedTuple

import numpy as np

from dmljax.files import reading
from dmljax.index import base, inputs, nearest
from dmljax.index.errors import Damaged, Unavailable
from dmljax.index.filters import Condition, kind
from dmljax.index.inputs import Settings

IN = "(select value from json_each(?))"  # after `in`: any number of values, as one `parameter`
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
# Tests of a metadata field against some values, by the kind of the values.
_TESTS = {
    "null": "coalesce(json_type(metadata, ?), 'null') = 'null'",
    "bool": "json_type(metadata, ?) {}",
    "text": "json_type(metadata, ?) = 'text' and json_extract(metadata, ?) {}",
    "number": "json_type(metadata, ?) in ('integer', 'real') and json_extract(metadata, ?) {}",
}
_BUSY_SECONDS = 10
_OPCODES = 10_000  # instructions of SQLite between two calls of `stop_fn`: less than 1 ms
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PERMISSIONS = "it cannot be opened or written; check the permissions"
_PROBLEMS = {
    sqlite3.SQLITE_FULL: "the disk is full. The call changed nothing; free space and repeat it",
    sqlite3.SQLITE_BUSY: f"another process has locked it for {_BUSY_SECONDS} seconds; try again",
    sqlite3.SQLITE_INTERRUPT: "the call was stopped at its time limit. It changed nothing",
    sqlite3.SQLITE_READONLY: _PERMISSIONS,
    sqlite3.SQLITE_PERM: _PERMISSIONS,
    sqlite3.SQLITE_CANTOPEN: _PERMISSIONS,
}


class Row(NamedTuple):
    """The one row of the table of settings."""

    format: int
    model: str
    dimension: int
    similarity: str
    identity: str
    version: int  # changes so far
    items: int


class Inconsistent(sqlite3.DatabaseError):
    """A check of this package says that what was read differs from what was written."""


class ItemChanged(Inconsistent):
    """One item differs from what was added; others may be intact."""


def connect(path: pathlib.Path, *, write: bool, create: bool = False) -> Connection:
    """Opens a connection in autocommit mode that any thread may use, one at a time."""
    address = f"file:{urllib.parse.quote(str(path.absolute()))}?mode="
    if write:
        connection = _open(address + ("rwc" if create else "rw"))
        try:
            mode = connection.execute("pragma journal_mode=wal").fetchone()[0]
            if mode != "wal":
                raise Unavailable(f"{path}: this file system does not allow SQLite's WAL ({mode})")
            connection.execute("pragma synchronous=full")
        except BaseException:
            connection.close()
            raise
        return connection
    connection = _open(address + "ro")
    try:
        connection.execute("select * from settings").fetchone()
        return connection
    except sqlite3.Error as error:
        connection.close()
        # In a folder that may not be written, SQLite cannot make the -shm file of a reader.
        code = getattr(error, "sqlite_errorcode", 0) & 255
        if code not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY) or not path.exists():
            raise
    wal = path.with_name(path.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        raise Unavailable(
            f"{path}: the last changes are in {wal.name}, and reading them needs a new file in the "
            "folder, which may not be written. Open the index once where it may be (dmljax index "
            "check), then copy or mount it again"
        )
    return _open(address + "ro&immutable=1")


def _open(address: str) -> Connection:
    connection = sqlite3.connect(
        address, uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS
    )
    connection.execute("pragma trusted_schema=off")
    connection.execute("pragma cell_size_check=on")
    return connection


def create(file: pathlib.Path, settings: Settings) -> None:
    """Creates an empty database."""
    row = Row(_FORMAT, *settings, secrets.token_hex(16), 0, 0)
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
    """Commits at the end of the block, and rolls back after an error or at `base.stopped_when`."""
    connection.execute("begin immediate" if write else "begin")
    connection.set_progress_handler(base.stop_fn(), _OPCODES)
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


def read_settings(connection: Connection, path: pathlib.Path) -> Row:
    """Reads the row of settings; refuses a format that this version does not read."""
    row = connection.execute("select * from settings").fetchone()
    if row is None or len(row) < 2:
        raise Damaged(f"{path} lacks its settings: restore it from a backup")
    inputs.check_format(row[1], _FORMAT, path)
    settings = Row(*row[1:])
    types = int, str, int, str, str, int, int
    if (
        not all(isinstance(x, kind) for x, kind in zip(settings, types, strict=True))
        or settings.similarity not in nearest.SIMILARITIES
        or settings.dimension < 1
    ):
        raise Inconsistent("its settings have other types or unknown values")
    return settings


@contextlib.contextmanager
def one_line_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of SQLite into `Unavailable` or `Damaged`, with the way out.

    Whoever reads "damaged" puts a backup in the place of the database. So most errors are another
    one: a statement that is too large, a disk that is full.
    """
    try:
        yield
    except sqlite3.Error as error:
        # Text that is not UTF-8 is an error without a code.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 255
        if isinstance(error, ItemChanged):
            raise Damaged(f"{path}: {error}") from error
        if code in _DAMAGED or re.search("malformed|no such (table|column)", str(error)):
            raise Damaged(
                f"{path}: the database is damaged ({error}). Restore the folder from a backup, or "
                "make the index again; what can be read is saved by "
                f"`sqlite3 {path.name} .recover`"
            ) from error
        problem = _PROBLEMS.get(code, "The call changed nothing")
        raise Unavailable(f"{path}: {error}: {problem}") from error


def stored(
    connection: Connection, condition: str = "true", parameters: Sequence[Any] = ()
) -> sqlite3.Cursor:
    """Selects row, id, metadata, checksum and vector of items by row; a missing vector is None."""
    return connection.execute(
        "select row, id, metadata, checksum, vector from items "
        f"left join vectors using (row) where {condition} order by row",
        parameters,
    )


def parameter(values: Sequence[Any]) -> tuple[str]:
    """Returns the parameters of a statement with `IN`."""
    return (json.dumps(values, ensure_ascii=False),)


def checksum(name: Any, metadata: Any, vector: Any) -> int:
    """Returns the CRC-32 of a stored item; -1 if damage changed the type of a value."""
    if not (isinstance(name, str) and isinstance(metadata, str) and isinstance(vector, bytes)):
        return -1
    return zlib.crc32(vector, zlib.crc32(metadata.encode(), zlib.crc32(name.encode())))


def verify(name: Any, metadata: Any, total: Any, vector: Any) -> None:
    """Raises `ItemChanged` unless the checksum of an item is the stored one."""
    if checksum(name, metadata, vector) != total:
        raise ItemChanged(
            f"item {inputs.shorten(name)} is not what was added: its checksum differs. Add it "
            "again with replace=True (dmljax index add --replace), or restore the folder from a "
            "backup; `dmljax index check` lists all such items"
        )


def decode_metadata(text: str) -> dict[str, Any]:
    """Returns the metadata of an item; raises for text that only a forged checksum can fit."""
    try:
        metadata = reading.json_value(text)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise Inconsistent("the metadata of an item is not a JSON object")
    return metadata


def json_path(field: str) -> str:
    """Returns the path of a field; SQLite compares it with the stored text, escaped in this way."""
    return "$." + json.dumps(field, ensure_ascii=False)


def condition_sql(conditions: Iterable[Condition]) -> tuple[str, list[str | int | float]]:
    """Returns the text after `where`, which contains no values, and its parameters."""
    terms = ["true"]
    parameters: list[str | int | float] = []
    for field, operator, values in conditions:
        choices = []
        for name, test in _TESTS.items():
            if chosen := [value for value in values if kind(value) == name]:
                marks = ", ".join("?" * len(chosen))
                relation = f"in ({marks})" if operator == "=" else f"{operator} ?"
                choices.append(f"({test.format(relation)})")
                parameters += [json_path(field)] * test.count("?")
                if name != "null":
                    parameters += map(json.dumps, chosen) if name == "bool" else chosen
        terms.append(f"({' or '.join(choices)})")
    return " and ".join(terms), parameters


def decode_vectors(blobs: list[bytes], dimension: int) -> np.ndarray:
    """Returns vectors [n, d] from stored bytes."""
    if not all(isinstance(blob, bytes) and len(blob) == 4 * dimension for blob in blobs):
        raise Inconsistent("a vector has another length")
    return np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), dimension)
