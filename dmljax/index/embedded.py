"""An index in a folder: SQLite holds the truth, and the matrix that searches read is derived.

A writer commits to SQLite (WAL, synchronous=full) before a call returns. The matrix of vectors is
made from the database, is verified by its digest before it is used, and is made again when it is
damaged. Searches read rows that it lacks from the database.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from sqlite3 import Connection
from typing import Any, TypeVar

import numpy as np
from absl import logging

from dmljax.files import writing as files
from dmljax.index import database, folder, matrix
from dmljax.index.base import Hit, Index, Item, State
from dmljax.index.database import IN, one_line_errors, parameter, transaction
from dmljax.index.errors import Damaged, Superseded, Unavailable
from dmljax.index.filters import Condition
from dmljax.index.inputs import Settings
from dmljax.index.nearest import SIMILARITIES

R = TypeVar("R")

_BATCH = 10_000  # rows that are read together
_FEW = 1000  # rows that the matrix may lack in any case
_FRACTION = 0.05  # fraction of the rows that the matrix may lack
_CACHED_FILTERS = 16


class EmbeddedIndex(Index[Connection]):
    """An index in a folder: one writer, and any number of readers."""

    @classmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> EmbeddedIndex:
        path = pathlib.Path(place)
        lock = folder.create(path)
        try:
            _create_generation(path / folder.name_of(1), settings)
            folder.point(path, 1)
            return cls(path, 1, lock=lock)
        except BaseException:
            lock.close()
            folder.discard(path)
            raise

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
    def reindex(cls, place: str | os.PathLike, settings: Settings) -> EmbeddedIndex:
        path = pathlib.Path(place)
        folder.current(path)  # there must be one
        with folder.locked(path) as lock:
            generation = folder.tidy(path) + 1
            if not cls._continues(path, generation, settings):
                _create_generation(path / folder.name_of(generation), settings)
            return cls(path, generation, lock=lock)

    @classmethod
    def _continues(cls, path: pathlib.Path, generation: int, settings: Settings) -> bool:
        """Returns whether a generation with these settings exists already."""
        try:
            with cls(path, generation) as index:
                return (index.model, index.dimension, index.similarity) == settings
        except OSError:
            return False

    def __init__(self, path: pathlib.Path, generation: int, *, lock: Any = None):
        super().__init__(str(path), generation, write=lock is not None)
        self._path, self._folder = path, path / folder.name_of(generation)
        self._file = self._folder / "items.db"
        self._writer_lock, self._build_lock = lock, threading.Lock()
        self._view: matrix.View | None = None
        self._rows_of_filters: dict[str, np.ndarray] = {}
        with self._errors(), contextlib.ExitStack() as stack:
            self._open(stack)
            stack.pop_all()

    def _open(self, stack: contextlib.ExitStack) -> None:
        """Connects, checks and reads the first view; `stack` closes the connection again."""
        acknowledged = self._acknowledged()
        if not self._file.exists():
            raise Damaged(
                f"{self._file} does not exist: restore the folder from a backup, or make the index "
                "again"
            )
        self._connection = database.connect(self._file, write=self.writable)
        stack.callback(self._connection.close)
        settings = database.read_settings(self._connection, self._file)
        self._check_database(settings.version, acknowledged)
        self.model, self.dimension = settings.model, settings.dimension
        self.similarity, self._identity = settings.similarity, settings.identity
        try:
            if self.writable and (isinstance(self._matrix(), str) or self._lacks_much()):
                self._write_matrix()
            self._read(self._refreshed)  # reports a damaged matrix; makes the first search quick
        except Damaged as error:  # whoever opens the index can add a changed item again
            if not isinstance(error.__cause__, database.ItemChanged):
                raise
            logging.warning("%s", error)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises errors in one line; `Superseded` where a switch has deleted the files."""
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
            (self._folder / "acknowledged").write_text(f"{version}\n")

    def _check_database(self, version: int, acknowledged: int) -> None:
        """Raises for a database from which a part was cut off, or whose -wal was deleted."""
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
        if self._file.stat().st_size < pages * size:  # it may be in the -wal
            result = self._connection.execute("pragma quick_check(1)").fetchone()[0]
            if result != "ok":
                raise database.Inconsistent(" ".join(result.split()))

    def _read(self, read_fn: Callable[[Connection], R]) -> R:
        with self._lock, self._errors():
            self._check_open()
            with transaction(self._connection) as connection:
                return read_fn(connection)

    def _change(self, change_fn: Callable[[Connection], int]) -> None:
        with self._lock, self._errors():
            self._check_open()
            with transaction(self._connection, write=True) as connection:
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
            vector = database.decode_vectors([blob], self.dimension)[0].copy()
            yield Item(name, vector, database.decode_metadata(metadata))
            count += 1
        if ids is None and count != (counted := self._state(connection).items):
            raise database.Inconsistent(f"it has {count} items, and counted {counted}")

    def _insert(
        self,
        connection: Connection,
        ids: list[str],
        vectors: np.ndarray,
        metadata: list[str],
        files: Sequence[tuple[str | None, str | None]],
    ) -> None:
        (last,) = connection.execute(
            "select coalesce(max(seq), 0) from sqlite_sequence where name = 'items'"
        ).fetchone()
        rows = range(last + 1, last + 1 + len(ids))
        blobs = [vector.astype("<f4", copy=False).tobytes() for vector in vectors]
        sums = map(database.checksum, ids, metadata, blobs)
        items = zip(rows, ids, metadata, sums, *zip(*files, strict=True), strict=True)
        connection.executemany("insert into items values (?, ?, ?, ?, ?, ?)", items)
        connection.executemany("insert into vectors values (?, ?)", zip(rows, blobs, strict=True))

    def _files(self, connection: Connection, ids: list[str] | None) -> sqlite3.Cursor:
        text, parameters = ("true", ()) if ids is None else (f"id in {IN}", parameter(ids))
        statement = f"select id, folder, stamp from items where folder is not null and {text}"
        return connection.execute(statement, parameters)

    def _remove(self, connection: Connection, ids: list[str]) -> None:
        rows = connection.execute(
            f"delete from items where id in {IN} returning row", parameter(ids)
        ).fetchall()
        connection.executemany("delete from vectors where row = ?", rows)
        connection.executemany(
            "insert into deleted values (?, (select version from settings))", rows
        )

    def _fields(self, connection: Connection) -> set[str]:
        statement = "select distinct key from items, json_each(metadata)"
        return {name for (name,) in connection.execute(statement)}

    def _has_field(self, connection: Connection, field: str) -> bool:
        statement = "select 1 from items where json_type(metadata, ?) is not null limit 1"
        path = (database.json_path(field),)
        return connection.execute(statement, path).fetchone() is not None

    def _count(self, connection: Connection, conditions: list[Condition]) -> int:
        text, parameters = database.condition_sql(conditions)
        statement = f"select count(*) from items where {text}"
        return connection.execute(statement, parameters).fetchone()[0]

    def _search(
        self, connection: Connection, queries: np.ndarray, k: int, conditions: list[Condition]
    ) -> list[list[Hit]]:
        view = self._refreshed(connection)
        allowed = self._rows_where(connection, conditions) if conditions else None
        results = view.search(queries, k, allowed=allowed)
        rows = np.unique(np.concatenate([rows for rows, _ in results]))
        statement = f"select row, id, metadata, checksum from items where row in {IN} order by row"
        stored = connection.execute(statement, parameter(rows.tolist())).fetchall()
        if len(stored) < len(rows):
            raise database.Inconsistent("items of some vectors are missing")
        items = {}
        for (row, name, metadata, total), vector in zip(stored, view.vectors_of(rows), strict=True):
            database.verify(name, metadata, total, vector.astype("<f4", copy=False).tobytes())
            items[row] = name, metadata
        return [
            [
                Hit(items[row][0], value, database.decode_metadata(items[row][1]))
                for row, value in zip(rows.tolist(), values.tolist(), strict=True)
            ]
            for rows, values in results
        ]

    def _rows_where(self, connection: Connection, conditions: list[Condition]) -> np.ndarray:
        """Returns the rows that match, ascending; kept for the next search with this filter."""
        key, cache = repr(conditions), self._rows_of_filters
        if key not in cache:
            if len(cache) == _CACHED_FILTERS:
                cache.clear()
            text, parameters = database.condition_sql(conditions)
            statement = f"select row from items where {text} order by row"
            cache[key] = _numbers(connection.execute(statement, parameters))
        return cache[key]

    def _refreshed(self, connection: Connection) -> matrix.View:
        """Returns the view at the version of the present transaction."""
        view, settings = self._view, self._settings(connection)
        if view is not None and view.version == settings.version:
            return view
        if view is None or self._outdated(view, settings):
            opened = self._matrix()
            if isinstance(opened, str):
                logging.warning(
                    "%s: vectors are read from the database until it is repaired", opened
                )
                opened = None
            elif opened is not None and opened.version > settings.version:
                opened = None
            similarity = SIMILARITIES[self.similarity]
            view = matrix.View(opened, dimension=self.dimension, similarity=similarity)
        batches = list(_batches(connection, view.last_row, self.dimension))
        deleted = "select row from deleted where version > ?"
        rows = _numbers(connection.execute(deleted, (view.version,)))
        view.update(batches, rows, version=settings.version)
        self._rows_of_filters.clear()
        self._view = view
        return view

    def _outdated(self, view: matrix.View, settings: database.Row) -> bool:
        """Returns whether the matrix of a view lacks many rows, and there is a newer one."""
        lacks_much = view.behind > max(10 * _FEW, _FRACTION * settings.items)
        return lacks_much and matrix.position(self._folder)[0] > view.matrix_version

    def _matrix(self) -> matrix.Matrix | str | None:
        return matrix.read(self._folder, identity=self._identity, dimension=self.dimension)

    def _lacks_much(self) -> bool:
        """Returns whether the matrix lacks more rows than a search should read.

        Or whether it is of a later version: then a backup of the database was restored.
        """
        version, last_row = matrix.position(self._folder)
        present = self._state(self._connection)
        (changed,) = self._connection.execute(
            "select (select count(*) from vectors where row > ?) + "
            "(select count(*) from deleted where version > ?)",
            (last_row, version),
        ).fetchone()
        return version > present.version or changed > max(_FEW, _FRACTION * present.items)

    def _write_matrix(self) -> None:
        """Makes the matrix again, while others read and change the index."""
        with self._build_lock, self._snapshot() as connection:
            settings = self._settings(connection)
            (last,) = connection.execute("select coalesce(max(row), 0) from vectors").fetchone()
            position = matrix.Position(self._identity, settings.version, last, settings.items)
            batches = _batches(connection, 0, self.dimension)
            try:
                matrix.write(self._folder, batches, position, self.dimension)
            except (Damaged, Unavailable):  # what was read, and not the place where it is written
                raise
            except OSError as error:
                problem = f"cannot be written: {error.strerror or error}"
                raise Unavailable(f"{self._folder} {problem}") from error

    def compact(self) -> None:
        self._check_writable()
        self._write_matrix()
        with self._lock, self._errors():
            self._check_open()
            self._connection.execute("vacuum")
            self._connection.execute("pragma wal_checkpoint(truncate)")
            self._view = None

    def _problems(self, connection: Connection) -> list[str]:
        texts = (text for (text,) in connection.execute("pragma integrity_check"))
        problems = [f"{self._file}: {' '.join(text.split())}" for text in texts if text != "ok"]
        items = 0
        for row, name, metadata, total, blob in database.stored(connection):
            items += 1
            if database.checksum(name, metadata, blob) != total:
                problems.append(f"{self._file}: item {name!r} (row {row}) was changed")
        (vectors,) = connection.execute("select count(*) from vectors").fetchone()
        counted = self._state(connection).items
        if not items == vectors == counted:
            problems.append(f"{self._file}: {items} items, {vectors} vectors, {counted} counted")
        opened = self._matrix()
        return [*problems, opened] if isinstance(opened, str) else problems

    def _facts(self, connection: Connection) -> dict[str, Any]:
        return {"bytes": folder.size(self._folder)}

    def _current(self) -> int:
        return folder.current(self._path)

    def _switch(self) -> None:
        folder.point(self._path, self.generation)
        folder.tidy(self._path)

    def _discard(self) -> None:
        self.writable = False  # `close` need not write the matrix
        self.close()
        folder.discard(self._path)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                with self._errors():
                    if self.writable and self._lacks_much():
                        self._write_matrix()
            except (OSError, ValueError) as error:  # what is derived can be made later
                logging.warning("%s: the matrix was not updated: %s", self.place, error)
            finally:
                self._closed = True
                self._connection.close()
                self._view = None
                if self._writer_lock is not None:
                    self._writer_lock.close()


def _create_generation(path: pathlib.Path, settings: Settings) -> None:
    """Creates the database of an empty index in a folder that appears when it is complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    for old in (temporary, path):
        if old.exists():
            shutil.rmtree(old)
    temporary.mkdir()
    database.create(temporary / "items.db", settings)
    (temporary / "acknowledged").write_text("0\n")
    files.sync(temporary)
    os.rename(temporary, path)
    files.sync(path.parent)


def _numbers(rows: sqlite3.Cursor) -> np.ndarray:
    return np.fromiter((row for (row,) in rows), np.int64)


def _batches(
    connection: Connection, after: int, dimension: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields row numbers and vectors of items after a row, ascending."""
    cursor = database.stored(connection, "row > ?", (after,))
    while batch := cursor.fetchmany(_BATCH):
        for _, *item in batch:
            database.verify(*item)
        rows = np.fromiter((row for row, *_ in batch), np.int64, len(batch))
        yield rows, database.decode_vectors([blob for *_, blob in batch], dimension)
