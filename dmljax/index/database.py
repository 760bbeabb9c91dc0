"""The SQLite file of an embedded index: connections, tables, and errors in one line."""

import contextlib
import json
import pathlib
import secrets
import sqlite3
import time
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from sqlite3 import Connection
from typing import Any, NamedTuple

import numpy as np

from dmljax.index import inputs, nearest
from dmljax.index.errors import Damaged, Unavailable
from dmljax.index.filters import Condition, kind
from dmljax.index.inputs import Settings

IN = "(select value from json_each(?))"  # after `in`: any number of values, as one `parameter`
_FORMAT = 1
# A row number is never used twice, and the vector of a row never changes: replacing an item gives
# it a new row. `deleted` tells derived files and open readers which rows no longer exist.
_TABLES = """
create table settings (
    only integer primary key check (only = 1), format integer not null, model text not null,
    dimension integer not null, similarity text not null, identity text not null,
    version integer not null, purged integer not null, items integer not null
);
create table items (
    row integer primary key autoincrement, id text not null unique, metadata text not null,
    checksum integer not null
);
create table vectors (row integer primary key, vector blob not null);
create table deleted (row integer primary key, version integer not null);
create index deleted_version on deleted (version);
create table fields (name text primary key) without rowid;
"""
# Whether a field of metadata has one of some values, by the kind of the values.
_TESTS = {
    "null": "coalesce(json_type(metadata, ?), 'null') = 'null'",
    "bool": "json_type(metadata, ?) {}",
    "text": "json_type(metadata, ?) = 'text' and json_extract(metadata, ?) {}",
    "number": "json_type(metadata, ?) in ('integer', 'real') and json_extract(metadata, ?) {}",
}
_BUSY_SECONDS = 10
_CHECK_SECONDS = 10  # of the check that follows an error
_OPCODES = 10_000  # instructions of SQLite between two looks at the clock: less than 1 ms


class Row(NamedTuple):
    """The one row of the table of settings."""

    format: int
    model: str
    dimension: int
    similarity: str
    identity: str
    version: int  # changes so far
    purged: int  # deletions up to this version are no longer listed
    items: int


