"""An index in a folder: SQLite holds the truth, and what searches read is derived from it.

A writer commits to SQLite (WAL, synchronous=full) before a call returns. The matrix of vectors
and the graph are made from the database, are verified by their digests before they are opened, and
are made again when they are damaged. Rows that they lack are searched exactly.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import shutil
import sqlite3
import threading
from collections.abc import Callable, Hashable, Iterator
from sqlite3 import Connection
from typing import Any, TypeVar

import numpy as np
from absl import logging

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index import base, codes, database, filters, folder, graph, matrix
from dmljax.index.base import Hit, Index, Item, State, count_bytes
from dmljax.index.database import IN, one_line_errors, parameter, transaction
from dmljax.index.errors import Damaged, InvalidInput, Superseded, Unavailable
from dmljax.index.filters import Condition
from dmljax.index.inputs import Settings
from dmljax.index.view import Answers, View

R = TypeVar("R")

_BATCH = 10_000  # rows that are read together
_FEW = 1000  # rows that a derived file may lack in any case
_SHARE = 0.05  # share of the rows that a derived file may lack
_REBUILD_SHARE = 0.3  # of all rows: after more changes the graph is built from an empty one
_CACHED_FILTERS = 16
_APPROXIMATE = ("graph.json", "codes.json")  # the manifests of what approximate searches read


class EmbeddedIndex(Index[Connection]):
    """An index in a folder: one writer, and any number of readers."""

    @classmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> EmbeddedIndex:
        path = pathlib.Path(place)
        temporary, lock = folder.create(path)
        try:
            _create_generation(temporary / folder.name_of(1), settings)
            folder.point(temporary, 1)
            if path.exists():  # rename would replace an empty folder
                raise InvalidInput(f"{path} exists already: choose another name")
            os.rename(temporary, path)
            files.sync(path.parent)
        except BaseException:
            lock.close()
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls(path, 1, lock=lock)

    @classmethod
    def open(cls, place: str | os.PathLike, *, write: bool) -> EmbeddedIndex:
        path = pathlib.Path(place)
        folder.current(path)  # there must be one
        if write:
            with folder.locked(path) as lock:
                return cls(path, folder.tidy(path), lock=lock)
        while True:  # a switch meanwhile deletes the files that are being opened
            with contextlib.suppress(Superseded):
                index = cls(path, folder.current(path))
                if not index.superseded:
                    return index
                index.close()

    @classmethod
    def reindex(
        cls, place: str | os.PathLike, settings: Settings, *, continues: bool
    ) -> EmbeddedIndex:
        path = pathlib.Path(place)
        folder.current(path)  # there must be one
        with folder.locked(path) as lock:
            generation = folder.tidy(path) + 1
            if not (continues and cls._continues(path, generation, settings)):
                _create_generation(path / folder.name_of(generation), settings)
            return cls(path, generation, lock=lock)

    @classmethod
    def _continues(cls, path: pathlib.Path, generation: int, settings: Settings) -> bool:
        """Whether a generation was begun with these settings."""
        try:
            with cls(path, generation) as index:
                return (index.model, index.dimension, index.similarity) == settings
        except OSError:
            return False

    @classmethod
    def signature(cls, place: str | os.PathLike) -> Hashable:
        return folder.signature(pathlib.Path(place))

    def __init__(self, path: pathlib.Path, generation: int, *, lock: Any = None):
        super().__init__(str(path), generation, write=lock is not None)
        self._path, self._folder = path, path / folder.name_of(generation)
        self._file = self._folder / "items.db"
        self._writer_lock, self._build_lock = lock, threading.Lock()
        self._view: View | None = None
        self._rows_of_filters: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._graph_state: list[Any] = []  # of the manifests that were read last
        with self._errors(), contextlib.ExitStack() as stack:
            self._open(stack)
            stack.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Connects, checks and reads the first view; `stack` closes the connection again."""
        acknowledged = self._acknowledged()
        wal, shm = (self._file.with_name(f"items.db{end}") for end in ("-wal", "-shm"))
        unclean = shm.exists() and not wal.exists()
        if not self._file.exists():
            raise Damaged(
                f"{self._file} does not exist: restore the folder from a backup, or make the index "
                "again"
            )
        self._connection = database.connect(self._file, write=self.writable)
        stack.callback(self._connection.close)
        settings = database.read_settings(self._connection, self._file)
        self._check_database(settings.version, acknowledged, unclean)
        self.model, self.dimension = settings.model, settings.dimension
        self.similarity, self._identity = settings.similarity, settings.identity
        try:
            if self.writable:
                matrix.tidy(self._folder)
            if self.writable and (self._matrix_is_damaged() or self._lacks_much()):
                with self._snapshot() as connection, _full_disk(self._folder):
                    self._write_matrix(connection)
            self._read(self._refreshed)  # reports damaged files; makes the first search quick
        except Damaged as error:  # who opens the index can add a changed item again
            if not isinstance(error.__cause__, database.ItemChanged):
                raise
            self._warn(str(error))

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors in one line; `Superseded` where a switch has deleted the files meanwhile."""
        try:
            with one_line_errors(self._file):
                yield
        except OSError as error:
            if folder.current(self._path) <= self.generation:
                raise
            raise Superseded(
                f"{self.place} was replaced since it was opened: open it again"
            ) from error

    # A commit is acknowledged here after it is on the disk, so this number is never ahead of the
    # database, unless a part of the database is lost.
    def _acknowledged(self) -> int:
        try:
            return int((self._folder / "acknowledged").read_text())
        except (OSError, ValueError):
            return 0

    def _acknowledge(self, version: int) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(self._folder / "acknowledged", os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, f"{version:020d}\n".encode(), 0)
            finally:
                os.close(descriptor)

    def _check_database(self, version: int, acknowledged: int, unclean: bool) -> None:
        """Notices a database from which a part was cut off, or whose -wal was deleted."""
        if version < acknowledged:
            raise Damaged(
                f"{self._file} is at change {version}, but change {acknowledged} was acknowledged: "
                "its -wal file was deleted, or an older copy was put there. Restore items.db and "
                "items.db-wal together from a backup; to accept the loss, delete the file "
                f"{self._folder / 'acknowledged'}"
            )
        pages, size = (
            self._connection.execute(f"pragma {name}").fetchone()[0]
            for name in ("page_count", "page_size")
        )
        if unclean or self._file.stat().st_size < pages * size:
            result = self._connection.execute("pragma quick_check(1)").fetchone()[0]
            if result != "ok":
                raise Damaged(
                    f"{self._file} is damaged ({' '.join(result.split())}): restore it from a "
                    "backup, or make the index again"
                )

    def _read(self, read_fn: Callable[[Connection], R]) -> R:
        with self._lock, self._errors():
            self._check_open()
            with (
                database.stop_when(self._connection, base.stop_fn()),
                transaction(self._connection) as connection,
            ):
                return read_fn(connection)

    def _change(self, change_fn: Callable[[Connection], int]) -> None:
        with self._lock, self._errors():
            self._check_open()
            with (
                database.stop_when(self._connection, base.stop_fn()),
                transaction(self._connection, write=True) as connection,
            ):
                connection.execute("update settings set version = version + 1")
                added = change_fn(connection)
                connection.execute("update settings set items = items + ?", (added,))
                version = self._state(connection).version
            self._acknowledge(version)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        with self._lock:
            self._check_open()
        with (
            self._errors(),
            contextlib.closing(database.connect(self._file, write=False)) as connection,
            database.stop_when(connection, base.stop_fn()),
            transaction(connection),
        ):
            yield connection

    def _settings(self, connection: Connection) -> database.Row:
        return database.read_settings(connection, self._file)

    def _state(self, connection: Connection) -> State:
        settings = self._settings(connection)
        return State(settings.version, settings.items)

    def _existing(self, connection: Connection, ids: list[str]) -> list[str]:
        statement = f"select id from items where id in {IN}"
        return [name for (name,) in connection.execute(statement, parameter(ids))]

    def _items(self, connection: Connection, ids: list[str] | None) -> Iterator[Item]:
        condition = ("true", ()) if ids is None else (f"id in {IN}", parameter(ids))
        count = 0
        for _, name, metadata, total, blob in database.stored(connection, *condition):
            database.verify(name, metadata, total, blob)
            count_bytes(name, metadata)
            vector = database.decode_vectors([blob], self.dimension)[0].copy()
            yield Item(name, vector, database.decode_metadata(metadata))
            count += 1
        if ids is None and count != (counted := self._state(connection).items):
            raise database.Inconsistent(f"it has {count} items, and counted {counted}")

    def _insert(
        self, connection: Connection, ids: list[str], vectors: np.ndarray, metadata: list[str]
    ) -> None:
        (last,) = connection.execute(
            "select coalesce(max(seq), 0) from sqlite_sequence where name = 'items'"
        ).fetchone()
        rows = range(last + 1, last + 1 + len(ids))
        blobs = [vector.astype("<f4", copy=False).tobytes() for vector in vectors]
        sums = map(database.checksum, ids, metadata, blobs)
        items = zip(rows, ids, metadata, sums, strict=True)
        connection.executemany("insert into items values (?, ?, ?, ?)", items)
        connection.executemany("insert into vectors values (?, ?)", zip(rows, blobs, strict=True))
        _insert_fields(connection, filters.fields_of(set(metadata)))

    def _remove(self, connection: Connection, ids: list[str]) -> None:
        rows = connection.execute(
            f"delete from items where id in {IN} returning row", parameter(ids)
        ).fetchall()
        connection.executemany("delete from vectors where row = ?", rows)
        connection.executemany(
            "insert into deleted values (?, (select version from settings))", rows
        )

    def _fields(self, connection: Connection, among: list[str] | None = None) -> set[str]:
        rows = connection.execute(
            "select name from fields" + ("" if among is None else f" where name in {IN}"),
            () if among is None else parameter(among),
        )
        names = {name for (name,) in rows}
        if not all(isinstance(name, str) for name in names):
            raise database.Inconsistent("the name of a field is no text")
        return names

    def _count(self, connection: Connection, conditions: list[Condition]) -> int:
        text, parameters = database.condition_sql(conditions)
        statement = f"select count(*) from items where {text}"
        return connection.execute(statement, parameters).fetchone()[0]

    def _search(
        self,
        connection: Connection,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
    ) -> Answers[list[Hit]]:
        view = self._refreshed(connection)
        allowed = self._rows_where(connection, conditions) if conditions else None
        if exact:
            results = Answers(view.exact(queries, k, allowed=allowed))
        else:
            results = view.approximate(queries, k, allowed=allowed)
        in_hits, counts = np.unique(np.concatenate([x for x, _ in results]), return_counts=True)
        rows = in_hits.tolist()
        hits_of = dict(zip(rows, counts.tolist(), strict=True))
        statement = f"select row, id, metadata, checksum from items where row in {IN} order by row"
        stored = []
        for row, name, metadata, total in connection.execute(statement, parameter(rows)):
            if isinstance(name, str) and isinstance(metadata, str):  # else `verify` refuses it
                count_bytes(name, metadata, times=hits_of[row])
            stored.append((row, name, metadata, total))
        if len(stored) < len(rows):
            raise database.Inconsistent("items of some vectors are missing")
        texts = {}
        vectors, _ = view.vectors_of(np.array(rows, np.int64))
        for (row, name, metadata, total), vector in zip(stored, vectors, strict=True):
            database.verify(name, metadata, total, vector.astype("<f4", copy=False).tobytes())
            texts[row] = name, metadata
        hits = (
            [
                Hit(texts[row][0], value, database.decode_metadata(texts[row][1]))
                for row, value in zip(rows.tolist(), values.tolist(), strict=True)
            ]
            for rows, values in results
        )
        return Answers(hits, exact=results.exact)

    def _rows_where(self, connection: Connection, conditions: list[Condition]) -> np.ndarray:
        """The rows that match, ascending; kept for the next search with this filter."""
        key, cache = repr(conditions), self._rows_of_filters
        if key not in cache:
            text, parameters = database.condition_sql(conditions)
            statement = f"select row from items where {text} order by row"
            cache[key] = _numbers(connection.execute(statement, parameters))
            if len(cache) > _CACHED_FILTERS:
                cache.popitem(last=False)
        cache.move_to_end(key)
        return cache[key]

    def _refreshed(self, connection: Connection) -> View:
        """The view at the version of the present transaction."""
        view, settings = self._view, self._settings(connection)
        graph_state = [folder.signature(self._folder, name) for name in _APPROXIMATE]
        if view is None or view.version != settings.version:
            if view is None or view.version < settings.purged or self._outdated(view, settings):
                until = "vectors are read from the database until a writer repairs it"
                opened = self._derived(self._read_matrix(), settings, until)
                view = View(opened, dimension=self.dimension, similarity=self.similarity)
            for rows, vectors in _batches(connection, view.last_row, self.dimension):
                view.append(rows, vectors)
            view.delete(_deleted_since(connection, view.version), version=settings.version)
            self._rows_of_filters.clear()
        if view is not self._view or graph_state != self._graph_state:
            codes_or_graph = self._read_codes() or self._read_graph()
            opened = self._derived(codes_or_graph, settings, "every search is exact")
            if opened is not None and self._is_good(opened.recalls, opened.wanted):
                opened.delete(_deleted_since(connection, opened.version))
            else:
                opened = None
            view.graph, self._graph_state = opened, graph_state
        self._view = view
        return view

    def _derived(self, opened: Any, settings: database.Row, consequence: str) -> Any:
        """A derived file that was opened; None if it cannot be used."""
        if isinstance(opened, str):
            self._warn(f"{opened}: {consequence}")
        elif opened is not None and settings.purged <= opened.version <= settings.version:
            return opened
        return None

    def _outdated(self, view: View, settings: database.Row) -> bool:
        """Whether many rows were added since the view's matrix, and there is a newer one."""
        if view.behind <= max(10 * _FEW, _SHARE * settings.items):
            return False
        return matrix.position_of(self._folder)[0] > view.matrix_version

    def _read_matrix(self) -> matrix.Matrix | str | None:
        return matrix.read(self._folder, identity=self._identity, dimension=self.dimension)

    def _read_graph(self) -> graph.Graph | str | None:
        return graph.read(
            self._folder,
            identity=self._identity,
            dimension=self.dimension,
            similarity=self.similarity,
        )

    def _read_codes(self) -> codes.Codes | str | None:
        return codes.read(self._folder, identity=self._identity, dimension=self.dimension)

    def _matrix_is_damaged(self) -> bool:
        opened = self._read_matrix()
        if isinstance(opened, str):
            logging.warning("%s; it is made again from the database", opened)
        return isinstance(opened, str)

    def _lacks_much(self) -> bool:
        """Whether the matrix lacks more rows than a search should read from the database."""
        version, last_row = matrix.position_of(self._folder)
        (changed,) = self._connection.execute(
            "select (select count(*) from vectors where row > ?) + "
            "(select count(*) from deleted where version > ?)",
            (last_row, version),
        ).fetchone()
        return changed > max(_FEW, _SHARE * self._state(self._connection).items)

    def _graph_refusal(self) -> Exception | None:
        return graph.refusal()

    def _build(self, approximate: bool, recall: float, *, from_nothing: bool = False) -> None:
        with self._build_lock, self._snapshot() as connection, _full_disk(self._folder):
            self._write_matrix(connection)
            if approximate:
                self._write_graph(connection, recall, from_nothing)
            else:
                (self._folder / "graph.json").unlink(missing_ok=True)
            (self._folder / "codes.json").unlink(missing_ok=True)
            matrix.tidy(self._folder)
        with self._lock:
            self._view = None

    def _build_codes(self, first: codes.First, recall: float) -> None:
        with self._build_lock, self._snapshot() as connection, _full_disk(self._folder):
            self._write_matrix(connection)
            version, vectors = self._settings(connection).version, self._read_matrix()
            assert isinstance(vectors, matrix.Matrix)
            identity = self._identity
            codes.write(self._folder, vectors, version, first, identity=identity, wanted=recall)
            (self._folder / "graph.json").unlink(missing_ok=True)
            matrix.tidy(self._folder)
        with self._lock:
            self._view = None

    def _write_matrix(self, connection: Connection) -> None:
        settings = self._settings(connection)
        (last,) = connection.execute("select coalesce(max(row), 0) from vectors").fetchone()
        position = matrix.Position(self._identity, settings.version, last, settings.items)
        batches = _batches(connection, 0, self.dimension)
        matrix.write(self._folder, batches, position, self.dimension)

    def _write_graph(self, connection: Connection, recall: float, from_nothing: bool) -> None:
        """Adds what the graph lacks; from an empty one if that is much, or if recall is low."""
        settings, vectors, old = self._settings(connection), self._read_matrix(), self._read_graph()
        assert isinstance(vectors, matrix.Matrix)
        starts: list[graph.Graph | None] = [None]
        if isinstance(old, graph.Graph) and old.version >= settings.purged and not from_nothing:
            deleted = _deleted_since(connection, old.version)
            new = len(vectors.rows) - int(np.searchsorted(vectors.rows, old.last_row, "right"))
            if len(deleted) + new <= _REBUILD_SHARE * len(vectors.rows):
                old.delete(deleted)
                starts = [old, None]
        for start in starts:
            built = graph.grown(start, vectors, settings.version, self.similarity, recall)
            if built.recall >= recall:
                break
        graph.write(self._folder, built, identity=self._identity)

    def _compact(self, approximate: bool, recall: float) -> None:
        self._build(approximate, recall, from_nothing=True)
        with self._lock, self._errors():
            self._check_open()
            built = matrix.position_of(self._folder)[0]
            with transaction(self._connection, write=True) as connection:
                connection.execute("delete from deleted where version <= ?", (built,))
                connection.execute("update settings set purged = ?", (built,))
                connection.execute("delete from fields")
                texts = connection.execute("select distinct metadata from items")
                _insert_fields(connection, filters.fields_of(text for (text,) in texts))
            self._connection.execute("vacuum")
            self._connection.execute("pragma wal_checkpoint(truncate)")

    def _problems(self, connection: Connection) -> list[str]:
        texts = (text for (text,) in connection.execute("pragma integrity_check"))
        problems = [f"{self._file}: {' '.join(text.split())}" for text in texts if text != "ok"]
        rows = 0
        for item in database.stored(connection):
            rows += 1
            problems += self._changed(*item)
        (vectors,) = connection.execute("select count(*) from vectors").fetchone()
        counted = self._state(connection).items
        if not rows == vectors == counted:
            problems.append(f"{self._file}: {rows} items, {vectors} vectors, {counted} counted")
        derived = self._read_matrix(), self._read_graph(), self._read_codes()
        return problems + [problem for problem in derived if isinstance(problem, str)]

    def _changed(self, row: int, name: Any, metadata: Any, total: Any, blob: Any) -> list[str]:
        """What is wrong with a stored item."""
        if blob is None or len(blob) != 4 * self.dimension:
            return [f"{self._file}: item {name!r} (row {row}) has no vector"]
        if database.checksum(name, metadata, blob) != total:
            return [f"{self._file}: item {name!r} (row {row}) was changed"]
        return []

    def verify(self, after: int = 0, *, count: int = 1000) -> tuple[list[int], list[str]]:
        def read(connection: Connection) -> tuple[list[int], list[str]]:
            stored = database.stored(connection, "row > ?", (after,), count).fetchall()
            return [row for row, *_ in stored], [x for item in stored for x in self._changed(*item)]

        return self._read(read)

    def _facts(self, connection: Connection) -> dict[str, Any]:
        facts: dict[str, Any] = {"bytes": folder.size(self._folder)}
        names = {"items": "count", "version": "version", "recall@10": "recall"}
        names |= {"recalls": "recalls", "wanted": "wanted"}
        names |= {"search width": "expansion", "first": "first", "candidates": "candidates"}
        for file in _APPROXIMATE:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                manifest = reading.json_value((self._folder / file).read_bytes())
                facts["approximate"] = {
                    name: manifest[field] for name, field in names.items() if field in manifest
                }
        return facts

    def _current(self) -> int:
        return folder.current(self._path)

    def _switch(self) -> None:
        folder.point(self._path, self.generation)
        folder.tidy(self._path)

    def _discard(self) -> None:
        temporary = folder.temporary_of(self._path)
        os.rename(self._path, temporary)
        files.sync(self._path.parent)
        self.writable = False  # `close` need not write derived files
        self.close()
        shutil.rmtree(temporary, ignore_errors=True)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                with self._errors():
                    if self.writable and self._lacks_much():
                        with self._build_lock, self._snapshot() as connection:
                            self._write_matrix(connection)
            except (OSError, ValueError) as error:  # what is derived can be made later
                logging.warning("%s: the matrix was not updated: %s", self.place, error)
            finally:
                self._closed = True
                self._connection.close()
                self._view = None
                if self._writer_lock is not None:
                    self._writer_lock.close()


