"""The SQLite file of an index in a folder: tables, connections, and errors in one line."""

import contextlib
import json
import pathlib
import re
import sqlite3
import urllib.parse
from collections.abc import Iterator
from sqlite3 import Connection
from typing import Any

from dmljax.index import base
from dmljax.index.filters import Dialect
from dmljax.index.inputs import Damaged, Settings, Unavailable

# `file` numbers the file of vectors, which has `rows` of them. `deleted` tells readers which rows
# no longer exist.
_TABLES = """
create table settings (
    only integer primary key check (only = 1), model text not null, dimension integer not null,
    similarity text not null, version integer not null, items integer not null,
    file integer not null, rows integer not null
);
create table items (
    row integer primary key, id text not null unique, metadata text not null,
    text_sum integer not null, vector_sum integer not null, folder text, stamp text
);
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


def connect(path: pathlib.Path, *, write: bool) -> Connection:
    """Opens a connection in autocommit mode that any thread may use, one at a time."""
    if write:
        connection = _open(path, "rw")
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
    with (
        one_line_errors(file),
        contextlib.closing(_open(file, "rwc")) as connection,
        transaction(connection, write=True),
    ):
        for statement in _TABLES.split(";"):
            connection.execute(statement)
        connection.execute("insert into settings values (1, ?, ?, ?, 0, 0, 0, 0)", settings)


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
    """Turns errors of SQLite and of the disk into `Unavailable` or `Damaged`.

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
    except OSError as error:
        if error.errno is None:
            raise
        problem = f"cannot be read or written: {error.strerror}. The call changed nothing"
        raise Unavailable(f"{error.filename or path.parent} {problem}") from error


def _code(error: sqlite3.Error) -> int:
    """Returns the primary code of an error; text that is not UTF-8 is an error without a code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 255
