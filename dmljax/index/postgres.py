"""An index in PostgreSQL with pgvector: the interface of the embedded one, for several writers.

The address is the one of libpq, with one more parameter: `postgresql://user@host/db?table=photos`
(by default `table=dmljax`). The table of that name says which generation counts. The items of
generation 1 are in `photos_1_items`, with columns row, id, metadata (jsonb) and vector.

Reads are repeated once on a new connection when the server went away. Writes are not: after an
error the call may be repeated, with `replace=True` if it may have happened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

try:
    import psycopg
    from pgvector import HalfVector, Vector
    from pgvector.psycopg import register_vector
    from psycopg import Connection, Cursor, sql
    from psycopg.types.json import Jsonb
except ImportError as error:
    raise ImportError(
        f"PostgreSQL needs psycopg and pgvector ({error}): pip install 'dmljax[postgres]'"
    ) from None

from dmljax.index import filters, nearest, tuning
from dmljax.index import postgres_tables as tables
from dmljax.index.base import Hit, Index, Item, State, count_bytes
from dmljax.index.errors import Damaged, InvalidInput
from dmljax.index.filters import Condition
from dmljax.index.inputs import Settings
from dmljax.index.view import Answers

R = TypeVar("R")

_FETCHED = 10_000  # rows that a scan reads together
_QUERIES = 100  # of each kind that measure the recall
_RESTART_SECONDS = 5


class _Distance(NamedTuple):
    """pgvector's names for a similarity: its operator, and the column and operators of a graph."""

    operator: str
    graph_column: str
    graph_operators: str
    query_type: type[Vector] | type[HalfVector]  # what the column of the graph is compared with
    largest_dimension: int  # of a graph
    query: str = "{}"  # what is made of a query before it is compared


# A graph holds unit vectors in half precision; others may have values beyond it.
_DISTANCES = {
    "cosine": _Distance(
        "<=>", "(vector::halfvec({dimension}))", "halfvec_cosine_ops", HalfVector, 4000
    ),
    "euclidean": _Distance("<->", "vector", "vector_l2_ops", Vector, 2000),
}


class _Near(NamedTuple):
    """A search by the graph: what it compares, and how many candidates it takes."""

    distance: _Distance
    most: int


def _two_stages(first: int | str, dimension: int) -> _Distance:
    """pgvector's names for the first stage of a search in two stages, by a graph of the codes."""
    if first == "bits":
        code, operators = f"binary_quantize({{}})::bit({dimension})", "bit_hamming_ops"
        operator, most = "<~>", 64_000
    else:
        code, operators = f"subvector({{}}, 1, {first})::vector({first})", "vector_cosine_ops"
        operator, most = "<=>", 2000
    return _Distance(operator, f"({code.format('vector')})", operators, Vector, most, code)


