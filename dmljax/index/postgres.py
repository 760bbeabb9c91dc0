"""An index in PostgreSQL with pgvector: the interface of the embedded one, for several writers.

The address is that of libpq, with one more parameter: `postgresql://user@host/db?table=photos` (by
default `table=dmljax`). The table of that name says which generation counts; the items of
generation 1 are in `photos_1_items`, with columns row, id, metadata (jsonb) and vector.

Reads are repeated once on a new connection when the server went away. Writes are not: after an
error the call may be repeated, with `replace=True` if it may have happened.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psycopg
from absl import logging
from pgvector import HalfVector, Vector
from pgvector.psycopg import register_vector
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from dmljax.index import filters, inputs, nearest
from dmljax.index.base import Index, Item, Record
from dmljax.index.errors import (
    Damaged,
    DuplicateId,
    InvalidInput,
    Locked,
    Superseded,
    Unavailable,
    UnknownId,
)
from dmljax.index.filters import Condition, kind

__all__ = ["PostgresIndex", "create", "open", "reindex"]

T = TypeVar("T")

_FORMAT = 1
_GRAPH_FROM = 50_000  # items from which on a graph is built by default
_EXPANSIONS = (16, 32, 64, 128, 256, 512)
_TARGET_RECALL, _LEAST_RECALL = 0.98, 0.95
_QUERIES = 200  # that measure the recall
_MORE = 6  # candidates beyond k, as half precision may order them wrongly
_CONNECT_SECONDS = 10
_RESTART_SECONDS = 5


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

    def name(self, generation: int | None = None, suffix: str = "") -> sql.Identifier:
        """The quoted name of a table."""
        if generation is None:
            return sql.Identifier(self.table)
        return sql.Identifier(f"{self.table}_{generation}_{suffix}")

    @property
    def key(self) -> str:
        """What the lock of writers is derived from."""
        return f"dmljax index {self.table}"


def create(url: str, *, model: str, dimension: int, similarity: str) -> PostgresIndex:
    """An empty index, open for writing. Its tables appear together."""
    address = _Address(url)
    with _one_line_errors(address.place), contextlib.closing(_connect(address)) as connection:
        _require_extension(connection, address)
        with connection.transaction():
            if _exists(connection, address.table):
                raise InvalidInput(
                    f"{address.place} exists already: open it, or choose another ?table="
                )
            connection.execute(
                sql.SQL(
                    "create table {} (only_row boolean primary key default true check (only_row), "
                    "format integer not null, generation integer not null)"
                ).format(address.name())
            )
            _create_generation(connection, address, 1, model, dimension, similarity)
            connection.execute(
                sql.SQL("insert into {} (format, generation) values (%s, 1)").format(
                    address.name()
                ),
                (_FORMAT,),
            )
    return PostgresIndex(address, 1, write=True)


def open(url: str, *, write: bool) -> PostgresIndex:
    """The index at an address."""
    address = _Address(url)
    with _one_line_errors(address.place), contextlib.closing(_connect(address)) as connection:
        generation = _current(connection, address)
    return PostgresIndex(address, generation, write=write)


def reindex(url: str, *, model: str, dimension: int, similarity: str) -> PostgresIndex:
    """The index of another model beside the present one, empty or as far as it was filled."""
    address = _Address(url)
    with _one_line_errors(address.place), contextlib.closing(_connect(address)) as connection:
        generation = _current(connection, address) + 1
        _lock(connection, address, exclusive=True)
        with connection.transaction():
            _drop_generations(connection, address, before=generation - 1)
            if _exists(connection, f"{address.table}_{generation}_settings"):
                statement = sql.SQL("select model, dimension, similarity from {}")
                row = connection.execute(
                    statement.format(address.name(generation, "settings"))
                ).fetchone()
                if row != (model, dimension, similarity):
                    _drop_generation(connection, address, generation)
            if not _exists(connection, f"{address.table}_{generation}_settings"):
                _create_generation(connection, address, generation, model, dimension, similarity)
    return PostgresIndex(address, generation, write=True, exclusive=True)


def _connect(address: _Address) -> psycopg.Connection:
    connection = psycopg.connect(
        address.url,
        autocommit=True,
        connect_timeout=_CONNECT_SECONDS,
        application_name="dmljax index",
    )
    connection.execute("set client_encoding = 'UTF8'")
    return connection


def _exists(connection: psycopg.Connection, table: str) -> bool:
    row = connection.execute("select to_regclass(%s)", (f'"{table}"',)).fetchone()
    return row is not None and row[0] is not None


def _require_extension(connection: psycopg.Connection, address: _Address) -> None:
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


def _current(connection: psycopg.Connection, address: _Address) -> int:
    """The number of the generation that counts."""
    if not _exists(connection, address.table):
        raise FileNotFoundError(f"{address.place} does not exist: it is no index of dmljax")
    statement = sql.SQL("select format, generation from {}").format(address.name())
    try:
        row = connection.execute(statement).fetchone()
    except errors.UndefinedColumn:
        row = None
    if row is None:
        raise InvalidInput(f"{address.place} is a table, but no index of dmljax: choose ?table=")
    if row[0] != _FORMAT:
        raise InvalidInput(
            f"{address.place} has format {row[0]}, this version of dmljax reads {_FORMAT}: "
            "update dmljax"
        )
    return row[1]


def _create_generation(
    connection: psycopg.Connection,
    address: _Address,
    generation: int,
    model: str,
    dimension: int,
    similarity: str,
) -> None:
    settings, items, fields = (
        address.name(generation, suffix) for suffix in ("settings", "items", "fields")
    )
    connection.execute(
        sql.SQL(
            "create table {} (only_row boolean primary key default true check (only_row), "
            "model text not null, dimension integer not null, similarity text not null, "
            "version bigint not null, items bigint not null, graph jsonb)"
        ).format(settings)
    )
    connection.execute(
        sql.SQL(
            "create table {} (row bigint generated always as identity primary key, "
            'id text collate "C" not null unique, metadata jsonb not null, vector vector({}) not '
            "null)"
        ).format(items, sql.Literal(dimension))
    )
    connection.execute(sql.SQL("create table {} (name text primary key)").format(fields))
    connection.execute(
        sql.SQL("insert into {} values (true, %s, %s, %s, 0, 0, null)").format(settings),
        (model, dimension, similarity),
    )


def _drop_generations(connection: psycopg.Connection, address: _Address, *, before: int) -> None:
    """Deletes the tables of generations before the present one; readers of them are told."""
    for generation in range(before - 1, 0, -1):
        if not _exists(connection, f"{address.table}_{generation}_settings"):
            return
        _drop_generation(connection, address, generation)


def _drop_generation(connection: psycopg.Connection, address: _Address, generation: int) -> None:
    for suffix in ("settings", "items", "fields"):
        connection.execute(
            sql.SQL("drop table if exists {}").format(address.name(generation, suffix))
        )


def _lock(connection: psycopg.Connection, address: _Address, *, exclusive: bool) -> None:
    """Writers share a lock until they close; `reindex` has it alone."""
    name = "pg_try_advisory_lock" + ("" if exclusive else "_shared")
    statement = f"select {name}(hashtextextended(%s, 0))"
    for _ in range(10):
        row = connection.execute(statement, (address.key,)).fetchone()
        if row is not None and row[0]:
            return
        # The session of a writer that was closed or killed a moment ago may not have ended yet.
        connection.execute("select pg_sleep(0.05)")
    row = connection.execute(
        "select a.pid, coalesce(a.client_hostname, host(a.client_addr), 'the server') "
        "from pg_locks l join pg_stat_activity a using (pid) where l.locktype = 'advisory' "
        "and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended(%s, 0) "
        "and a.pid <> pg_backend_pid()",
        (address.key,),
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


class PostgresIndex(Index):
    """An index in PostgreSQL. Threads may share it; their calls run one after another."""

    def __init__(self, address: _Address, generation: int, *, write: bool, exclusive: bool = False):
        self.place, self.writable = address.place, write
        self._address, self._generation, self._exclusive = address, generation, exclusive
        self._settings, self._items, self._fields = (
            address.name(generation, suffix) for suffix in ("settings", "items", "fields")
        )
        self._lock = threading.RLock()
        self._connection: psycopg.Connection | None = None
        self._closed = self._warned = False
        try:
            self.model, self.dimension, self.similarity, declared = self._read(self._facts_of_table)
            if declared != self.dimension:
                raise Damaged(
                    f"{self.place}: the column of vectors has {declared} dimensions, the index has "
                    f"{self.dimension}: restore the table from a backup"
                )
        except BaseException:
            self.close()
            raise

    def _facts_of_table(self, cursor: psycopg.Cursor) -> tuple[str, int, str, int]:
        row = self._one(cursor, "select model, dimension, similarity from {settings}")
        declared = cursor.execute(
            "select atttypmod from pg_attribute where attrelid = %s::regclass and "
            "attname = 'vector'",
            (f'"{self._address.table}_{self._generation}_items"',),
        ).fetchone()
        return (*row, declared[0] if declared else 0)

    def _sql(self, text: str) -> sql.Composed:
        return sql.SQL(text).format(
            settings=self._settings,
            items=self._items,
            fields=self._fields,
            pointer=self._address.name(),
            dimension=sql.Literal(self.dimension) if hasattr(self, "dimension") else sql.SQL(""),
        )

    def _one(self, cursor: psycopg.Cursor, text: str, parameters: tuple = ()) -> tuple:
        row = cursor.execute(self._sql(text), parameters).fetchone()
        if row is None:
            raise Damaged(f"{self.place} has no settings: restore the table from a backup")
        return row

    def _connected(self) -> psycopg.Connection:
        if self._closed:
            raise InvalidInput(f"{self.place} is closed: open it again")
        if self._connection is None or self._connection.closed:
            connection = _connect(self._address)
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

    def _read(self, read_fn: Callable[[psycopg.Cursor], T]) -> T:
        """The result of `read_fn` in one snapshot; once more if the connection was lost."""
        with self._lock, _one_line_errors(self.place):
            for attempt in range(2):
                try:
                    connection = self._connected()
                    with connection.transaction(), connection.cursor(binary=True) as cursor:
                        cursor.execute("set transaction isolation level repeatable read, read only")
                        return read_fn(cursor)
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    lost = self._connection is not None and self._connection.closed
                    if attempt or not lost:
                        raise
                    self._connection = None
                    self._await_restart()
            raise AssertionError("a second attempt returns or raises")

    def _await_restart(self) -> None:
        """Connects again, and waits a little for a server that is restarting."""
        deadline = time.monotonic() + _RESTART_SECONDS
        while True:
            try:
                self._connected()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    @contextlib.contextmanager
    def _change(self) -> Iterator[psycopg.Cursor]:
        """A write transaction. Writers wait for each other at the row of settings."""
        with self._lock, _one_line_errors(self.place):
            connection = self._connected()
            try:
                if connection.info.transaction_status:
                    raise AssertionError("a transaction is open")
                with connection.transaction(), connection.cursor() as cursor:
                    cursor.execute(self._sql("update {settings} set version = version + 1"))
                    yield cursor
            except psycopg.OperationalError:
                if connection.closed:  # the next call connects again; this one may have happened
                    self._connection = None
                raise

    @property
    def version(self) -> int:
        return self._read(lambda c: self._one(c, "select version from {settings}")[0])

    @property
    def superseded(self) -> bool:
        return self._read(lambda c: self._one(c, "select generation from {pointer}")[0]) != (
            self._generation
        )

    def count(self, where: Mapping[str, Any] | None = None) -> int:
        conditions = filters.parse(where)
        if not conditions:
            return self._read(lambda c: self._one(c, "select items from {settings}")[0])
        filters.check_fields(conditions, self.fields())
        text, parameters = condition_sql(conditions)
        statement = self._sql("select count(*) from {items} where ") + sql.SQL(text)
        return self._read(lambda c: c.execute(statement, parameters).fetchall()[0][0])

    def fields(self) -> set[str]:
        statement = self._sql("select name from {fields}")
        return self._read(lambda c: {name for (name,) in c.execute(statement).fetchall()})

    def _add(self, ids: list[str], vectors: np.ndarray, metadata: list[str], replace: bool) -> None:
        with self._change() as cursor:
            existing = self._existing(cursor, ids)
            if existing and not replace:
                raise DuplicateId(
                    f"an item with the id {inputs.names(existing)} exists already: leave it out, "
                    "or add with replace=True"
                )
            if existing:
                cursor.execute(self._sql("delete from {items} where id = any(%s)"), (existing,))
            statement = self._sql(
                "copy {items} (id, metadata, vector) from stdin with (format binary)"
            )
            with cursor.copy(statement) as copy:
                copy.set_types(["text", "jsonb", "vector"])
                for name, text, vector in zip(ids, metadata, vectors, strict=True):
                    copy.write_row((name, Jsonb(text, dumps=str), Vector(vector)))
            cursor.execute(
                self._sql("insert into {fields} select unnest(%s::text[]) on conflict do nothing"),
                (sorted(filters.fields_of(metadata)),),
            )
            cursor.execute(
                self._sql("update {settings} set items = items + %s"), (len(ids) - len(existing),)
            )

    def _delete(self, ids: list[str]) -> None:
        with self._change() as cursor:
            existing = set(self._existing(cursor, ids))
            if missing := [name for name in ids if name not in existing]:
                raise UnknownId(f"no item has the id {inputs.names(missing)}: nothing was deleted")
            cursor.execute(self._sql("delete from {items} where id = any(%s)"), (ids,))
            cursor.execute(self._sql("update {settings} set items = items - %s"), (len(ids),))

    def _existing(self, cursor: psycopg.Cursor, ids: list[str]) -> list[str]:
        statement = self._sql("select id from {items} where id = any(%s)")
        return [name for (name,) in cursor.execute(statement, (ids,)).fetchall()]

    def _exist(self, ids: list[str]) -> set[str]:
        return self._read(lambda c: set(self._existing(c, ids)))

    def _get(self, ids: list[str]) -> dict[str, Item]:
        statement = self._sql("select id, metadata, vector from {items} where id = any(%s)")
        rows = self._read(lambda c: c.execute(statement, (ids,)).fetchall())
        return {name: _item(name, metadata, vector) for name, metadata, vector in rows}

    def _search(
        self, queries: np.ndarray, k: int, conditions: list[Condition], exact: bool
    ) -> list[list[Record]]:
        def read(cursor: psycopg.Cursor) -> list[list[Record]]:
            (graph,) = self._one(cursor, "select graph from {settings}")
            usable = not exact and self._usable(cursor, graph, bool(conditions))
            if not usable:
                return [self._exact(cursor, query, k, conditions) for query in queries]
            width = max(graph["search width"], k + k // 2)
            cursor.execute(f"set local hnsw.ef_search = {min(width, 1000):d}")
            results = []
            for query in queries:
                records = self._near(cursor, query, k, conditions)
                if len(records) < k:
                    records = self._exact(cursor, query, k, conditions)
                results.append(records)
            return results

        return self._read(read)

    def _usable(
        self, cursor: psycopg.Cursor, graph: dict[str, Any] | None, has_conditions: bool
    ) -> bool:
        """Whether to search by the graph; filtered searches need iterative scans (pgvector 0.8)."""
        if graph is None:
            return False
        if graph["recall@10"] < _LEAST_RECALL:
            if not self._warned:
                logging.warning(
                    "%s: the graph's recall@10 is %.3f, below %s: every search is exact",
                    self.place,
                    graph["recall@10"],
                    _LEAST_RECALL,
                )
                self._warned = True
            return False
        if has_conditions:
            row = cursor.execute(
                "select extversion from pg_extension where extname = 'vector'"
            ).fetchone()
            if row is None or tuple(map(int, row[0].split(".")[:2])) < (0, 8):
                return False
            cursor.execute("set local hnsw.iterative_scan = relaxed_order")
        return True

    def _exact(
        self, cursor: psycopg.Cursor, query: np.ndarray, k: int, conditions: list[Condition]
    ) -> list[Record]:
        text, parameters = condition_sql(conditions)
        statement = self._sql("select row, id, metadata, vector from {items} where ")
        statement += sql.SQL(text) + sql.SQL(
            f" order by vector {self._distance.operator} %s, row limit %s"
        )
        parameters += [Vector(query), k + _MORE]
        return self._rank(query, cursor.execute(statement, parameters).fetchall(), k)

    def _near(
        self, cursor: psycopg.Cursor, query: np.ndarray, k: int, conditions: list[Condition]
    ) -> list[Record]:
        text, parameters = condition_sql(conditions)
        statement = self._sql("select row, id, metadata, vector from {items} where ")
        statement += sql.SQL(text)
        distance = self._distance
        statement += self._sql(f" order by {distance.graph_column} {distance.operator} %s limit %s")
        parameters += [distance.query_type(query), k + _MORE]
        return self._rank(query, cursor.execute(statement, parameters).fetchall(), k)

    @property
    def _distance(self) -> _Distance:
        return _DISTANCES[self.similarity]

    def _rank(self, query: np.ndarray, rows: list[tuple], k: int) -> list[Record]:
        """The best k of candidates, compared as the embedded index does."""
        if not rows:
            return []
        vectors = np.stack([_array(vector) for *_, vector in rows])
        values = nearest.similarities(query, vectors, similarity=self.similarity)
        order = nearest.best(values, np.array([row for row, *_ in rows]), k)
        return [
            Record(rows[i][0], rows[i][1], float(values[i]), _metadata(rows[i][2])) for i in order
        ]

    def scan(self, batch_size: int = 10_000) -> Iterator[list[Item]]:
        with self._lock, _one_line_errors(self.place):
            self._connected()
        statement = self._sql("select id, metadata, vector from {items} order by row")
        with (
            _one_line_errors(self.place),
            contextlib.closing(_connect(self._address)) as connection,
        ):
            register_vector(connection)
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            with connection.transaction(), connection.cursor("scan", binary=True) as cursor:
                cursor.execute(statement)
                while batch := cursor.fetchmany(batch_size):
                    yield [_item(*row) for row in batch]

    def build(self, *, approximate: bool | None = None) -> dict[str, Any]:
        self._check_writable()
        distance = self._distance
        if approximate is None:
            approximate = self.count() >= _GRAPH_FROM
            approximate = approximate and self.dimension <= distance.largest_dimension
        elif approximate and self.dimension > distance.largest_dimension:
            raise InvalidInput(
                f"pgvector has no graph of more than {distance.largest_dimension} dimensions, and "
                f"the index has {self.dimension}"
            )
        if not approximate:
            with self._change() as cursor:
                cursor.execute(self._sql("update {settings} set graph = null"))
                cursor.execute(sql.SQL("drop index if exists {}").format(self._graph))
            return self.facts()
        with self._change() as cursor:
            cursor.execute(
                sql.SQL("create index if not exists {} ").format(self._graph)
                + self._sql(
                    f"on {{items}} using hnsw ({distance.graph_column} "
                    f"{distance.graph_operators}) with (m = 16, ef_construction = 128)"
                )
            )
        graph = self._read(self._measure)
        with self._change() as cursor:
            cursor.execute(self._sql("update {settings} set graph = %s"), (Jsonb(graph),))
        return self.facts()

    @property
    def _graph(self) -> sql.Identifier:
        return self._address.name(self._generation, "graph")

    def _measure(self, cursor: psycopg.Cursor) -> dict[str, Any]:
        """The smallest search width that reaches a recall@10 of 0.98, and its recall.

        Queries are stored vectors, which do not count among their own neighbors.
        """
        statement = self._sql("select row, vector from {items} order by hashint8(row) limit %s")
        rows = cursor.execute(statement, (_QUERIES,)).fetchall()
        queries = [(row, _array(vector)) for row, vector in rows]
        exact = [{r.row for r in self._exact(cursor, query, 11, [])} for _, query in queries]
        cursor.execute("set local enable_seqscan = off")  # a small table has a graph too
        width, recall = _EXPANSIONS[0], 1.0
        for width in _EXPANSIONS if queries else ():
            cursor.execute(f"set local hnsw.ef_search = {width:d}")
            shares = []
            for (row, query), truth in zip(queries, exact, strict=True):
                near = {r.row for r in self._near(cursor, query, 11, [])}
                others = len(truth - {row})
                shares.append(len((truth & near) - {row}) / others if others else 1.0)
            recall = float(np.mean(shares))
            if recall >= _TARGET_RECALL:
                break
        return {"recall@10": recall, "search width": width}

    def compact(self) -> None:
        self._check_writable()
        has_graph = self.facts()["approximate"] is not None
        with self._change() as cursor:
            cursor.execute(self._sql("delete from {fields}"))
            cursor.execute(
                self._sql(
                    "insert into {fields} select distinct jsonb_object_keys(metadata) from {items}"
                )
            )
            if self._one(cursor, "select generation from {pointer}")[0] == self._generation:
                connection = cursor.connection
                _drop_generations(connection, self._address, before=self._generation)
            cursor.execute(sql.SQL("drop index if exists {}").format(self._graph))
            cursor.execute(self._sql("update {settings} set graph = null"))
        with self._lock, _one_line_errors(self.place):
            self._connected().execute(self._sql("vacuum (full, analyze) {items}"))
        self.build(approximate=True if has_graph else None)

    def check(self) -> list[str]:
        def read(cursor: psycopg.Cursor) -> list[str]:
            (counted,) = self._one(cursor, "select items from {settings}")
            (rows,) = self._one(cursor, "select count(*) from {items}")
            problems = []
            if rows != counted:
                problems.append(f"{self.place}: {rows} items, {counted} counted")
            length = "abs(vector_norm(vector) - 1) <= 1e-3"
            wrong = f"not {length} or " if self.similarity == "cosine" else ""
            statement = self._sql(
                f"select id from {{items}} where {wrong}jsonb_typeof(metadata) <> 'object' "
                "order by row limit 10"
            )
            for (name,) in cursor.execute(statement).fetchall():
                problems.append(f"{self.place}: item {name!r} was changed")
            return problems

        return self._read(read)

    def facts(self) -> dict[str, Any]:
        def read(cursor: psycopg.Cursor) -> dict[str, Any]:
            items, version, graph = self._one(
                cursor, "select items, version, graph from {settings}"
            )
            name = f'"{self._address.table}_{self._generation}_items"'
            (size,) = cursor.execute("select pg_total_relation_size(%s)", (name,)).fetchall()[0]
            return {
                "items": items,
                "dimension": self.dimension,
                "model": self.model,
                "similarity": self.similarity,
                "version": version,
                "bytes": size,
                "approximate": None if graph is None else {"items": items, **graph},
            }

        return self._read(read)

    def switch(self) -> None:
        self._check_writable()
        if not self.superseded:
            raise InvalidInput(f"{self.place} is the present index already")
        with self._change() as cursor:
            cursor.execute(self._sql("update {pointer} set generation = %s"), (self._generation,))

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


def _item(name: str, metadata: dict[str, Any], vector: Any) -> Item:
    return Item(name, _array(vector), _metadata(metadata))


def _metadata(value: Any) -> Any:
    """JSON as it was added: jsonb writes 1e23 as an integer of 24 digits."""
    if isinstance(value, dict):
        return {key: _metadata(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_metadata(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(value)
    return value
