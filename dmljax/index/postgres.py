"""An index in PostgreSQL with pgvector: the interface of the one in a folder, for several writers.

The address is the one of libpq, with one more parameter: `postgresql://user@host/db?table=photos`
(by default `table=dmljax`). The table of that name names the current generation. The items of
generation 1 are in `photos_1_items`, with columns row, id, metadata (jsonb) and vector.

Searches are exact, unless the database has an HNSW or IVFFlat index of the vectors: it belongs to
the database, and then its planner decides.

After an error of the connection, the next call connects again. A call that failed can be repeated,
with `replace=True` if it may have happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

try:
    import psycopg
    from pgvector import Vector
    from pgvector.psycopg import register_vector
    from psycopg import Connection, Cursor, errors, sql
    from psycopg.types.json import Jsonb
except ImportError as error:
    raise ImportError(
        f"PostgreSQL needs psycopg and pgvector ({error}): pip install 'dmljax[postgres]'"
    ) from None

from dmljax.index import inputs, nearest
from dmljax.index.base import Hit, Index, Item, State
from dmljax.index.errors import Damaged, InvalidInput, Locked, Superseded, Unavailable
from dmljax.index.filters import Condition, kind
from dmljax.index.inputs import Settings

R = TypeVar("R")

_FORMAT = 1
_FETCHED = 10_000  # rows that a scan reads together
_MORE = 6  # candidates beyond k, because float32 may order them wrongly
_CONNECT_SECONDS = 10
_TABLES = """
create table {settings} (
    only_row boolean primary key default true check (only_row),
    model text not null, dimension integer not null, similarity text not null,
    version bigint not null, items bigint not null
);
create table {items} (
    row bigint generated always as identity primary key, id text collate "C" not null unique,
    metadata jsonb not null, vector vector({dimension}) not null, folder text, stamp text
);
"""
_POINTER = """
create table {pointer} (
    only_row boolean primary key default true check (only_row),
    format integer not null, generation integer not null
);
insert into {pointer} (format, generation) values ({format}, 1);
"""
_SETTINGS = "select model, dimension, similarity from {settings}"
_INDEXES = (
    "select am.amname from pg_index i join pg_class c on c.oid = i.indexrelid "
    "join pg_am am on am.oid = c.relam "
    "where i.indrelid = %s::regclass and am.amname in ('hnsw', 'ivfflat')"
)


class _Address:
    """The server of an index, and the name of its table."""

    def __init__(self, url: str | os.PathLike):
        parts = urllib.parse.urlsplit(str(url))
        # Other words stay as they are: libpq reads %20, but not +, as a space.
        words = [word for word in parts.query.split("&") if word]
        tables = [word.partition("=")[2] for word in words if word.startswith("table=")]
        self.table = tables[-1] if tables else "dmljax"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self.table):
            raise InvalidInput(
                f"table={inputs.shorten(self.table)}: use up to 40 lower-case letters, digits and _"
            )
        query = "&".join(word for word in words if not word.startswith("table="))
        self._url = urllib.parse.urlunsplit(parts._replace(query=query))
        host = parts.netloc.rpartition("@")[2]
        self.place = f"postgresql://{host}{parts.path}?table={self.table}"  # without a password

    def sql(self, text: str, generation: int = 0, dimension: int = 0) -> sql.Composed:
        """Returns a statement in which {pointer}, {settings} and so on become quoted names."""
        suffixes = "settings", "items"
        names = {x: sql.Identifier(f"{self.table}_{generation}_{x}") for x in suffixes}
        names["pointer"] = sql.Identifier(self.table)
        numbers = {"dimension": sql.Literal(dimension), "format": sql.Literal(_FORMAT)}
        return sql.SQL(text).format(**names, **numbers)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """Opens a connection for the block. Errors of the server are one line."""
        with _one_line_errors(self.place), contextlib.closing(self.connect()) as connection:
            yield connection

    def connect(self) -> Connection:
        """Opens a connection; pgvector's types are registered where the extension exists."""
        name = "dmljax index"
        connection = psycopg.connect(
            self._url, autocommit=True, connect_timeout=_CONNECT_SECONDS, application_name=name
        )
        try:
            connection.execute("set client_encoding = 'UTF8'")
            # Only an administrator may create it, and only where pgvector is installed.
            if connection.execute("select to_regtype('vector')").fetchone() == (None,):
                connection.execute("create extension if not exists vector")
            register_vector(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def exists(self, connection: Connection, suffix: str = "") -> bool:
        """Returns whether a table exists."""
        row = connection.execute("select to_regclass(%s)", (f'"{self.table}{suffix}"',)).fetchone()
        return row is not None and row[0] is not None

    def current_generation(self, connection: Connection) -> int:
        """Returns the number of the current generation."""
        if not self.exists(connection):
            raise FileNotFoundError(f"{self.place} does not exist: it is not an index of dmljax")
        try:
            statement = self.sql("select format, generation from {pointer}")
            row = connection.execute(statement).fetchone()
        except errors.UndefinedColumn:
            row = None
        if row is None:
            raise InvalidInput(f"{self.place} is not an index of dmljax: choose another ?table=")
        inputs.check_format(row[0], _FORMAT, self.place)
        return row[1]

    def create_generation(
        self, connection: Connection, generation: int, settings: Settings
    ) -> None:
        """Creates the tables of a generation."""
        connection.execute(self.sql(_TABLES, generation, settings.dimension))
        statement = "insert into {settings} values (true, %s, %s, %s, 0, 0)"
        connection.execute(self.sql(statement, generation), settings)

    def drop(self, connection: Connection, generations: Iterable[int]) -> None:
        """Deletes the tables of generations, as far as they exist."""
        for generation in generations:
            connection.execute(self.sql("drop table if exists {settings}, {items}", generation))

    def lock(self, connection: Connection, *, exclusive: bool) -> None:
        """Locks the index until the connection closes; only `reindex` needs it exclusively."""
        function = "pg_advisory_lock" + ("" if exclusive else "_shared")
        # The session of a writer that was closed or killed a moment ago may still exist.
        connection.execute("set lock_timeout = '500ms'")
        name = f"dmljax index {self.table}"
        connection.execute(f"select {function}(hashtextextended(%s, 0))", (name,))
        connection.execute("set lock_timeout = 0")


@contextlib.contextmanager
def _one_line_errors(place: str) -> Iterator[None]:
    """Turns errors of the server into `Unavailable`, `Superseded` or `Damaged`, in one line."""
    try:
        yield
    except psycopg.Error as error:
        text = error.diag.message_primary or str(error)
        text = " ".join(text.split())[:300]
        if isinstance(error, errors.InsufficientPrivilege):
            text = (
                f"the role lacks rights ({text}): let the owner of the tables or the database help"
            )
        elif isinstance(error, errors.QueryCanceled):
            text = f"the call took too long ({text}). It changed nothing"
        elif isinstance(error, errors.UndefinedTable):
            raise Superseded(f"{place}: tables are gone ({text}): open the index again") from None
        elif isinstance(error, errors.LockNotAvailable):
            writer = "another session: wait for it, or end it"
            raise Locked(f"{place} is being written by {writer}") from None
        elif isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
            raise Damaged(f"{place}: {text}. Restore the database from a backup") from error
        elif isinstance(error, errors.ReadOnlySqlTransaction):
            text = f"the server only takes reads ({text})"
        elif isinstance(error, psycopg.OperationalError):
            text = f"the server cannot be reached ({text})"
        raise Unavailable(f"{place}: {text}") from error


class PostgresIndex(Index[Cursor]):
    """An index in PostgreSQL: any number of writers and readers."""

    @classmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> PostgresIndex:
        address = _Address(place)
        with address.connected() as connection, connection.transaction():
            # Of two creations at a time, the second one waits here.
            lock = "select pg_advisory_xact_lock(hashtextextended(%s, 0))"
            connection.execute(lock, (f"dmljax create {address.table}",))
            if address.exists(connection):
                problem = "exists already: open it, or choose another ?table="
                raise InvalidInput(f"{address.place} {problem}")
            connection.execute(address.sql(_POINTER))
            address.create_generation(connection, 1, settings)
        return cls(address, 1, write=True)

    @classmethod
    def open(cls, place: str | os.PathLike, *, write: bool) -> PostgresIndex:
        address = _Address(place)
        with address.connected() as connection:
            generation = address.current_generation(connection)
        return cls(address, generation, write=write)

    @classmethod
    def reindex(cls, place: str | os.PathLike, settings: Settings) -> PostgresIndex:
        address = _Address(place)
        with address.connected() as connection:
            generation = address.current_generation(connection) + 1
            address.lock(connection, exclusive=True)
            with connection.transaction():
                address.drop(connection, range(1, generation - 1))
                stored = None
                if address.exists(connection, f"_{generation}_settings"):
                    stored = connection.execute(address.sql(_SETTINGS, generation)).fetchone()
                if stored != settings:
                    address.drop(connection, [generation])
                    address.create_generation(connection, generation, settings)
        return cls(address, generation, write=True, exclusive=True)

    def __init__(self, address: _Address, generation: int, *, write: bool, exclusive: bool = False):
        super().__init__(address.place, generation, write=write)
        self._address, self._exclusive = address, exclusive
        self._connection: Connection | None = None
        self.dimension = 0
        try:
            settings = self._read(lambda cursor: self._one(cursor, _SETTINGS))
            self.model, self.dimension, self.similarity = settings
        except BaseException:
            self.close()
            raise

    @property
    def _table_of_items(self) -> str:
        return f'"{self._address.table}_{self.generation}_items"'

    def _sql(self, text: str) -> sql.Composed:
        return self._address.sql(text, self.generation, self.dimension)

    def _one(self, cursor: Cursor, text: str, parameters: tuple = ()) -> tuple:
        row = cursor.execute(self._sql(text), parameters).fetchone()
        if row is None:
            raise Damaged(f"{self.place} lacks its settings: restore the table from a backup")
        return row

    def _connected(self) -> Connection:
        self._check_open()
        if self._connection is None or self._connection.closed:
            connection = self._address.connect()
            try:
                if self.writable:
                    self._address.lock(connection, exclusive=self._exclusive)
                else:
                    connection.execute("set default_transaction_read_only = on")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _read(self, read_fn: Callable[[Cursor], R]) -> R:
        with self._lock, _one_line_errors(self.place):
            connection = self._connected()
            with connection.transaction(), connection.cursor(binary=True) as cursor:
                cursor.execute("set transaction isolation level repeatable read, read only")
                return read_fn(cursor)

    def _change(self, change_fn: Callable[[Cursor], int]) -> None:
        """Changes items. Writers wait for each other at the row of settings."""
        with (
            self._lock,
            _one_line_errors(self.place),
            self._connected().transaction(),
            self._connected().cursor() as cursor,
        ):
            cursor.execute(self._sql("update {settings} set version = version + 1"))
            added = change_fn(cursor)
            cursor.execute(self._sql("update {settings} set items = items + %s"), (added,))

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Cursor]:
        with self._lock, _one_line_errors(self.place):
            self._connected()
        with self._address.connected() as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            with connection.transaction(), connection.cursor(binary=True) as cursor:
                yield cursor

    def _state(self, cursor: Cursor) -> State:
        return State(*self._one(cursor, "select version, items from {settings}"))

    def _existing(self, cursor: Cursor, ids: list[str]) -> list[str]:
        statement = self._sql("select id from {items} where id = any(%s)")
        return [name for (name,) in cursor.execute(statement, (ids,)).fetchall()]

    def _items(self, cursor: Cursor, ids: list[str] | None) -> Iterator[Item]:
        columns = "select id, metadata, vector from {items} "
        with contextlib.ExitStack() as stack:
            rows: Any = cursor
            if ids is None:  # a cursor of the server: the rows need not fit into memory
                rows = stack.enter_context(cursor.connection.cursor("scan", binary=True))
                rows.itersize = _FETCHED
                rows.execute(self._sql(columns + "order by row"))
            else:
                rows.execute(self._sql(columns + "where id = any(%s)"), (ids,))
            for name, metadata, vector in rows:
                yield Item(name, _array(vector), _metadata(metadata))

    def _insert(
        self,
        cursor: Cursor,
        ids: list[str],
        vectors: np.ndarray,
        metadata: list[str],
        files: Sequence[tuple[str | None, str | None]],
    ) -> None:
        columns = "(id, metadata, vector, folder, stamp)"
        statement = f"copy {{items}} {columns} from stdin with (format binary)"
        with cursor.copy(self._sql(statement)) as copy:
            copy.set_types(["text", "jsonb", "vector", "text", "text"])
            for name, text, vector, file in zip(ids, metadata, vectors, files, strict=True):
                copy.write_row((name, Jsonb(text, dumps=str), Vector(vector), *file))

    def _files(self, cursor: Cursor, ids: list[str] | None) -> Cursor:
        statement = "select id, folder, stamp from {items} where folder is not null"
        if ids is None:
            return cursor.execute(self._sql(statement))
        return cursor.execute(self._sql(statement + " and id = any(%s)"), (ids,))

    def _remove(self, cursor: Cursor, ids: list[str]) -> None:
        cursor.execute(self._sql("delete from {items} where id = any(%s)"), (ids,))

    def _fields(self, cursor: Cursor) -> set[str]:
        statement = "select distinct jsonb_object_keys(metadata) from {items}"
        return {name for (name,) in cursor.execute(self._sql(statement))}

    def _has_field(self, cursor: Cursor, field: str) -> bool:
        statement = self._sql("select 1 from {items} where metadata ? %s limit 1")
        return cursor.execute(statement, (field,)).fetchone() is not None

    def _count(self, cursor: Cursor, conditions: list[Condition]) -> int:
        text, parameters = _condition_sql(conditions)
        statement = self._sql("select count(*) from {items} where ") + sql.SQL(text)
        return cursor.execute(statement, parameters).fetchall()[0][0]

    def _search(
        self, cursor: Cursor, queries: np.ndarray, k: int, conditions: list[Condition]
    ) -> list[list[Hit]]:
        similarity = nearest.SIMILARITIES[self.similarity]
        text, parameters = _condition_sql(conditions)
        # `with ties` leaves the choice among equal items to `nearest.best`.
        statement = (
            self._sql("select row, id, metadata, vector from {items} where ")
            + sql.SQL(text)
            + sql.SQL(f" order by vector {similarity.operator} %s fetch first %s rows with ties")
        )
        results = []
        for query in queries:
            candidates = cursor.execute(statement, [*parameters, Vector(query), k + _MORE])
            items = {row: others for row, *others in candidates}
            vectors = np.array([_array(vector) for *_, vector in items.values()], np.float32)
            vectors = vectors.reshape(-1, self.dimension)
            rows = np.array([*items], np.int64)
            rows, values = nearest.best(query, rows, vectors, k, similarity)
            results.append(
                [
                    Hit(items[row][0], value, _metadata(items[row][1]))
                    for row, value in zip(rows.tolist(), values.tolist(), strict=True)
                ]
            )
        return results

    def compact(self) -> None:
        self._check_writable()

        def change(cursor: Cursor) -> int:
            if self._one(cursor, "select generation from {pointer}")[0] == self.generation:
                self._address.drop(cursor.connection, range(1, self.generation))
            return 0

        self._change(change)
        with self._lock, _one_line_errors(self.place):
            self._connected().execute(self._sql("vacuum (full, analyze) {items}"))

    def _problems(self, cursor: Cursor) -> list[str]:
        counted = self._state(cursor).items
        (rows,) = self._one(cursor, "select count(*) from {items}")
        problems = []
        if rows != counted:
            problems.append(f"{self.place}: {rows} items, {counted} counted")
        is_unit = "abs(vector_norm(vector) - 1) <= 1e-3"
        needs_unit = nearest.SIMILARITIES[self.similarity].needs_unit
        wrong = f"not {is_unit} or " if needs_unit else ""
        statement = f"select id from {{items}} where {wrong}jsonb_typeof(metadata) <> 'object' "
        cursor.execute(self._sql(statement + "order by row limit 10"))
        return problems + [f"{self.place}: item {name!r} was changed" for (name,) in cursor]

    def _facts(self, cursor: Cursor) -> dict[str, Any]:
        table = (self._table_of_items,)
        (size,) = self._one(cursor, "select pg_total_relation_size(%s::regclass)", table)
        names = ", ".join(name for (name,) in cursor.execute(_INDEXES, table))
        return {"bytes": size} | ({"search": f"by {names} of the database"} if names else {})

    def _current(self) -> int:
        return self._read(lambda cursor: self._one(cursor, "select generation from {pointer}")[0])

    def _switch(self) -> None:
        def change(cursor: Cursor) -> int:
            cursor.execute(self._sql("update {pointer} set generation = %s"), (self.generation,))
            return 0

        self._change(change)

    def _discard(self) -> None:
        with self._lock, _one_line_errors(self.place):
            connection = self._connected()
            self._address.lock(connection, exclusive=True)
            with connection.transaction():
                self._address.drop(connection, range(1, self.generation + 2))
                connection.execute(self._sql("drop table {pointer}"))
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def _condition_sql(conditions: list[Condition]) -> tuple[str, list[Any]]:
    """Returns the text after `where`, which contains no values, and its parameters."""
    terms, parameters = ["true"], []
    for field, operator, values in conditions:
        choices = []
        if operator == "=":
            choices.append("metadata -> %s::text = any(%s::text[]::jsonb[])")
            parameters += [field, [json.dumps(value) for value in values if value is not None]]
            if None in values:
                choices.append("coalesce(jsonb_typeof(metadata -> %s::text), 'null') = 'null'")
                parameters.append(field)
        for value in values if operator != "=" else ():
            is_text = kind(value) == "text"
            name = "string" if is_text else "number"
            compared = f'(metadata ->> %s::text) collate "C" {operator} %s::text'
            if not is_text:
                compared = f"metadata -> %s::text {operator} %s::text::jsonb"
            choices.append(f"(jsonb_typeof(metadata -> %s::text) = '{name}' and {compared})")
            parameters += [field, field, value if is_text else json.dumps(value)]
        terms.append(f"({' or '.join(choices)})")
    return " and ".join(terms), parameters


def _array(vector: Any) -> np.ndarray:
    return np.array(vector.to_numpy() if isinstance(vector, Vector) else vector, np.float32)


def _metadata(value: Any) -> Any:
    """Returns JSON as it was added: jsonb writes 1e23 as an integer of 24 digits."""
    if isinstance(value, dict):
        return {key: _metadata(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_metadata(item) for item in value]
    if isinstance(value, int) and not inputs.is_integer_of_64_bits(value):
        return float(value)
    return value