def connect(path: pathlib.Path, *, write: bool, create: bool = False) -> Connection:
    """A connection in autocommit mode that any thread may use, one at a time."""
    address = f"file:{urllib.parse.quote(str(path.absolute()))}"
    if write:
        connection = _open(address + ("?mode=rwc" if create else "?mode=rw"))
        try:
            mode = connection.execute("pragma journal_mode=wal").fetchone()[0]
            if mode != "wal":
                raise Unavailable(f"{path}: this file system does not allow SQLite's WAL ({mode})")
            connection.execute("pragma synchronous=full")
        except BaseException:
            connection.close()
            raise
        return connection
    connection = _open(address + "?mode=ro")
    try:
        connection.execute("select * from settings").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        wal = path.with_name(path.name + "-wal")
        # In a folder that may not be written, SQLite cannot make the -shm file of a reader.
        unwritable = getattr(error, "sqlite_errorcode", 0) & 255 in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
        )
        if not unwritable or not path.exists():
            raise
        if wal.exists() and wal.stat().st_size:
            raise Unavailable(
                f"{path}: the last changes are in {wal.name}, and reading them needs a file beside "
                "it, but the folder may not be written. Open the index once where it may be "
                "(dmljax index check), then copy or mount it again"
            ) from None
        connection = _open(address + "?mode=ro&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _open(address: str) -> Connection:
    connection = sqlite3.connect(
        address, uri=True, isolation_level=None, check_same_thread=False, timeout=_BUSY_SECONDS
    )
    connection.execute("pragma trusted_schema=off")
    connection.execute("pragma cell_size_check=on")
    return connection


def create(file: pathlib.Path, settings: Settings) -> None:
    """Makes an empty database."""
    row = Row(_FORMAT, *settings, secrets.token_hex(16), 0, 0, 0)
    with (
        one_line_errors(file),
        contextlib.closing(connect(file, write=True, create=True)) as connection,
        transaction(connection, write=True),
    ):
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute("insert into settings values (1, ?, ?, ?, ?, ?, ?, ?, ?)", row)


@contextlib.contextmanager
def transaction(connection: Connection, *, write: bool = False) -> Iterator[Connection]:
    """One transaction: committed at the end of the block, rolled back after an error."""
    connection.execute("begin immediate" if write else "begin")
    try:
        yield connection
        connection.execute("commit")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("rollback")
        raise


@contextlib.contextmanager
def stop_when(connection: Connection, stop_fn: Callable[[], bool] | None) -> Iterator[None]:
    """Within the block, a statement is interrupted soon after `stop_fn()` is true."""
    if stop_fn is None:
        yield
        return
    connection.set_progress_handler(stop_fn, _OPCODES)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def read_settings(connection: Connection, path: pathlib.Path) -> Row:
    """The row of settings; refuses a format that this version does not read."""
    row = connection.execute("select * from settings").fetchone()
    if row is None or len(row) < 2:
        raise Damaged(f"{path} has no settings: restore it from a backup")
    inputs.check_format(row[1], _FORMAT, path)
    settings = Row(*row[1:])
    types = int, str, int, str, str, int, int, int
    if not all(isinstance(x, kind) for x, kind in zip(settings, types, strict=True)):
        raise Inconsistent("its settings are of other types")
    if settings.similarity not in nearest.SIMILARITIES or settings.dimension < 1:
        raise Inconsistent(f"it says {settings.similarity!r} and {settings.dimension} dimensions")
    return settings


class Inconsistent(sqlite3.DatabaseError):
    """What was read is not what was written: a check of this package says so."""


class ItemChanged(Inconsistent):
    """One item is not what was added; others may well be."""


@contextlib.contextmanager
def one_line_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of SQLite into `Unavailable` or `Damaged`, with the way out.

    Whoever reads "damaged" puts a backup in the place of the database. So the word is used only
    after a check, since most errors, also some that SQLite calls corruption, are about something
    else: a statement that is too large, a file that a switch has deleted.
    """
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 255
        if code == sqlite3.SQLITE_FULL:
            problem = "the disk is full. The call changed nothing; free space and repeat it"
        elif code == sqlite3.SQLITE_BUSY:
            problem = f"another process has locked it for {_BUSY_SECONDS} seconds; try again"
        elif code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN):
            problem = f"it cannot be opened or written ({error}); check the permissions"
        elif code == sqlite3.SQLITE_INTERRUPT:
            problem = "the call was stopped at its time limit. It changed nothing"
        elif isinstance(error, ItemChanged):
            raise Damaged(f"{path}: {error}") from error
        elif damage := str(error) if isinstance(error, Inconsistent) else damage_of(path):
            raise Damaged(
                f"{path}: the database is damaged ({damage}). Restore the folder from a backup, or "
                "make the index again; what can be read is saved by "
                f"`sqlite3 {path.name} .recover`"
            ) from error
        else:
            problem = f"{error}. The call changed nothing"
        raise Unavailable(f"{path}: {problem}") from error


def damage_of(path: pathlib.Path) -> str | None:
    """What is wrong with a database; None if nothing is, or if it took too long to read it all."""
    end = time.monotonic() + _CHECK_SECONDS
    try:
        with contextlib.closing(connect(path, write=False)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > end, _OPCODES)
            connection.execute("begin")
            (result,) = connection.execute("pragma quick_check(1)").fetchone()
            if result != "ok":
                return " ".join(result.split())
            read_settings(connection, path)
            for _, *item in stored(connection):
                verify(*item)
    except Damaged:
        return "it has no settings"
    except sqlite3.Error as error:
        # Text that is not UTF-8 is an error without a code.
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 255
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
            return str(error)
    except (OSError, ValueError):
        pass
    return None


def stored(
    connection: Connection, condition: str = "true", parameters: Sequence[Any] = (), limit: int = -1
) -> sqlite3.Cursor:
    """Row, id, metadata, checksum and vector of items by row; a missing vector is None."""
    return connection.execute(
        "select row, id, metadata, checksum, vector from items "
        f"left join vectors using (row) where {condition} order by row limit {limit:d}",
        parameters,
    )


def parameter(values: Sequence[Any]) -> tuple[str]:
    """The parameters of a statement with `IN`."""
    return (json.dumps(values, ensure_ascii=False),)


def checksum(name: Any, metadata: Any, vector: Any) -> int:
    """CRC-32 of all that is stored of an item; -1 if damage changed the type of a value."""
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


def condition_sql(conditions: Iterable[Condition]) -> tuple[str, list[str | int | float]]:
    """The text after `where`, and its parameters: no text of a caller is part of the SQL."""
    terms = ["true"]
    parameters: list[str | int | float] = []
    for field, operator, values in conditions:
        choices = []
        for name, test in _TESTS.items():
            if chosen := [value for value in values if kind(value) == name]:
                marks = ", ".join("?" * len(chosen))
                relation = f"in ({marks})" if operator == "=" else f"{operator} ?"
                choices.append(f"({test.format(relation)})")
                # SQLite compares a name with the stored text, so escaped as it is there.
                path = "$." + json.dumps(field, ensure_ascii=False)
                parameters += [path] * test.count("?")
                if name != "null":
                    parameters += map(json.dumps, chosen) if name == "bool" else chosen
        terms.append(f"({' or '.join(choices)})")
    return " and ".join(terms), parameters


def decode_vectors(blobs: list[bytes], dimension: int) -> np.ndarray:
    """Vectors [n, d] from stored bytes."""
    if not all(isinstance(blob, bytes) and len(blob) == 4 * dimension for blob in blobs):
        raise Inconsistent("a vector has another length")
    return np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), dimension)


def decode_metadata(text: Any) -> dict[str, Any]:
    """The metadata of an item."""
    try:
        metadata = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        metadata = None
    if not isinstance(text, str) or not isinstance(metadata, dict):
        raise Inconsistent("the metadata of an item is no JSON object")
    return metadata
