"""An index in PostgreSQL with pgvector: the interface of the embedded one, for several writers.

The address is the one of libpq, with one more parameter: `postgresql://user@host/db?table=photos`
(by default `table=dmljax`). The table of that name says which generation counts. The items of
generation 1 are in `photos_1_items`, with columns row, id, metadata (jsonb) and vector.

Reads are repeated once on a new connection when the server went away. Writes are not: after an
error the call may be repeated, with `replace=True` if it may have happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

try:
    import psycopg
    from pgvector import HalfVector, Vector
    from pgvector.psycopg import register_vector
    from psycopg import Connection, Cursor, errors, sql
    from psycopg.types.json import Jsonb
except ImportError as error:
    raise ImportError(
        f"PostgreSQL needs psycopg and pgvector ({error}): pip install 'dmljax[postgres]'"
    ) from None

from dmljax.index import filters, inputs, nearest, tuning
from dmljax.index.base import Hit, Index, Item, State
from dmljax.index.errors import Damaged, InvalidInput, Locked, Superseded, Unavailable
from dmljax.index.filters import Condition, kind
from dmljax.index.inputs import Settings

__all__ = ["PostgresIndex"]

R = TypeVar("R")

_FORMAT = 1
_FETCHED = 10_000  # rows that a scan reads together
_QUERIES = 200  # stored vectors that measure the recall
_CONNECT_SECONDS = 10
_RESTART_SECONDS = 5
_TABLES = """
create table {settings} (
    only_row boolean primary key default true check (only_row),
    model text not null, dimension integer not null, similarity text not null,
    version bigint not null, items bigint not null, graph jsonb
);
create table {items} (
    row bigint generated always as identity primary key, id text collate "C" not null unique,
    metadata jsonb not null, vector vector({dimension}) not null
);
create table {fields} (name text primary key);
"""
_POINTER = """
create table {pointer} (
    only_row boolean primary key default true check (only_row),
    format integer not null, generation integer not null
);
insert into {pointer} (format, generation) values ({format}, 1);
"""


class _Distance(NamedTuple):
    """pgvector's names for a similarity: its operator, and the column and operators of a graph."""

    operator: str
    graph_column: str
    graph_operators: str
    query_type: type[Vector] | type[HalfVector]  # what the column of the graph is compared with
    largest_dimension: int  # of a graph


# A graph holds unit vectors in half precision; others may have values beyond it.
_DISTANCES = {
    "cosine": _Distance(
        "<=>", "(vector::halfvec({dimension}))", "halfvec_cosine_ops", HalfVector, 4000
    ),
    "euclidean": _Distance("<->", "vector", "vector_l2_ops", Vector, 2000),
}


class _Address:
    """Where the index is: the server, and the name of its table."""

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url)
        # Other words stay as they are: libpq reads %20, but not +, as a space.
        words = [word for word in parts.query.split("&") if word]
        tables = [word.partition("=")[2] for word in words if word.startswith("table=")]
        self.table = tables[-1] if tables else "dmljax"
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", self.table):
            raise InvalidInput(
                f"table={inputs.shorten(self.table)}: use up to 40 lower-case letters, digits and _"
            )
        query = "&".join(word for word in words if not word.startswith("table="))
        self.url = urllib.parse.urlunsplit(parts._replace(query=query))
        host = parts.netloc.rpartition("@")[2]
        self.place = f"postgresql://{host}{parts.path}?table={self.table}"

    def sql(self, text: str, generation: int = 0, dimension: int = 0) -> sql.Composed:
        """A statement in which {pointer}, {settings}, {items} and so on become quoted names."""
        suffixes = "settings", "items", "fields", "graph"
        names = {x: sql.Identifier(f"{self.table}_{generation}_{x}") for x in suffixes}
        names["pointer"] = sql.Identifier(self.table)
        numbers = {"dimension": sql.Literal(dimension), "format": sql.Literal(_FORMAT)}
        return sql.SQL(text).format(**names, **numbers)

    @contextlib.contextmanager
    def connected(self) -> Iterator[Connection]:
        """A connection for the block. Errors of the server are one line."""
        with _one_line_errors(self.place), contextlib.closing(self.connect()) as connection:
            yield connection

    def connect(self) -> Connection:
        connection = psycopg.connect(
            self.url,
            autocommit=True,
            connect_timeout=_CONNECT_SECONDS,
            application_name="dmljax index",
        )
        connection.execute("set client_encoding = 'UTF8'")
        return connection