def _create_generation(path: pathlib.Path, settings: Settings) -> None:
    """The database of an empty index, in a folder of its own that appears when it is complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    for old in (temporary, path):
        if old.exists():
            shutil.rmtree(old)
    temporary.mkdir()
    database.create(temporary / "items.db", settings)
    (temporary / "acknowledged").write_text(f"{0:020d}\n")
    files.sync(temporary)
    os.rename(temporary, path)
    files.sync(path.parent)


def _insert_fields(connection: Connection, names: set[str]) -> None:
    rows = [(name,) for name in sorted(names)]
    connection.executemany("insert or ignore into fields values (?)", rows)


def _deleted_since(connection: Connection, version: int) -> np.ndarray:
    return _numbers(connection.execute("select row from deleted where version > ?", (version,)))


def _numbers(rows: sqlite3.Cursor) -> np.ndarray:
    return np.fromiter((row for (row,) in rows), np.int64)


def _batches(
    connection: Connection, after: int, dimension: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row numbers and vectors of items after a row, ascending."""
    cursor = database.stored(connection, "row > ?", (after,))
    while batch := cursor.fetchmany(_BATCH):
        for _, *item in batch:
            database.verify(*item)
        rows = np.fromiter((row for row, *_ in batch), np.int64, len(batch))
        yield rows, database.decode_vectors([blob for *_, blob in batch], dimension)


@contextlib.contextmanager
def _full_disk(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except (Damaged, Unavailable):  # what was read, and not the place where it is written
        raise
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror or error}") from error
