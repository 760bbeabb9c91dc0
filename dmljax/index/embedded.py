"""An index in a folder: an SQLite database, and a file of vectors that searches map into memory.

Row r of the table `items` has the vector at position r - 1 of `vectors-N.bin`. A writer flushes
vectors to the disk before it commits their rows (WAL, synchronous=full). A row keeps its vector for
ever: replacing an item gives it a new row, and `compact` makes a new file. The checksums of an item
are compared when a search first maps its vector, and whenever the item is read.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from sqlite3 import Connection
from typing import IO, Any, NamedTuple

import numpy as np

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index import database, filters, folder, inputs, nearest
from dmljax.index.base import Index, Item
from dmljax.index.filters import Condition
from dmljax.index.inputs import Damaged, Settings, Superseded

_CACHED_FILTERS = 16


class _View(NamedTuple):
    """The vectors [rows, dimension] of file `number`; those that are `alive` belong to items."""

    version: int
    number: int
    vectors: np.ndarray
    alive: np.ndarray


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
        self._file, self._writer_lock = self._folder / "items.db", lock
        self._view: _View | None = None
        self._mapped: tuple[tuple[int, int], np.ndarray] | None = None
        self._where_of_filters: dict[str, np.ndarray] = {}
        with self._errors(), contextlib.ExitStack() as stack:
            acknowledged = self._acknowledged()
            self._connection = database.connect(self._file, write=self.writable)
            stack.callback(self._connection.close)
            self._read_settings(self._connection)
            if (version := self._state(self._connection).version) < acknowledged:
                raise Damaged(
                    f"{self._file} is at change {version}, but change {acknowledged} was "
                    "acknowledged: its -wal file was deleted, or an older copy was put there. "
                    "Restore items.db and items.db-wal together from a backup; to accept the loss, "
                    f"delete the file {self._folder / 'acknowledged'}"
                )
            with database.transaction(self._connection) as connection:
                self._vectors(connection)  # now: `switch` deletes the files of earlier readers
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
                raise self._damaged("it does not exist") from None
            raise

    def _damaged(self, problem: str) -> Damaged:
        return database.damaged(self._file, problem)

    def _changed(self, name: Any) -> Damaged:
        return Damaged(
            f"{self._folder}: item {inputs.shorten(name)} is not what was added: its checksum "
            "differs. Add it again with replace=True (dmljax index add --replace), or restore the "
            "folder from a backup; `dmljax index check` lists all such items"
        )

    # A commit is acknowledged here after it is on the disk, so this number is never ahead of the
    # database, unless a part of the database is lost.
    def _acknowledged(self) -> int:
        try:
            return int((self._folder / "acknowledged").read_text())
        except (OSError, ValueError):
            return 0

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
                with contextlib.suppress(OSError):
                    (self._folder / "acknowledged").write_text(f"{version}\n")

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

    def _vectors(self, connection: Connection) -> tuple[int, np.ndarray]:
        """Returns the number and the vectors of the file at the present transaction."""
        ((number, count),) = self._rows(connection, "select file, rows from settings")
        mapped = self._mapped  # a scan in another thread may be at another transaction
        if mapped is None or mapped[0] != (number, count):
            path, vectors = self._path_of(number), np.zeros((0, self.dimension), "<f4")
            try:
                if count:
                    shape = (count, self.dimension)
                    vectors = np.asarray(np.memmap(path, "<f4", "r", shape=shape))
            except (FileNotFoundError, ValueError, TypeError, OverflowError) as error:
                raise self._damaged(f"{path.name} is missing or too short") from error
            self._mapped = mapped = (number, count), vectors
        return number, mapped[1]

    def _path_of(self, number: int) -> pathlib.Path:
        return self._folder / f"vectors-{number}.bin"

    def _stored(
        self, connection: Connection, where: str = "true", parameters: Sequence[Any] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Yields row, id, metadata, the checksums of text and vector, and the vector, by row."""
        _, vectors = self._vectors(connection)
        text = "select row, id, metadata, text_sum, vector_sum from items "
        for row in connection.execute(f"{text} where {where} order by row", parameters):
            is_there = 1 <= row[0] <= len(vectors)
            yield *row, vectors[row[0] - 1].tobytes() if is_there else b""

    def _items(self, transaction: Connection, ids: list[str] | None) -> Iterator[Item]:
        chosen = () if ids is None else (f"id {self._dialect.ids}", [self._dialect.list_fn(ids)])
        count = 0
        for _, *item, vector in self._stored(transaction, *chosen):
            name, metadata = self._checked(*item, vector)
            yield Item(name, np.frombuffer(vector, "<f4").astype(np.float32), metadata)
            count += 1
        if ids is None and count != (counted := self._state(transaction).items):
            raise self._damaged(f"it has {count} items, and counted {counted}")

    def _checked(self, name: Any, metadata: Any, *rest: Any) -> tuple[str, dict[str, Any]]:
        """Returns id and metadata of an item whose checksums are the stored ones."""
        if not _is_intact(name, metadata, *rest):
            raise self._changed(name)
        with contextlib.suppress(ValueError):
            if isinstance(decoded := reading.json_value(metadata), dict):
                return name, decoded
        raise self._damaged("the metadata of an item is not a JSON object")  # and has a checksum

    def _insert(
        self,
        transaction: Connection,
        ids: list[str],
        vectors: np.ndarray,
        metadata: list[str],
        files: Sequence[tuple[str | None, str | None]],
    ) -> None:
        blobs = [vector.astype("<f4", copy=False).tobytes() for vector in vectors]
        number, stored = self._vectors(transaction)
        with self._path_of(number).open("r+b") as file:
            file.seek(stored.nbytes)  # overwrites what an interrupted call left
            file.write(b"".join(blobs))
            file.flush()
            os.fsync(file.fileno())
        count = len(stored) + len(ids)
        rows, sums = range(len(stored) + 1, count + 1), map(_text_sum, ids, metadata)
        columns = rows, ids, metadata, sums, map(zlib.crc32, blobs), *zip(*files, strict=True)
        transaction.executemany(
            "insert into items values (?, ?, ?, ?, ?, ?, ?)", zip(*columns, strict=True)
        )
        transaction.execute("update settings set rows = ?", [count])

    def _remove(self, transaction: Connection, ids: list[str]) -> None:
        text = f"delete from items where id {self._dialect.ids} returning row"
        rows = self._rows(transaction, text, [self._dialect.list_fn(ids)])
        transaction.executemany(
            "insert into deleted values (?, (select version from settings))", rows
        )

    def _search(
        self, transaction: Connection, queries: np.ndarray, k: int, conditions: list[Condition]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[int, tuple[str, dict[str, Any]]]]:
        view = self._refreshed(transaction)
        where = self._where(transaction, conditions, view) if conditions else view.alive
        similarity = nearest.SIMILARITIES[self.similarity]
        results = nearest.search(queries, view.vectors, k, similarity, where=where)
        positions = np.unique(np.concatenate([positions for positions, _ in results]))
        text = "select row - 1, id, metadata, text_sum, vector_sum from items"
        parameters = [self._dialect.list_fn((positions + 1).tolist())]
        stored = self._rows(transaction, f"{text} where row {self._dialect.ids}", parameters)
        if len(stored) < len(positions):
            raise self._damaged("items of some vectors are missing")
        items = {i: self._checked(*item, view.vectors[i].tobytes()) for i, *item in stored}
        return results, items

    def _where(
        self, transaction: Connection, conditions: list[Condition], view: _View
    ) -> np.ndarray:
        """Marks the vectors of items that match; keeps them for the next search."""
        key, cache = repr(conditions), self._where_of_filters
        if key not in cache:
            if len(cache) == _CACHED_FILTERS:
                cache.clear()
            text, parameters = filters.to_sql(conditions, self._dialect)
            statement = f"select row - 1 from items where {text}"
            cache[key] = np.zeros(len(view.alive), bool)
            cache[key][_numbers(transaction.execute(statement, parameters))] = True
        return cache[key]

    def _refreshed(self, transaction: Connection) -> _View:
        """Returns the view at the present transaction; verifies the vectors that are new to it."""
        (number, vectors), state = self._vectors(transaction), self._state(transaction)
        view = self._view
        if view is None or view.number != number:
            view = _View(-1, number, vectors[:0], np.zeros(0, bool))
        if view.version == state.version:
            return view
        seen, alive = len(view.alive), np.zeros(len(vectors), bool)
        alive[:seen] = view.alive
        if len(vectors) > seen:
            for row, name, *_, total, vector in self._stored(transaction, "row > ?", [seen]):
                if zlib.crc32(vector) != total:
                    raise self._changed(name)
                alive[row - 1] = True
        deleted = "select row - 1 from deleted where version > ? and row <= ?"
        alive[_numbers(transaction.execute(deleted, (view.version, len(vectors))))] = False
        if (total := int(alive.sum())) != state.items:
            raise self._damaged(f"it has {total} vectors of items, and counted {state.items}")
        self._where_of_filters.clear()
        self._view = _View(state.version, number, vectors, alive)
        return self._view

    def compact(self) -> None:
        self._check_writable()
        with self._lock, self._errors():
            self._check_open()
            with database.transaction(self._connection, write=True) as connection:
                old, vectors = self._vectors(connection)
                if len(vectors) != self._state(connection).items:
                    self._move(connection)
            self._connection.execute("vacuum")
            busy, *_ = self._connection.execute("pragma wal_checkpoint(truncate)").fetchone()
            new, _ = self._vectors(self._connection)
            kept = {old, new} if busy else {new}  # a reader may be about to map the old file
            for path in {*self._folder.glob("vectors-*.bin")} - {*map(self._path_of, kept)}:
                path.unlink()

    def _move(self, connection: Connection) -> None:
        """Writes the vectors of all items to a new file, and gives the items its rows."""
        version, count = self._state(connection)
        rows = []
        with files.atomic_writer(self._path_of(version), "wb") as file:
            for row, *item in self._stored(connection):
                self._checked(*item)
                file.write(item[-1])
                rows.append(row)
        if len(rows) != count:
            raise self._damaged(f"it has {len(rows)} items, and counted {count}")
        # Rows only become smaller, so in this order no item takes the row of another one.
        connection.executemany("update items set row = ? where row = ?", enumerate(rows, start=1))
        connection.execute("delete from deleted")
        connection.execute("update settings set file = ?, rows = ?", [version, count])

    def _problems(self, transaction: Connection) -> list[str]:
        texts = (text for (text,) in self._rows(transaction, "pragma integrity_check"))
        problems = [f"{self._file}: {' '.join(text.split())}" for text in texts if text != "ok"]
        items = 0
        for row, *item in self._stored(transaction):
            items += 1
            if not _is_intact(*item):
                problems.append(f"{self._folder}: item {item[0]!r} (row {row}) was changed")
        if items != (counted := self._state(transaction).items):
            problems.append(f"{self._file}: {items} items, {counted} counted")
        return problems

    def _facts(self, transaction: Connection) -> dict[str, Any]:
        return {"bytes": folder.size(self._folder)}

    def _current(self) -> int:
        return folder.current(self._path)

    def _switch(self) -> None:
        folder.point(self._path, self.generation)
        folder.tidy(self._path)

    def _discard(self) -> None:
        self.close()
        folder.discard(self._path)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed, self._view, self._mapped = True, None, None
                self._connection.close()
                if self._writer_lock is not None:
                    self._writer_lock.close()


def _create_generation(path: pathlib.Path, settings: Settings) -> None:
    """Creates the database of an empty index in a folder that appears when it is complete."""
    if path.exists():
        shutil.rmtree(path)
    with files.atomic_folder(path) as temporary:
        database.create(temporary / "items.db", settings)
        (temporary / "vectors-0.bin").touch()
        (temporary / "acknowledged").write_text("0\n")


def _numbers(rows: sqlite3.Cursor) -> np.ndarray:
    return np.fromiter((row for (row,) in rows), np.int64)


def _text_sum(name: str, metadata: str) -> int:
    return zlib.crc32(metadata.encode(), zlib.crc32(name.encode()))


def _is_intact(name: Any, metadata: Any, text_sum: Any, vector_sum: Any, vector: bytes) -> bool:
    """Compares the checksums of an item; damage can change the type of a value, too."""
    is_text = isinstance(name, str) and isinstance(metadata, str)
    return is_text and (_text_sum(name, metadata), zlib.crc32(vector)) == (text_sum, vector_sum)
