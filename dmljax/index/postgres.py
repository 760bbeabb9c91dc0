"""An index in PostgreSQL with pgvector: like an index in a folder, but with several writers.

The address is the one of libpq, with one more parameter: `postgresql://user@host/db?table=photos`
(by default `table=dmljax`). The table of that name names the current generation. The items of
generation 1 are in `photos_1_items`, with columns row, id, metadata (jsonb) and vector.

Searches are exact, unless the database has an HNSW or IVFFlat index of the vectors, which dmljax
never creates: then the planner of PostgreSQL may use it.

After an error of the connection, the next call connects again. A call that failed can be repeated,
with `replace=True` if it may have happened.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

try:
    import psycopg
    from pgvector import Vector
    from pgvector.psycopg import register_vector
    from psycopg import Connection, Cursor, errors
    from psycopg.types.json import Jsonb
except ImportError as error:
    raise ImportError(
        f"PostgreSQL needs psycopg and pgvector ({error}): pip install 'dmljax[postgres]'"
    ) from None

from dmljax.index import filters, inputs, nearest
from dmljax.index.base import Index, Item
from dmljax.index.filters import Condition, Dialect
from dmljax.index.inputs import Damaged, InvalidInput, Locked, Settings, Superseded, Unavailable
from dmljax.vectors import UNIT_TOLERANCE

_FORMAT = 1
_FETCHED = 10_000  # rows that a scan reads together
_MORE = 6  # candidates beyond k, because float32 may order them wrongly
_CONNECT_SECONDS = 10
_POINTER = """
create table {pointer} (
    only_row boolean primary key default true check (only_row),
    format integer not null, generation integer not null
);
"""
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
_INDEXES = (
    "select am.amname from pg_index i join pg_class c on c.oid = i.indexrelid "
    "join pg_am am on am.oid = c.relam "
    "where i.indrelid = '{items}'::regclass and am.amname in ('hnsw', 'ivfflat')"
)
_TYPE = "jsonb_typeof(metadata -> ?::text)"
_DIALECT = Dialect(
    type=_TYPE,
    each="jsonb_each(metadata)",
    tests={
        "bool": "metadata -> ?::text {}",
        "text": f"({_TYPE} = 'string' and (metadata ->> ?::text) collate \"C\" {{}})",
        "number": f"({_TYPE} = 'number' and metadata -> ?::text {{}})",
    },
    ids="= any(?)",
    field_fn=str,
    value_fn=lambda value: value if isinstance(value, str) else Jsonb(value),
    list_fn=list,
)
# What an error of the server means, if it is not `Unavailable`.
_ERRORS: tuple[tuple[type[Exception], type[Exception], str], ...] = (
    (errors.UndefinedTable, Superseded, ": open the index again"),
    (errors.LockNotAvailable, Locked, ": it is being written by another session, wait for it"),
    (errors.DataCorrupted, Damaged, ". Restore the database from a backup"),
    (errors.IndexCorrupted, Damaged, ". Restore the database from a backup"),
    (psycopg.Error, Unavailable, ""),
)


class PostgresIndex(Index):
    """An index in PostgreSQL: any number of writers and readers. `exclusive` is for `reindex`."""

    _dialect = _DIALECT

    def __init__(self, place: str | os.PathLike, *, write: bool, exclusive: bool = False):
        parts = urllib.parse.urlsplit(str(place))
        # Other words stay as they are: libpq reads %20, but not +, as a space.
        words = [word for word in parts.query.split("&") if word]
        tables = [word.partition("=")[2] for word in words if word.startswith("table=")]
        self._table = tables[-1] if tables else "dmljax"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self._table):
            name = inputs.shorten(self._table)
            raise InvalidInput(f"table={name}: use up to 40 lower-case letters, digits and _")
        query = "&".join(word for word in words if not word.startswith("table="))
        self._url = urllib.parse.urlunsplit(parts._replace(query=query))
        host = parts.netloc.rpartition("@")[2]  # without a password
        super().__init__(f"postgresql://{host}{parts.path}?table={self._table}", 1, write=write)
        self._exclusive = exclusive
        self._connection: Connection | None = None

    @classmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> PostgresIndex:
        index = cls(place, write=True)
        with index._opening() as cursor:
            try:
                cursor.execute(index._sql(_POINTER))
            except errors.DuplicateTable:
                problem = "exists already: open it, or choose another ?table="
                raise InvalidInput(f"{index.place} {problem}") from None
            index._rows(cursor, "insert into {pointer} values (true, ?, 1)", [_FORMAT])
            index._create_generation(cursor, settings)
        return index

    @classmethod
    def open(cls, place: str | os.PathLike, *, write: bool) -> PostgresIndex:
        index = cls(place, write=write)
        with index._opening() as cursor:
            index.generation = index._pointer(cursor)
        return index

    @classmethod
    def reindex(cls, place: str | os.PathLike, settings: Settings) -> PostgresIndex:
        index = cls(place, write=True, exclusive=True)
        with index._opening() as cursor:
            index.generation = index._pointer(cursor) + 1
            index._drop(cursor, range(1, index.generation - 1))
            if index._rows(cursor, "select to_regclass('{settings}')") == [(None,)]:
                index._create_generation(cursor, settings)
            elif index._read_settings(cursor) != settings:
                index._drop(cursor, [index.generation])
                index._create_generation(cursor, settings)
        return index

    @contextlib.contextmanager
    def _opening(self) -> Iterator[Cursor]:
        """Begins the transaction that finds the generation; reads the settings at its end."""
        try:
            with (
                self._errors(),
                self._connected().transaction(),
                self._connected().cursor() as cursor,
            ):
                yield cursor
                self._read_settings(cursor)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            text = " ".join((error.diag.message_primary or str(error)).split())[:300]
            kind, advice = next(x[1:] for x in _ERRORS if isinstance(error, x[0]))
            raise kind(f"{self.place}: {text}{advice}") from error

    def _sql(self, text: str, generation: int | None = None, **values: Any) -> str:
        """Returns a statement with the names of the tables, and `?` as psycopg expects it."""
        prefix = f"{self._table}_{generation or self.generation}"
        names = {name: f'"{prefix}_{name}"' for name in ("settings", "items")}
        return text.format(pointer=f'"{self._table}"', **names, **values).replace("?", "%s")

    def _create_generation(self, cursor: Cursor, settings: Settings) -> None:
        cursor.execute(self._sql(_TABLES, dimension=settings.dimension))
        self._rows(cursor, "insert into {settings} values (true, ?, ?, ?, 0, 0)", settings)

    def _drop(self, cursor: Cursor, generations: Iterable[int]) -> None:
        """Deletes the tables of generations, as far as they exist."""
        for generation in generations:
            cursor.execute(self._sql("drop table if exists {settings}, {items}", generation))

    def _current(self) -> int:
        with self._transaction() as cursor:
            return self._pointer(cursor)

    def _pointer(self, cursor: Cursor) -> int:
        """Returns the number of the current generation."""
        try:
            rows = self._rows(cursor, "select format, generation from {pointer}")
        except errors.UndefinedTable:
            problem = "does not exist: it is not an index of dmljax"
            raise FileNotFoundError(f"{self.place} {problem}") from None
        except errors.UndefinedColumn:
            rows = []
        if not rows:
            raise InvalidInput(f"{self.place} is not an index of dmljax: choose another ?table=")
        inputs.check_format(rows[0][0], _FORMAT, self.place)
        return rows[0][1]

    def _connect(self) -> Connection:
        """Opens a connection; pgvector's types are registered where the extension exists."""
        name = "dmljax index"
        connection = psycopg.connect(
            self._url, autocommit=True, connect_timeout=_CONNECT_SECONDS, application_name=name
        )
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            connection.execute("set client_encoding = 'UTF8'")
            # Only an administrator may create it, and only where pgvector is installed.
            if connection.execute("select to_regtype('vector')").fetchone() == (None,):
                connection.execute("create extension if not exists vector")
            register_vector(connection)
            stack.pop_all()
        return connection

    def _connected(self) -> Connection:
        self._check_open()
        if self._connection is None or self._connection.closed:
            with contextlib.ExitStack() as stack:
                connection = stack.enter_context(contextlib.closing(self._connect()))
                if self.writable:
                    self._lock_index(connection, exclusive=self._exclusive)
                else:
                    connection.execute("set default_transaction_read_only = on")
                stack.pop_all()
            self._connection = connection
        return self._connection

    def _lock_index(self, connection: Connection, *, exclusive: bool) -> None:
        """Locks the index until the connection closes; only `reindex` needs it exclusively."""
        function = "pg_advisory_lock" + ("" if exclusive else "_shared")
        # The session of a writer that was closed or killed a moment ago may still exist.
        connection.execute("set lock_timeout = '500ms'")
        name = f"dmljax index {self._table}"
        connection.execute(f"select {function}(hashtextextended(%s, 0))", (name,))
        connection.execute("set lock_timeout = 0")

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Cursor]:
        """Begins a transaction. Writers wait for each other at the row of settings."""
        with self._lock, self._errors():
            connection = self._connected()
            with connection.transaction(), connection.cursor(binary=not write) as cursor:
                if write:
                    self._rows(cursor, "update {settings} set version = version + 1")
                else:
                    cursor.execute("set transaction isolation level repeatable read, read only")
                yield cursor

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Cursor]:
        self._check_open()
        with self._errors(), contextlib.closing(self._connect()) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            with connection.transaction(), connection.cursor(binary=True) as cursor:
                yield cursor

    def _rows(self, transaction: Cursor, text: str, parameters: Sequence[Any] = ()) -> list:
        cursor = transaction.execute(self._sql(text), parameters or None)
        return [] if cursor.description is None else cursor.fetchall()

    def _items(self, transaction: Cursor, ids: list[str] | None) -> Iterator[Item]:
        columns = "select id, metadata, vector from {items} "
        with contextlib.ExitStack() as stack:
            rows: Any = transaction
            if ids is None:  # a cursor of the server: the rows need not fit into memory
                rows = stack.enter_context(transaction.connection.cursor("scan", binary=True))
                rows.itersize = _FETCHED
                rows.execute(self._sql(columns + "order by row"))
            else:
                rows = self._rows(transaction, f"{columns} where id {self._dialect.ids}", [ids])
            for name, metadata, vector in rows:
                yield Item(name, _array(vector), _metadata(metadata))

    def _insert(
        self,
        transaction: Cursor,
        ids: list[str],
        vectors: np.ndarray,
        metadata: list[str],
        files: Sequence[tuple[str | None, str | None]],
    ) -> None:
        columns = "(id, metadata, vector, folder, stamp)"
        statement = f"copy {{items}} {columns} from stdin with (format binary)"
        with transaction.copy(self._sql(statement)) as copy:
            copy.set_types(["text", "jsonb", "vector", "text", "text"])
            for name, text, vector, file in zip(ids, metadata, vectors, files, strict=True):
                copy.write_row((name, Jsonb(text, dumps=str), Vector(vector), *file))

    def _remove(self, transaction: Cursor, ids: list[str]) -> None:
        self._rows(transaction, f"delete from {{items}} where id {self._dialect.ids}", [ids])

    def _search(
        self, transaction: Cursor, queries: np.ndarray, k: int, conditions: list[Condition]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[int, tuple[str, dict[str, Any]]]]:
        similarity = nearest.SIMILARITIES[self.similarity]
        text, parameters = filters.to_sql(conditions, self._dialect)
        # `with ties` leaves the choice among equal items to `nearest.best`.
        statement = (
            f"select row, id, metadata, vector from {{items}} where {text} "
            f"order by vector {similarity.operator} ? fetch first ? rows with ties"
        )
        results, items = [], dict[int, tuple[str, dict[str, Any]]]()
        for query in queries:
            parameters_of_query = [*parameters, Vector(query), k + _MORE]
            chosen = self._rows(transaction, statement, parameters_of_query)
            vectors = np.array([_array(vector) for *_, vector in chosen], np.float32)
            values = similarity.score_fn(query, vectors.reshape(-1, self.dimension))
            rows = np.array([row for row, *_ in chosen], np.int64)
            results.append(nearest.best(rows, values, k))
            items |= {row: (name, _metadata(metadata)) for row, name, metadata, _ in chosen}
        return results, items

    def compact(self) -> None:
        self._check_writable()
        if not self.superseded:
            with self._transaction(write=True) as cursor:
                self._drop(cursor, range(1, self.generation))
        with self._lock, self._errors():
            self._connected().execute(self._sql("vacuum (full, analyze) {items}"))

    def _problems(self, transaction: Cursor) -> list[str]:
        counted = self._state(transaction).items
        ((count,),) = self._rows(transaction, "select count(*) from {items}")
        problems = [f"{self.place}: {count} items, {counted} counted"] if count != counted else []
        if nearest.SIMILARITIES[self.similarity].needs_unit:
            text = "select id from {items} where not abs(vector_norm(vector) - 1) <= "
            text += f"{UNIT_TOLERANCE} order by row limit 10"
            for (name,) in self._rows(transaction, text):
                problems.append(f"{self.place}: item {name!r} was changed")
        return problems

    def _facts(self, transaction: Cursor) -> dict[str, Any]:
        ((size,),) = self._rows(transaction, "select pg_total_relation_size('{items}'::regclass)")
        names = ", ".join(name for (name,) in self._rows(transaction, _INDEXES))
        return {"bytes": size} | ({"search": f"by {names} of the database"} if names else {})

    def _switch(self) -> None:
        with self._transaction(write=True) as cursor:
            self._rows(cursor, "update {pointer} set generation = ?", [self.generation])

    def _discard(self) -> None:
        with self._lock, self._errors():
            self._lock_index(self._connected(), exclusive=True)
            with self._connected().transaction(), self._connected().cursor() as cursor:
                self._drop(cursor, range(1, self.generation + 2))
                cursor.execute(self._sql("drop table {pointer}"))
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


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