def _exists(connection: Connection, table: str) -> bool:
    row = connection.execute("select to_regclass(%s)", (f'"{table}"',)).fetchone()
    return row is not None and row[0] is not None


def _require_extension(connection: Connection, address: _Address) -> None:
    if connection.execute("select 1 from pg_extension where extname = 'vector'").fetchone():
        return
    try:
        connection.execute("create extension if not exists vector")
    except errors.InsufficientPrivilege:
        raise Unavailable(
            f"{address.place}: the extension pgvector is missing in this database, and the role "
            "may not create it: let an administrator run CREATE EXTENSION vector"
        ) from None
    except (errors.UndefinedFile, errors.FeatureNotSupported):
        raise Unavailable(
            f"{address.place}: this server has no pgvector: install it there "
            "(github.com/pgvector/pgvector)"
        ) from None


def _current(connection: Connection, address: _Address) -> int:
    """The number of the generation that counts."""
    if not _exists(connection, address.table):
        raise FileNotFoundError(f"{address.place} does not exist: it is no index of dmljax")
    try:
        row = connection.execute(address.sql("select format, generation from {pointer}")).fetchone()
    except errors.UndefinedColumn:
        row = None
    if row is None:
        raise InvalidInput(f"{address.place} is a table, but no index of dmljax: choose ?table=")
    inputs.check_format(row[0], _FORMAT, address.place)
    return row[1]


def _create_generation(
    connection: Connection, address: _Address, generation: int, settings: Settings
) -> None:
    connection.execute(address.sql(_TABLES, generation, settings.dimension))
    statement = "insert into {settings} values (true, %s, %s, %s, 0, 0)"
    connection.execute(address.sql(statement, generation), settings)


def _drop_generation(connection: Connection, address: _Address, generation: int) -> bool:
    """Deletes the tables of a generation, if they exist; readers of them are told."""
    exists = _exists(connection, f"{address.table}_{generation}_settings")
    if exists:
        connection.execute(address.sql("drop table {settings}, {items}, {fields}", generation))
    return exists


def _drop_generations(connection: Connection, address: _Address, *, before: int) -> None:
    """Deletes the generations before the present one."""
    while before > 1 and _drop_generation(connection, address, before - 1):
        before -= 1


def _lock(connection: Connection, address: _Address, *, exclusive: bool) -> None:
    """Writers share a lock until they close; `reindex` holds it exclusively."""
    key = (f"dmljax index {address.table}",)
    function = "pg_try_advisory_lock" + ("" if exclusive else "_shared")
    for _ in range(10):
        row = connection.execute(f"select {function}(hashtextextended(%s, 0))", key).fetchone()
        if row is not None and row[0]:
            return
        # The session of a writer that was closed or killed a moment ago may not have ended yet.
        connection.execute("select pg_sleep(0.05)")
    row = connection.execute(
        "select a.pid, coalesce(a.client_hostname, host(a.client_addr), 'the server') "
        "from pg_locks l join pg_stat_activity a using (pid) where l.locktype = 'advisory' "
        "and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended(%s, 0) "
        "and a.pid <> pg_backend_pid()",
        key,
    ).fetchone()
    owner = f"the session {row[0]} from {row[1]}" if row else "another session"
    raise Locked(f"{address.place} is being written by {owner}: wait for it, or end it")