class PostgresIndex(Index[Cursor]):
    """An index in PostgreSQL: any number of writers and readers."""

    @classmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> PostgresIndex:
        address = tables.Address(str(place))
        with address.connected() as connection:
            tables.require_extension(connection, address)
            with connection.transaction():  # of two creations at a time, the second one waits here
                lock = "select pg_advisory_xact_lock(hashtextextended(%s, 0))"
                connection.execute(lock, (f"dmljax create {address.table}",))
                if tables.table_exists(connection, address.table):
                    problem = "exists already: open it, or choose another ?table="
                    raise InvalidInput(f"{address.place} {problem}")
                connection.execute(address.sql(tables.POINTER))
                tables.create_generation(connection, address, 1, settings)
        return cls(address, 1, write=True)

    @classmethod
    def open(cls, place: str | os.PathLike, *, write: bool) -> PostgresIndex:
        address = tables.Address(str(place))
        with address.connected() as connection:
            generation = tables.current_generation(connection, address)
        return cls(address, generation, write=write)

    @classmethod
    def reindex(
        cls, place: str | os.PathLike, settings: Settings, *, continues: bool
    ) -> PostgresIndex:
        address = tables.Address(str(place))
        with address.connected() as connection:
            generation = tables.current_generation(connection, address) + 1
            tables.lock(connection, address, exclusive=True)
            with connection.transaction():
                tables.drop_generations(connection, address, before=generation - 1)
                stored = None
                if tables.table_exists(connection, f"{address.table}_{generation}_settings"):
                    statement = "select model, dimension, similarity from {settings}"
                    stored = connection.execute(address.sql(statement, generation)).fetchone()
                if stored != settings or not continues:
                    tables.drop_generation(connection, address, generation)
                    tables.create_generation(connection, address, generation, settings)
        return cls(address, generation, write=True, exclusive=True)

    @classmethod
    def signature(cls, place: str | os.PathLike) -> Hashable:
        return str(place)  # only `reindex` replaces its tables

    def __init__(
        self, address: tables.Address, generation: int, *, write: bool, exclusive: bool = False
    ):
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
                tables.require_extension(connection, self._address)
                register_vector(connection)
                if self.writable:
                    tables.lock(connection, self._address, exclusive=self._exclusive)
                else:
                    connection.execute("set default_transaction_read_only = on")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _read(self, read_fn: Callable[[Cursor], R]) -> R:
        """The result of `read_fn` in one snapshot; once more if the connection was lost."""
        with self._lock, tables.one_line_errors(self.place):
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
        with self._lock, tables.one_line_errors(self.place):
            connection = self._connected()
            try:
                if connection.info.transaction_status:
                    raise AssertionError("a transaction is open")
                with connection.transaction(), connection.cursor() as cursor:
                    cursor.execute(self._sql("update {settings} set version = version + 1"))
                    added = change_fn(cursor)
                    cursor.execute(self._sql("update {settings} set items = items + %s"), (added,))
            except psycopg.OperationalError:
                if connection.closed:  # the next call connects again; this one may have happened
                    self._connection = None
                raise

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Cursor]:
        with self._lock, tables.one_line_errors(self.place):
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
                count_bytes(name, metadata)
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

    def _fields(self, cursor: Cursor, among: list[str] | None = None) -> set[str]:
        statement = "select name from {fields}"
        if among is None:
            rows = cursor.execute(self._sql(statement))
        else:
            rows = cursor.execute(self._sql(statement + " where name = any(%s)"), (among,))
        return {name for (name,) in rows}

    def _count(self, cursor: Cursor, conditions: list[Condition]) -> int:
        text, parameters = tables.condition_sql(conditions)
        statement = self._sql("select count(*) from {items} where ") + sql.SQL(text)
        return cursor.execute(statement, parameters).fetchall()[0][0]

    def _search(
        self, cursor: Cursor, queries: np.ndarray, k: int, conditions: list[Condition], exact: bool
    ) -> Answers[list[Hit]]:
        (graph,) = self._one(cursor, "select graph from {settings}")
        is_used = not exact and graph is not None and self._is_measured(graph)
        if is_used and conditions:  # filtered searches need the iterative scans of pgvector 0.8
            text = "select extversion from pg_extension where extname = 'vector'"
            is_used = tuple(map(int, self._one(cursor, text)[0].split(".")[:2])) >= (0, 8)
            if is_used:
                cursor.execute("set local hnsw.iterative_scan = relaxed_order")
        near = None
        if is_used:
            first, width = graph.get("first"), graph.get("candidates") or graph["search width"]
            near = self._near(cursor, first, min(tuning.width_for(width, k), 1000), k)
        results: Answers[list[Hit]] = Answers()
        for query in queries:
            rows = self._nearest(cursor, query, k, conditions, near)
            if near:
                values = [row[3] for row in rows]
                if len(values) < k or tuning.is_strange(values, graph["least"]):
                    rows = self._nearest(cursor, query, k, conditions)
                else:
                    results.exact = False
            for _, name, metadata, _ in rows:
                count_bytes(name, metadata)
            results.append([Hit(name, value, _metadata(x)) for _, name, x, value in rows])
        return results

    def _is_measured(self, graph: dict[str, Any]) -> bool:
        """Whether the graph has the wanted recall for all kinds of queries."""
        if "least" not in graph:
            self._warn(f"{self.place}: `dmljax index tune` measures the recall of its graph")
            return False
        return self._is_good(graph["recalls"], graph["wanted"])

    def _near(self, cursor: Cursor, first: int | str | None, width: int, k: int) -> _Near:
        """Sets the search width of the graph; how the candidates for k rows are found with it."""
        cursor.execute(f"set local hnsw.ef_search = {width:d}")
        if first is None:
            return _Near(self._distance, k + tuning.MORE)
        return _Near(_two_stages(first, self.dimension), width)

    def _nearest(
        self,
        cursor: Cursor,
        query: np.ndarray,
        k: int,
        conditions: list[Condition],
        near: _Near | None = None,
    ) -> list[tuple[int, str, Any, float]]:
        """Row, id, metadata and similarity of the best k, `near` among candidates of the graph."""
        text, parameters = tables.condition_sql(conditions)
        distance, most = near or _Near(self._distance, k + tuning.MORE)
        column, order = (distance.graph_column, "") if near else ("vector", ", row")
        compared = distance.query.format("%s") if near else "%s"
        statement = (
            self._sql("select row, id, metadata, vector from {items} where ")
            + sql.SQL(text)
            + self._sql(f" order by {column} {distance.operator} {compared}{order} limit %s")
        )
        parameters += [(distance.query_type if near else Vector)(query), most]
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

    def _build(self, approximate: bool, recall: float) -> None:
        if not approximate or self.first_stage is not None:
            self._run("update {settings} set graph = null", "drop index if exists {graph}")
        if approximate:
            self._build_graph(self._distance, None, recall)

    def _build_codes(self, first: int | str, recall: float) -> None:
        distance = _two_stages(first, self.dimension)
        if (self.dimension if isinstance(first, str) else first) > distance.largest_dimension:
            raise InvalidInput(
                f"first={first!r}: pgvector has no graph of more than "
                f"{distance.largest_dimension} such numbers"
            )
        if self.first_stage != first:
            self._run("update {settings} set graph = null", "drop index if exists {graph}")
        self._build_graph(distance, first, recall)

    def _build_graph(self, distance: _Distance, first: int | str | None, recall: float) -> None:
        self._run(
            "create index if not exists {graph} on {items} using hnsw "
            f"({distance.graph_column} {distance.graph_operators}) "
            f"with (m = {tuning.CONNECTIVITY}, ef_construction = {tuning.EXPANSION_ADD})"
        )
        width, recalls, least = self._read(functools.partial(self._tuned, first, recall))
        facts: dict[str, Any] = {"recall@10": min(recalls.values()), "recalls": recalls}
        facts |= {"wanted": recall, "least": least}
        facts |= {"search width": width} if first is None else {"first": first, "candidates": width}
        self._run("update {settings} set graph = %s::jsonb", parameters=(json.dumps(facts),))

    def _run(self, *statements: str, parameters: tuple | None = None) -> None:
        """Statements in one transaction that leaves the number of items as it is."""

        def change(cursor: Cursor) -> int:
            for statement in statements:
                cursor.execute(self._sql(statement), parameters)
            return 0

        self._change(change)

    def _tuned(self, first: int | str | None, recall: float, cursor: Cursor) -> tuning.Measured:
        """The search width and the recalls, measured with queries made from stored vectors."""
        statement = self._sql("select row, vector from {items} order by hashint8(row) limit %s")
        rows = cursor.execute(statement, (_QUERIES,)).fetchall()
        numbers, k = np.array([row for row, _ in rows], np.int64), tuning.K + 1
        vectors = np.array([_array(vector) for _, vector in rows], np.float32)
        vectors = vectors.reshape(len(rows), self.dimension)
        asked = tuning.questions(vectors, numbers, similarity=self.similarity, count=_QUERIES)

        def search(kind: str, width: int) -> list[list[int]]:
            near = self._near(cursor, first, width, k)
            return rows_of([self._nearest(cursor, x, k, [], near) for x in asked[kind].queries])

        def rows_of(answers: Iterable[list[tuple]]) -> list[list[int]]:
            return [[row for row, *_ in hits] for hits in answers]

        exact = {
            kind: [self._nearest(cursor, x, k, []) for x in question.queries]
            for kind, question in asked.items()
        }
        truth = {kind: rows_of(answers) for kind, answers in exact.items()}
        best = {kind: [hits[0][3] for hits in answers if hits] for kind, answers in exact.items()}
        cursor.execute("set local enable_seqscan = off")  # a small table has a graph too
        own = {kind: question.own.tolist() for kind, question in asked.items()}
        return tuning.Measured(*tuning.tune(search, truth, own, recall), tuning.least(best))

    def _compact(self, approximate: bool, recall: float) -> None:
        def change(cursor: Cursor) -> int:
            for statement in (
                "delete from {fields}",
                "insert into {fields} select distinct jsonb_object_keys(metadata) from {items}",
                "drop index if exists {graph}",
                "update {settings} set graph = null",
            ):
                cursor.execute(self._sql(statement))
            if self._one(cursor, "select generation from {pointer}")[0] == self.generation:
                tables.drop_generations(cursor.connection, self._address, before=self.generation)
            return 0

        self._change(change)
        with self._lock, tables.one_line_errors(self.place):
            self._connected().execute(self._sql("vacuum (full, analyze) {items}"))
        self._build(approximate, recall)

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

    def _discard(self) -> None:
        with self._lock, tables.one_line_errors(self.place):
            connection = self._connected()
            tables.lock(connection, self._address, exclusive=True)
            with connection.transaction():
                tables.drop_generation(connection, self._address, self.generation + 1)
                tables.drop_generations(connection, self._address, before=self.generation + 1)
                connection.execute(self._sql("drop table {pointer}"))
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
    """JSON as it was added: jsonb writes 1e23 as an integer of 24 digits."""
    if isinstance(value, dict):
        return {key: _metadata(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_metadata(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return float(value)
    return value
