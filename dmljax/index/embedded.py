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
from collections.abc import Iterator, Sequence
from sqlite3 import Connection
from typing import IO, Any

import numpy as np
from absl import logging

from dmljax.files import writing as files
from dmljax.index import database, filters, folder, matrix
from dmljax.index.base import Index, Item, State
from dmljax.index.errors import Damaged, Superseded, Unavailable
from dmljax.index.filters import Condition
from dmljax.index.inputs import Settings
from dmljax.index.nearest import SIMILARITIES

_BATCH = 10_000  # rows that are read together
_FEW = 1000  # rows that the matrix may lack in any case
_FRACTION = 0.05  # fraction of the rows that the matrix may lack
_CACHED_FILTERS = 16


class EmbeddedIndex(Index):
    """An index in a folder: one writer, and any number of readers."""

    _dialect = database.DIALECT

    @classmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> EmbeddedIndex:
        path = pathlib.Path(place)
        with folder.created(path) as lock:
            _create_generation(path / folder.name_of(1), settings)
            folder.point(path, 1)
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
    def reindex(cls, place: str | os.PathLike, settings: Settings) -> EmbeddedIndex:
        path = pathlib.Path(place)
        folder.current(path)  # there must be one
        with folder.locked(path) as lock:
            generation = folder.tidy(path) + 1
            stored = None
            with contextlib.suppress(OSError), cls(path, generation) as index:
                stored = index.model, index.dimension, index.similarity
            if stored != settings:
                _create_generation(path / folder.name_of(generation), settings)
            return cls(path, generation, lock=lock)

    def __init__(self, path: pathlib.Path, generation: int, *, lock: IO[str] | None = None):
        super().__init__(str(path), generation, write=lock is not None)
        self._path, self._folder = path, path / folder.name_of(generation)
        self._file = self._folder / "items.db"
        self._writer_lock, self._build_lock = lock, threading.Lock()
        self._view: matrix.View | None = None
        self._rows_of_filters: dict[str, np.ndarray] = {}
        with self._errors(), contextlib.ExitStack() as stack:
            acknowledged = self._acknowledged()
            self._connection = database.connect(self._file, write=self.writable)
            stack.callback(self._connection.close)
            self._read_settings(self._connection)
            ((self._identity,),) = self._rows(self._connection, "select identity from settings")
            self._check_database(acknowledged)
            try:
                if self.writable and (isinstance(self._matrix(), str) or self._lacks_much()):
                    self._write_matrix()
                with self._transaction() as connection:
                    self._refreshed(connection)  # reports a damaged matrix
            except database.ItemChanged as error:  # it can be added again
                logging.warning("%s", error)
            stack.pop_all()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raises errors in one line; `Superseded` where a switch has deleted the files."""
        try:
            with database.one_line_errors(self._file):
                yield
        except OSError as error:
            if folder.current(self._path) > self.generation:
                problem = "was replaced since it was opened: open it again"
                raise Superseded(f"{self.place} {problem}") from error
            if not self._file.exists():
                raise database.damaged(self._file, "it does not exist") from None
            raise

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

    def _check_database(self, acknowledged: int) -> None:
        """Raises for a database whose -wal was deleted, or that is older than it was."""
        if (version := self._state(self._connection).version) < acknowledged:
            raise Damaged(
                f"{self._file} is at change {version}, but change {acknowledged} was acknowledged: "
                "its -wal file was deleted, or an older copy was put there. Restore items.db and "
                "items.db-wal together from a backup; to accept the loss, delete the file "
                f"{self._folder / 'acknowledged'}"
            )

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Connection]:
        with self._lock, self._errors():
            self._check_open()
            with database.transaction(self._connection, write=write) as connection:
                if write:
                    connection.execute("update settings set version = version + 1")
                yield connection
                version = self._state(connection).version if write else None
            if version is not None:
                self._acknowledge(version)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        with self._lock:
            self._check_open()
        with (
            self._errors(),
            contextlib.closing(database.connect(self._file, write=False)) as connection,
            database.transaction(connection),
        ):
            yield connection

    def _rows(self, transaction: Connection, text: str, parameters: Sequence[Any] = ()) -> list:
        return transaction.execute(
            text.format(settings="settings", items="items"), parameters
        ).fetchall()

    def _items(self, transaction: Connection, ids: list[str] | None) -> Iterator[Item]:
        chosen = () if ids is None else (f"id {self._dialect.ids}", [self._dialect.list_fn(ids)])
        count = 0
        for _, name, metadata, total, blob in database.stored(transaction, *chosen):
            database.verify(self._file, name, metadata, total, blob)
            vector = database.decode_vectors(self._file, [blob], self.dimension)[0].copy()
            yield Item(name, vector, database.decode_metadata(self._file, metadata))
            count += 1
        if ids is None and count != (counted := self._state(transaction).items):
            raise database.damaged(self._file, f"it has {count} items, and counted {counted}")

    def _insert(
        self,
        transaction: Connection,
        ids: list[str],
        vectors: np.ndarray,
        metadata: list[str],
        files: Sequence[tuple[str | None, str | None]],
    ) -> None:
        text = "select coalesce(max(seq), 0) from sqlite_sequence where name = 'items'"
        ((last,),) = self._rows(transaction, text)
        rows = range(last + 1, last + 1 + len(ids))
        blobs = [vector.astype("<f4", copy=False).tobytes() for vector in vectors]
        sums = map(database.checksum, ids, metadata, blobs)
        items = zip(rows, ids, metadata, sums, *zip(*files, strict=True), strict=True)
        transaction.executemany("insert into items values (?, ?, ?, ?, ?, ?)", items)
        transaction.executemany("insert into vectors values (?, ?)", zip(rows, blobs, strict=True))

    def _remove(self, transaction: Connection, ids: list[str]) -> None:
        text = f"delete from items where id {self._dialect.ids} returning row"
        rows = self._rows(transaction, text, [self._dialect.list_fn(ids)])
        transaction.executemany("delete from vectors where row = ?", rows)
        transaction.executemany(
            "insert into deleted values (?, (select version from settings))", rows
        )

    def _search(
        self, transaction: Connection, queries: np.ndarray, k: int, conditions: list[Condition]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[int, tuple[str, dict[str, Any]]]]:
        view = self._refreshed(transaction)
        allowed = self._rows_where(transaction, conditions) if conditions else None
        results = view.search(queries, k, SIMILARITIES[self.similarity], allowed)
        rows = np.unique(np.concatenate([rows for rows, _ in results]))
        text = f"select row, id, metadata, checksum from items where row {self._dialect.ids}"
        parameters = [self._dialect.list_fn(rows.tolist())]
        stored = self._rows(transaction, f"{text} order by row", parameters)
        if len(stored) < len(rows):
            raise database.damaged(self._file, "items of some vectors are missing")
        items = {}
        for (row, name, text, total), vector in zip(stored, view.vectors_of(rows), strict=True):
            blob = vector.astype("<f4", copy=False).tobytes()
            database.verify(self._file, name, text, total, blob)
            items[row] = name, database.decode_metadata(self._file, text)
        return results, items

    def _rows_where(self, transaction: Connection, conditions: list[Condition]) -> np.ndarray:
        """Returns the rows that match, ascending; kept for the next search with this filter."""
        key, cache = repr(conditions), self._rows_of_filters
        if key not in cache:
            if len(cache) == _CACHED_FILTERS:
                cache.clear()
            text, parameters = filters.to_sql(conditions, self._dialect)
            statement = f"select row from items where {text} order by row"
            cache[key] = _numbers(transaction.execute(statement, parameters))
        return cache[key]

    def _refreshed(self, transaction: Connection) -> matrix.View:
        """Returns the view at the version of the present transaction."""
        view, state = self._view, self._state(transaction)
        if view is not None and view.version == state.version:
            return view
        if view is None or self._outdated(view, state):
            stored = self._matrix()
            if isinstance(stored, str):
                problem = "vectors are read from the database until it is repaired"
                logging.warning("%s: %s", stored, problem)
                stored = None
            elif stored is not None and stored[0].version > state.version:
                stored = None
            view = matrix.View(self.dimension, stored)
        batches = list(self._batches(transaction, view.last_row))
        deleted = "select row from deleted where version > ?"
        rows = _numbers(transaction.execute(deleted, (view.version,)))
        view.update(batches, rows, version=state.version)
        self._rows_of_filters.clear()
        self._view = view
        return view

    def _batches(
        self, connection: Connection, after: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields row numbers and vectors of items after a row, ascending."""
        cursor = database.stored(connection, "row > ?", (after,))
        while batch := cursor.fetchmany(_BATCH):
            for _, *item in batch:
                database.verify(self._file, *item)
            rows = np.fromiter((row for row, *_ in batch), np.int64, len(batch))
            blobs = [blob for *_, blob in batch]
            yield rows, database.decode_vectors(self._file, blobs, self.dimension)

    def _outdated(self, view: matrix.View, state: State) -> bool:
        """Returns whether the matrix of a view lacks many rows, and there is a newer one."""
        lacks_much = view.behind > max(10 * _FEW, _FRACTION * state.items)
        return lacks_much and matrix.position(self._folder)[0] > view.matrix_version

    def _matrix(self) -> tuple[matrix.Position, matrix.Block] | str | None:
        return matrix.read(self._folder, identity=self._identity, dimension=self.dimension)

    def _lacks_much(self) -> bool:
        """Returns whether the matrix lacks more rows than a search should read.

        Or whether it is of a later version: then a backup of the database was restored.
        """
        version, last_row = matrix.position(self._folder)
        present = self._state(self._connection)
        text = (
            "select (select count(*) from vectors where row > ?) + "
            "(select count(*) from deleted where version > ?)"
        )
        ((changed,),) = self._rows(self._connection, text, (last_row, version))
        return version > present.version or changed > max(_FEW, _FRACTION * present.items)

    def _write_matrix(self) -> None:
        """Makes the matrix again, while others read and change the index."""
        with self._build_lock, self._snapshot() as connection:
            version, items = self._state(connection)
            ((last,),) = self._rows(connection, "select coalesce(max(row), 0) from vectors")
            position = matrix.Position(self._identity, version, last, items, self.dimension)
            try:
                matrix.write(self._folder, self._batches(connection, 0), position)
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

    def _problems(self, transaction: Connection) -> list[str]:
        texts = (text for (text,) in self._rows(transaction, "pragma integrity_check"))
        problems = [f"{self._file}: {' '.join(text.split())}" for text in texts if text != "ok"]
        items = 0
        for row, name, metadata, total, blob in database.stored(transaction):
            items += 1
            if database.checksum(name, metadata, blob) != total:
                problems.append(f"{self._file}: item {name!r} (row {row}) was changed")
        ((vectors,),) = self._rows(transaction, "select count(*) from vectors")
        counted = self._state(transaction).items
        if not items == vectors == counted:
            problems.append(f"{self._file}: {items} items, {vectors} vectors, {counted} counted")
        opened = self._matrix()
        return [*problems, opened] if isinstance(opened, str) else problems

    def _facts(self, transaction: Connection) -> dict[str, Any]:
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