@contextlib.contextmanager
def _one_line_errors(place: str) -> Iterator[None]:
    """Turns errors of the server into `Unavailable`, `Superseded` or `Damaged`, in one line."""
    try:
        yield
    except psycopg.Error as error:
        text = error.diag.message_primary or str(error)
        text = " ".join(text.split())[:300]
        if isinstance(error, errors.InsufficientPrivilege):
            text = f"the role lacks rights ({text}): let the owner of the tables grant them"
        elif isinstance(error, errors.QueryCanceled):
            text = f"the call took too long ({text}). It changed nothing"
        elif isinstance(error, errors.UndefinedTable):
            raise Superseded(f"{place}: tables are gone ({text}): open the index again") from None
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
        address = _Address(str(place))
        with address.connected() as connection:
            _require_extension(connection, address)
            with connection.transaction():
                if _exists(connection, address.table):
                    problem = "exists already: open it, or choose another ?table="
                    raise InvalidInput(f"{address.place} {problem}")
                connection.execute(address.sql(_POINTER))
                _create_generation(connection, address, 1, settings)
        return cls(address, 1, write=True)

    @classmethod
    def open(cls, place: str | os.PathLike, *, write: bool) -> PostgresIndex:
        address = _Address(str(place))
        with address.connected() as connection:
            generation = _current(connection, address)
        return cls(address, generation, write=write)

    @classmethod
    def reindex(cls, place: str | os.PathLike, settings: Settings) -> PostgresIndex:
        address = _Address(str(place))
        with address.connected() as connection:
            generation = _current(connection, address) + 1
            _lock(connection, address, exclusive=True)
            with connection.transaction():
                _drop_generations(connection, address, before=generation - 1)
                stored = None
                if _exists(connection, f"{address.table}_{generation}_settings"):
                    statement = "select model, dimension, similarity from {settings}"
                    stored = connection.execute(address.sql(statement, generation)).fetchone()
                if stored != settings:
                    _drop_generation(connection, address, generation)
                    _create_generation(connection, address, generation, settings)
        return cls(address, generation, write=True, exclusive=True)

    @classmethod
    def signature(cls, place: str | os.PathLike) -> Hashable:
        return str(place)  # only `reindex` replaces its tables

    def __init__(self, address: _Address, generation: int, *, write: bool, exclusive: bool = False):
        super().__init__(address.place, generation, write=write)
        self._address, self._exclusive = address, exclusive
        self._connection: Connection | None = None
        self.dimension = 0
        try:
            self.model, self.dimension, self.similarity, declared = self._read(self._settings)
            if declared != self.dimension:
                raise Damaged(
                    f"{self.place}: the column of vectors has {declared} dimensions, the index has "
                    f"{self.dimension}: restore the table from a backup"
                )
        except BaseException:
            self.close()
            raise
        self._distance = _DISTANCES[self.similarity]

    def _settings(self, cursor: Cursor) -> tuple[str, int, str, int]:
        declared = "select atttypmod from pg_attribute where attname = 'vector' and attrelid = "
        text = f"select model, dimension, similarity, ({declared} %s::regclass) from {{settings}}"
        return self._one(cursor, text, (self._table_of_items,))

    @property
    def _table_of_items(self) -> str:
        return f'"{self._address.table}_{self.generation}_items"'

    def _sql(self, text: str) -> sql.Composed:
        return self._address.sql(text, self.generation, self.dimension)

    def _one(self, cursor: Cursor, text: str, parameters: tuple = ()) -> tuple:
        row = cursor.execute(self._sql(text), parameters).fetchone()
        if row is None:
            raise Damaged(f"{self.place} has no settings: restore the table from a backup")
        return row

    def _connected(self) -> Connection:
        self._check_open()
        if self._connection is None or self._connection.closed:
            connection = self._address.connect()
            try:
                _require_extension(connection, self._address)
                register_vector(connection)
                if self.writable:
                    _lock(connection, self._address, exclusive=self._exclusive)
                else:
                    connection.execute("set default_transaction_read_only = on")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _read(self, read_fn: Callable[[Cursor], R]) -> R:
        """The result of `read_fn` in one snapshot; once more if the connection was lost."""
        with self._lock, _one_line_errors(self.place):
            deadline = None  # until when a server may restart
            while True:
                try:
                    connection = self._connected()
                    with connection.transaction(), connection.cursor(binary=True) as cursor:
                        cursor.execute("set transaction isolation level repeatable read, read only")
                        return read_fn(cursor)
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    opened = self._connection
                    if deadline is None and opened is not None and opened.closed:
                        deadline, self._connection = time.monotonic() + _RESTART_SECONDS, None
                    elif deadline is None or opened is not None or time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)

    def _change(self, change_fn: Callable[[Cursor], int]) -> None:
        """A write transaction. Writers wait for each other at the row of settings."""
        with self._lock, _one_line_errors(self.place):
            connection = self._connected()
            try:
                if connection.info.transaction_status:
                    raise AssertionError("a transaction is open")
                with connection.transaction(), connection.cursor() as cursor:
                    cursor.execute(self._sql("update {settings} set version = version + 1"))
                    more = change_fn(cursor)
                    cursor.execute(self._sql("update {settings} set items = items + %s"), (more,))
            except psycopg.OperationalError:
                if connection.closed:  # the next call connects again; this one may have happened
                    self._connection = None
                raise

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Cursor]:
        with self._lock, _one_line_errors(self.place):
            self._connected()
        with self._address.connected() as connection:
            register_vector(connection)
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
            if ids is None:  # a cursor of the server: the rows need not fit into memory
                scan = stack.enter_context(cursor.connection.cursor("scan", binary=True))
                scan.itersize = _FETCHED
                scan.execute(self._sql(columns + "order by row"))
            else:
                cursor.execute(self._sql(columns + "where id = any(%s)"), (ids,))
            for name, metadata, vector in cursor if ids is not None else scan:
                yield Item(name, _array(vector), _metadata(metadata))

    def _insert(
        self, cursor: Cursor, ids: list[str], vectors: np.ndarray, metadata: list[str]
    ) -> None:
        statement = "copy {items} (id, metadata, vector) from stdin with (format binary)"
        with cursor.copy(self._sql(statement)) as copy:
            copy.set_types(["text", "jsonb", "vector"])
            for name, text, vector in zip(ids, metadata, vectors, strict=True):
                copy.write_row((name, Jsonb(text, dumps=str), Vector(vector)))
        statement = "insert into {fields} select unnest(%s::text[]) on conflict do nothing"
        cursor.execute(self._sql(statement), (sorted(filters.fields_of(set(metadata))),))

    def _remove(self, cursor: Cursor, ids: list[str]) -> None:
        cursor.execute(self._sql("delete from {items} where id = any(%s)"), (ids,))

    def _fields(self, cursor: Cursor) -> set[str]:
        return {name for (name,) in cursor.execute(self._sql("select name from {fields}"))}

    def _count(self, cursor: Cursor, conditions: list[Condition]) -> int:
        text, parameters = condition_sql(conditions)
        statement = self._sql("select count(*) from {items} where ") + sql.SQL(text)
        return cursor.execute(statement, parameters).fetchall()[0][0]

    def _search(
        self, cursor: Cursor, queries: np.ndarray, k: int, conditions: list[Condition], exact: bool
    ) -> list[list[Hit]]:
        (graph,) = self._one(cursor, "select graph from {settings}")
        near = not exact and graph is not None and self._is_good(graph["recall@10"])
        if near and conditions:  # filtered searches need the iterative scans of pgvector 0.8
            text = "select extversion from pg_extension where extname = 'vector'"
            near = tuple(map(int, self._one(cursor, text)[0].split(".")[:2])) >= (0, 8)
            if near:
                cursor.execute("set local hnsw.iterative_scan = relaxed_order")
        if near:
            width = min(tuning.width_for(graph["search width"], k), 1000)
            cursor.execute(f"set local hnsw.ef_search = {width:d}")
        results = []
        for query in queries:
            rows = self._nearest(cursor, query, k, conditions, near=near)
            if near and len(rows) < k:
                rows = self._nearest(cursor, query, k, conditions, near=False)
            results.append([Hit(name, value, _metadata(x)) for _, name, x, value in rows])
        return results

    def _nearest(
        self, cursor: Cursor, query: np.ndarray, k: int, conditions: list[Condition], *, near: bool
    ) -> list[tuple[int, str, Any, float]]:
        """Row, id, metadata and similarity of the best k, `near` as the graph finds them."""
        distance, (text, parameters) = self._distance, condition_sql(conditions)
        column, order = (distance.graph_column, "") if near else ("vector", ", row")
        statement = (
            self._sql("select row, id, metadata, vector from {items} where ")
            + sql.SQL(text)
            + self._sql(f" order by {column} {distance.operator} %s{order} limit %s")
        )
        parameters += [(distance.query_type if near else Vector)(query), k + tuning.MORE]
        rows = cursor.execute(statement, parameters).fetchall()
        if not rows:
            return []
        vectors = np.stack([_array(vector) for *_, vector in rows])
        values = nearest.similarities(query, vectors, similarity=self.similarity)
        best = nearest.best(values, np.array([row for row, *_ in rows]), k)
        return [(*rows[i][:3], float(values[i])) for i in best]

    def _graph_refusal(self) -> Exception | None:
        most = self._distance.largest_dimension
        if self.dimension <= most:
            return None
        return InvalidInput(
            f"pgvector has no graph of more than {most} dimensions, and the index has "
            f"{self.dimension}"
        )

    def _build(self, approximate: bool) -> None:
        if not approximate:
            self._run("update {settings} set graph = null", "drop index if exists {graph}")
            return
        distance = self._distance
        self._run(
            "create index if not exists {graph} on {items} using hnsw "
            f"({distance.graph_column} {distance.graph_operators}) "
            f"with (m = {tuning.CONNECTIVITY}, ef_construction = {tuning.EXPANSION_ADD})"
        )
        width, recall = self._read(self._tuned)
        facts = json.dumps({"recall@10": recall, "search width": width})
        self._run("update {settings} set graph = %s::jsonb", parameters=(facts,))

    def _run(self, *statements: str, parameters: tuple | None = None) -> None:
        """Statements in one transaction that leaves the number of items as it is."""

        def change(cursor: Cursor) -> int:
            for statement in statements:
                cursor.execute(self._sql(statement), parameters)
            return 0

        self._change(change)

    def _tuned(self, cursor: Cursor) -> tuple[int, float]:
        """The search width and the recall, measured on stored vectors."""
        statement = self._sql("select row, vector from {items} order by hashint8(row) limit %s")
        rows = cursor.execute(statement, (_QUERIES,)).fetchall()
        queries, k = [_array(vector) for _, vector in rows], tuning.K + 1

        def search(width: int | None) -> list[list[int]]:
            if width is not None:
                cursor.execute(f"set local hnsw.ef_search = {width:d}")
            hits = [self._nearest(cursor, x, k, [], near=width is not None) for x in queries]
            return [[row for row, *_ in best] for best in hits]

        truth = search(None)
        cursor.execute("set local enable_seqscan = off")  # a small table has a graph too
        return tuning.tune(search, truth, [row for row, _ in rows])

    def _compact(self, approximate: bool) -> None:
        def change(cursor: Cursor) -> int:
            for statement in (
                "delete from {fields}",
                "insert into {fields} select distinct jsonb_object_keys(metadata) from {items}",
                "drop index if exists {graph}",
                "update {settings} set graph = null",
            ):
                cursor.execute(self._sql(statement))
            if self._one(cursor, "select generation from {pointer}")[0] == self.generation:
                _drop_generations(cursor.connection, self._address, before=self.generation)
            return 0

        self._change(change)
        with self._lock, _one_line_errors(self.place):
            self._connected().execute(self._sql("vacuum (full, analyze) {items}"))
        self._build(approximate)

    def _problems(self, cursor: Cursor) -> list[str]:
        counted = self._state(cursor).items
        (rows,) = self._one(cursor, "select count(*) from {items}")
        problems = []
        if rows != counted:
            problems.append(f"{self.place}: {rows} items, {counted} counted")
        length = "abs(vector_norm(vector) - 1) <= 1e-3"
        wrong = f"not {length} or " if self.similarity == "cosine" else ""
        statement = f"select id from {{items}} where {wrong}jsonb_typeof(metadata) <> 'object' "
        cursor.execute(self._sql(statement + "order by row limit 10"))
        return problems + [f"{self.place}: item {name!r} was changed" for (name,) in cursor]

    def _facts(self, cursor: Cursor) -> dict[str, Any]:
        text = "select pg_total_relation_size(%s::regclass), items, graph from {settings}"
        size, items, graph = self._one(cursor, text, (self._table_of_items,))
        return {"bytes": size, "approximate": None if graph is None else {"items": items, **graph}}

    def _current(self) -> int:
        return self._read(lambda cursor: self._one(cursor, "select generation from {pointer}")[0])

    def _switch(self) -> None:
        self._run(f"update {{pointer}} set generation = {self.generation:d}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None


def condition_sql(conditions: list[Condition]) -> tuple[str, list[Any]]:
    """The text after `where`, and its parameters: no text of a caller is part of the SQL."""
    terms, parameters = ["true"], []
    for field, operator, values in conditions:
        if operator == "=":
            texts = [json.dumps(value) for value in values if value is not None]
            term = "metadata -> %s::text = any(%s::text[]::jsonb[])"
            parameters += [field, texts]
            if None in values:
                term += " or coalesce(jsonb_typeof(metadata -> %s::text), 'null') = 'null'"
                parameters.append(field)
        elif kind(values[0]) == "text":
            term = "jsonb_typeof(metadata -> %s::text) = 'string' and "
            term += f'(metadata ->> %s::text) collate "C" {operator} %s::text'
            parameters += [field, field, values[0]]
        else:
            term = "jsonb_typeof(metadata -> %s::text) = 'number' and "
            term += f"metadata -> %s::text {operator} %s::text::jsonb"
            parameters += [field, field, json.dumps(values[0])]
        terms.append(f"({term})")
    return " and ".join(terms), parameters


def _array(vector: Any) -> np.ndarray:
    return np.array(vector.to_numpy() if isinstance(vector, Vector) else vector, np.float32)


def _metadata(value: Any) -> Any:
    """JSON as it was added: jsonb writes 1e23 as an integer of 24 digits."""
    if isinstance(value, dict):
        return {key: _metadata(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_metadata(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(value)
    return value
