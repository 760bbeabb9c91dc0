"""An index in a folder: SQLite holds the truth, and what searches read is derived from it.

A writer commits to SQLite (WAL, synchronous=full) before a call returns. The matrix of vectors
and the graph are made from the database, are verified by their digests before they are opened, and
are made again when they are damaged. Rows that they lack are searched exactly.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import secrets
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from absl import logging

from dmljax.index import database, filters, folder, graph, inputs, matrix
from dmljax.index.base import Index, Item, Record
from dmljax.index.database import one_line_errors, transaction
from dmljax.index.errors import (
    Damaged,
    DuplicateId,
    InvalidInput,
    Unavailable,
    UnknownId,
)
from dmljax.index.filters import Condition
from dmljax.index.view import View

__all__ = ["EmbeddedIndex", "create", "open", "reindex"]

_BATCH = 10_000  # rows that are read together
_FEW = 1000  # rows that a derived file may lack in any case
_SHARE = 0.05  # rows that a derived file may lack, of all
_GRAPH_FROM = 50_000  # items from which on a graph is built by default
_ANEW_SHARE = 0.3  # of all rows: after more changes the graph is built from an empty one
_CACHED_FILTERS = 16
_MARKS = 500  # parameters of one statement


def create(path: pathlib.Path, *, model: str, dimension: int, similarity: str) -> EmbeddedIndex:
    """An empty index, open for writing. `path` appears when it is complete."""
    temporary, lock = folder.create(path)
    try:
        _create_generation(temporary / "generation-1", model, dimension, similarity)
        folder.point(temporary, "generation-1")
        if path.exists():  # rename would replace an empty folder
            raise InvalidInput(f"{path} exists already: choose another name")
        os.rename(temporary, path)
        folder.sync(path.parent)
    except BaseException:
        lock.close()
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return EmbeddedIndex(path, "generation-1", lock=lock)


def open(path: pathlib.Path, *, write: bool) -> EmbeddedIndex:
    """The index in a folder."""
    name = folder.current(path)
    if not write:
        return EmbeddedIndex(path, name)
    lock = folder.lock(path)
    try:
        name = folder.current(path)
        folder.tidy(path)
        return EmbeddedIndex(path, name, lock=lock)
    except BaseException:
        lock.close()
        raise


def reindex(path: pathlib.Path, *, model: str, dimension: int, similarity: str) -> EmbeddedIndex:
    """The index of another model beside the present one, empty or as far as it was filled."""
    present = folder.current(path)
    lock = folder.lock(path)
    try:
        folder.tidy(path)
        number = int(present.partition("-")[2]) + 1
        name = f"generation-{number}"
        if not _holds(path, name, model, dimension, similarity):
            _create_generation(path / name, model, dimension, similarity)
        return EmbeddedIndex(path, name, lock=lock)
    except BaseException:
        lock.close()
        raise


def _holds(path: pathlib.Path, name: str, model: str, dimension: int, similarity: str) -> bool:
    """Whether an index of this model was begun under this name."""
    wanted = model, dimension, similarity
    if not (path / name).exists():
        return False
    try:
        with EmbeddedIndex(path, name) as index:
            return (index.model, index.dimension, index.similarity) == wanted
    except OSError:
        return False


def _create_generation(path: pathlib.Path, model: str, dimension: int, similarity: str) -> None:
    """The database of an empty index, in a folder of its own that appears when it is complete."""
    temporary = path.with_name(f"{path.name}.tmp")
    for old in (temporary, path):
        if old.exists():
            shutil.rmtree(old)
    temporary.mkdir()
    file = temporary / "items.db"
    settings = database.Settings(
        database.FORMAT, model, dimension, similarity, secrets.token_hex(16), 0, 0, 0
    )
    with one_line_errors(file):
        connection = database.connect(file, write=True, create=True)
        with contextlib.closing(connection):
            database.create_tables(connection, settings)
    (temporary / "acknowledged").write_text(f"{0:020d}\n")
    folder.sync(temporary)
    os.rename(temporary, path)
    folder.sync(path.parent)


class EmbeddedIndex(Index):
    """An index in a folder. Threads may share it; their calls run one after another."""

    def __init__(self, path: pathlib.Path, generation: str, *, lock: Any = None):
        self.place, self.writable = str(path), lock is not None
        self._path, self._generation = path, generation
        self._folder = path / generation
        self._file = self._folder / "items.db"
        self._writer_lock, self._lock = lock, threading.RLock()
        self._build_lock = threading.Lock()
        self._view: View | None = None
        self._allowed: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()
        self._warned: set[str] = set()
        self._graph_state: tuple[int, int] | None = None  # of the manifest that was read last
        acknowledged = self._acknowledged()
        wal, shm = (self._file.with_name(f"items.db{end}") for end in ("-wal", "-shm"))
        unclean = shm.exists() and not wal.exists()
        if not self._file.exists():
            raise Damaged(
                f"{self._file} does not exist: restore the folder from a backup, or make the index "
                "again"
            )
        with one_line_errors(self._file):
            self._connection = database.connect(self._file, write=self.writable)
            try:
                settings = database.read_settings(self._connection, self._file)
                self._check_database(settings.version, acknowledged, unclean)
            except BaseException:
                self._connection.close()
                raise
        self.model, self.dimension = settings.model, settings.dimension
        self.similarity, self._identity = settings.similarity, settings.identity
        self._closed = False
        try:
            if self.writable and (self._matrix_problem() or self._lacks_much()):
                with self._snapshot() as connection, _full_disk(self._folder):
                    self._write_matrix(connection, settings)
            with self._read():
                pass  # reports damaged files, and makes the first search quick
        except BaseException:
            self._connection.close()
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

    @contextlib.contextmanager
    def _read(self) -> Iterator[tuple[database.Settings, View]]:
        """A read transaction, and the vectors as they are in it."""
        with self._lock, one_line_errors(self._file):
            self._check_open()
            with transaction(self._connection):
                settings = database.read_settings(self._connection, self._file)
                yield settings, self._refresh(settings)

    @contextlib.contextmanager
    def _change(self) -> Iterator[int]:
        """A write transaction; the number of the change."""
        with self._lock, one_line_errors(self._file):
            self._check_open()
            with transaction(self._connection, write=True):
                (version,) = self._connection.execute(
                    "update settings set version = version + 1 returning version"
                ).fetchone()
                yield version
            self._acknowledge(version)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput(f"{self.place} is closed: open it again")

    def _refresh(self, settings: database.Settings) -> View:
        """The view at the version of the present transaction."""
        view = self._view
        graph_state = _state(self._folder / "graph.json")
        if view is not None and view.version == settings.version:
            if graph_state != self._graph_state:
                self._load_graph(view, settings, graph_state)
            return view
        if view is None or view.version < settings.purged or self._outdated(view, settings):
            view = self._load(settings)
        (last,) = self._connection.execute("select max(row) from vectors").fetchone()
        if (last or 0) > view.last_row:
            for rows, vectors in _batches(self._connection, view.last_row, self.dimension):
                view.change(view.version, rows, vectors, np.zeros(0, np.int64))
        deleted = self._deleted_since(view.version)
        nothing = np.zeros(0, np.int64), np.zeros((0, self.dimension), np.float32)
        view.change(settings.version, *nothing, deleted)
        if view is not self._view or graph_state != self._graph_state:
            self._load_graph(view, settings, graph_state)
        self._view = view
        self._allowed.clear()
        return view

    def _load_graph(
        self, view: View, settings: database.Settings, state: tuple[int, int] | None
    ) -> None:
        """Gives the view the graph on the disk, or none: then every search is exact."""
        opened = self._read_graph()
        if isinstance(opened, str):
            self._warn(f"{opened}: every search is exact")
            opened = None
        if opened is not None and not settings.purged <= opened.version <= settings.version:
            opened = None
        if opened is not None:
            if opened.recall < graph.LEAST_RECALL:
                self._warn(
                    f"the graph's recall@10 is {opened.recall:.3f}, below {graph.LEAST_RECALL}: "
                    "every search is exact"
                )
                opened = None
            else:
                opened.delete(self._deleted_since(opened.version))
        view.graph, self._graph_state = opened, state

    def _deleted_since(self, version: int) -> np.ndarray:
        numbers = self._connection.execute("select row from deleted where version > ?", (version,))
        return np.fromiter((row for (row,) in numbers), np.int64)

    def _outdated(self, view: View, settings: database.Settings) -> bool:
        """Whether much was added since the view's matrix, and there is a newer one."""
        if view.behind <= max(10 * _FEW, _SHARE * settings.items):
            return False
        return matrix.position_of(self._folder)[0] > view.matrix_version

    def _load(self, settings: database.Settings) -> View:
        """The view of the matrix on the disk; of nothing if it is missing, damaged or too old."""
        opened = self._read_matrix()
        if isinstance(opened, str):
            self._warn(f"{opened}: vectors are read from the database until a writer repairs it")
            opened = None
        if opened is not None and not settings.purged <= opened.version <= settings.version:
            opened = None
        return View(opened, dimension=self.dimension, similarity=self.similarity)

    def _read_matrix(self) -> matrix.Matrix | str | None:
        return matrix.read(self._folder, identity=self._identity, dimension=self.dimension)

    def _read_graph(self) -> graph.Graph | str | None:
        return graph.read(
            self._folder,
            identity=self._identity,
            dimension=self.dimension,
            similarity=self.similarity,
        )

    def _matrix_problem(self) -> str | None:
        """What is wrong with the matrix on the disk."""
        opened = self._read_matrix()
        if isinstance(opened, str):
            logging.warning("%s; it is made again from the database", opened)
            return opened
        return None

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logging.warning("%s", text)

    @property
    def version(self) -> int:
        with self._lock, one_line_errors(self._file):
            self._check_open()
            return database.read_settings(self._connection, self._file).version

    @property
    def superseded(self) -> bool:
        return folder.current(self._path) != self._generation

    def count(self, where: Mapping[str, Any] | None = None) -> int:
        conditions = filters.parse(where)
        with self._lock, one_line_errors(self._file):
            self._check_open()
            if not conditions:
                return database.read_settings(self._connection, self._file).items
            filters.check_fields(conditions, self.fields())
            text, parameters = database.condition_sql(conditions)
            statement = f"select count(*) from items where {text}"
            return self._connection.execute(statement, parameters).fetchone()[0]

    def fields(self) -> set[str]:
        with self._lock, one_line_errors(self._file):
            self._check_open()
            return {name for (name,) in self._connection.execute("select name from fields")}

    def _add(self, ids: list[str], vectors: np.ndarray, metadata: list[str], replace: bool) -> None:
        with self._change() as version:
            if replace:
                for names in _chunks(ids):
                    self._remove(names, version)
            elif names := self._existing(ids):
                raise DuplicateId(
                    f"an item with the id {inputs.names(names)} exists already: leave it out, or "
                    "add with replace=True"
                )
            (last,) = self._connection.execute(
                "select coalesce(max(seq), 0) from sqlite_sequence where name = 'items'"
            ).fetchone() or (0,)
            rows = range(last + 1, last + 1 + len(ids))
            blobs = [vector.astype("<f4", copy=False).tobytes() for vector in vectors]
            sums = map(database.checksum, ids, metadata, blobs)
            self._connection.executemany(
                "insert into items values (?, ?, ?, ?)",
                zip(rows, ids, metadata, sums, strict=True),
            )
            self._connection.executemany(
                "insert into vectors values (?, ?)", zip(rows, blobs, strict=True)
            )
            self._connection.executemany(
                "insert or ignore into fields values (?)",
                [(name,) for name in sorted(filters.fields_of(metadata))],
            )
            self._connection.execute("update settings set items = items + ?", (len(ids),))

    def _delete(self, ids: list[str]) -> None:
        with self._change() as version:
            existing = set(self._existing(ids))
            if missing := [name for name in ids if name not in existing]:
                raise UnknownId(f"no item has the id {inputs.names(missing)}: nothing was deleted")
            for names in _chunks(ids):
                self._remove(names, version)

    def _remove(self, ids: list[str], version: int) -> None:
        """Deletes those of the items that exist."""
        marks = ", ".join("?" * len(ids))
        rows = self._connection.execute(
            f"delete from items where id in ({marks}) returning row", ids
        ).fetchall()
        self._connection.executemany("delete from vectors where row = ?", rows)
        self._connection.executemany(
            "insert into deleted values (?, ?)", [(row, version) for (row,) in rows]
        )
        self._connection.execute("update settings set items = items - ?", (len(rows),))

    def _existing(self, ids: list[str]) -> list[str]:
        existing = []
        for names in _chunks(ids):
            marks = ", ".join("?" * len(names))
            existing += self._connection.execute(
                f"select id from items where id in ({marks})", names
            ).fetchall()
        return [name for (name,) in existing]

    def _exist(self, ids: list[str]) -> set[str]:
        with self._lock, one_line_errors(self._file):
            self._check_open()
            with transaction(self._connection):
                return set(self._existing(ids))

    def _get(self, ids: list[str]) -> dict[str, Item]:
        items = {}
        with self._lock, one_line_errors(self._file):
            self._check_open()
            with transaction(self._connection):
                for names in _chunks(ids):
                    marks = ", ".join("?" * len(names))
                    for name, metadata, blob in self._connection.execute(
                        "select id, metadata, vector from items join vectors using (row) "
                        f"where id in ({marks})",
                        names,
                    ):
                        vector = database.decode_vectors([blob], self.dimension)[0].copy()
                        items[name] = Item(name, vector, database.decode_metadata(metadata))
        return items

    def _search(
        self, queries: np.ndarray, k: int, conditions: list[Condition], exact: bool
    ) -> list[list[Record]]:
        with self._read() as (_, view):
            allowed = self._rows_where(conditions) if conditions else None
            search = view.exact if exact else view.approximate
            results = search(queries, k, allowed=allowed)
            rows = np.unique(np.concatenate([rows for rows, _ in results]))
            texts = self._texts(rows.tolist())
        return [
            [
                Record(row, texts[row][0], value, texts[row][1])
                for row, value in zip(rows.tolist(), values.tolist(), strict=True)
            ]
            for rows, values in results
        ]

    def _rows_where(self, conditions: list[Condition]) -> np.ndarray:
        """The rows that match, ascending; kept for the next search with this filter."""
        key = repr(conditions)
        if key in self._allowed:
            self._allowed.move_to_end(key)
            return self._allowed[key]
        text, parameters = database.condition_sql(conditions)
        found = self._connection.execute(
            f"select row from items where {text} order by row", parameters
        )
        rows = np.fromiter((row for (row,) in found), np.int64)
        self._allowed[key] = rows
        if len(self._allowed) > _CACHED_FILTERS:
            self._allowed.popitem(last=False)
        return rows

    def _texts(self, rows: list[int]) -> dict[int, tuple[str, dict[str, Any]]]:
        """Ids and metadata of rows."""
        texts = {}
        for numbers in _chunks(rows):
            marks = ", ".join("?" * len(numbers))
            for row, name, metadata in self._connection.execute(
                f"select row, id, metadata from items where row in ({marks})", numbers
            ):
                texts[row] = name, database.decode_metadata(metadata)
        if len(texts) < len(rows):
            raise sqlite3.DatabaseError("items of some vectors are missing")
        return texts

    def scan(self, batch_size: int = _BATCH) -> Iterator[list[Item]]:
        with self._snapshot() as connection:
            found = connection.execute(
                "select id, metadata, vector from items join vectors using (row) order by row"
            )
            while batch := found.fetchmany(batch_size):
                vectors = database.decode_vectors([blob for *_, blob in batch], self.dimension)
                yield [
                    Item(name, vector, database.decode_metadata(metadata))
                    for (name, metadata, _), vector in zip(batch, vectors, strict=True)
                ]

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        """A second connection in a read transaction: others may read and write meanwhile."""
        with self._lock:
            self._check_open()
        with (
            one_line_errors(self._file),
            contextlib.closing(database.connect(self._file, write=False)) as connection,
            transaction(connection),
        ):
            yield connection

    def build(self, *, approximate: bool | None = None) -> dict[str, Any]:
        self._build(approximate, anew=False)
        return self.facts()

    def _build(self, approximate: bool | None, *, anew: bool) -> None:
        self._check_writable()
        with self._build_lock, self._snapshot() as connection, _full_disk(self._folder):
            settings = database.read_settings(connection, self._file)
            if approximate is None:
                approximate = settings.items >= _GRAPH_FROM and graph.installed()
            self._write_matrix(connection, settings)
            if approximate:
                self._write_graph(connection, settings, anew=anew)
            else:
                (self._folder / "graph.json").unlink(missing_ok=True)
        with self._lock:
            self._view = None

    def _write_matrix(self, connection: sqlite3.Connection, settings: database.Settings) -> None:
        (last,) = connection.execute("select coalesce(max(row), 0) from vectors").fetchone()
        matrix.write(
            self._folder,
            _batches(connection, 0, self.dimension),
            count=settings.items,
            dimension=self.dimension,
            version=settings.version,
            last_row=last,
            identity=self._identity,
        )

    def _write_graph(
        self, connection: sqlite3.Connection, settings: database.Settings, *, anew: bool
    ) -> None:
        """Adds what the graph lacks; from an empty one if that is much, or if recall is low."""
        vectors = self._read_matrix()
        assert isinstance(vectors, matrix.Matrix)
        old = self._read_graph()
        if not isinstance(old, graph.Graph) or old.version < settings.purged or anew:
            old = None
        if old is not None:
            numbers = connection.execute(
                "select row from deleted where version > ?", (old.version,)
            )
            deleted = np.fromiter((row for (row,) in numbers), np.int64)
            new = len(vectors.rows) - int(np.searchsorted(vectors.rows, old.last_row, "right"))
            if len(deleted) + new > _ANEW_SHARE * len(vectors.rows):
                old = None
            else:
                old.delete(deleted)
        for start in (old, None):
            nodes = start.nodes if start else graph.empty(self.dimension, self.similarity)
            graph.add(nodes, _slices(vectors, 0 if start is None else start.last_row))
            expansion, recall = graph.measure(nodes, vectors.rows, vectors.vectors, self.similarity)
            if start is None or recall >= graph.LEAST_RECALL:
                break
        built = graph.Graph(settings.version, vectors.last_row, expansion, recall, nodes)
        graph.write(self._folder, built, identity=self._identity)

    def compact(self) -> None:
        has_graph = (self._folder / "graph.json").exists()
        self._build(True if has_graph else None, anew=True)
        with self._lock, one_line_errors(self._file):
            built = matrix.position_of(self._folder)[0]
            with transaction(self._connection, write=True):
                self._connection.execute("delete from deleted where version <= ?", (built,))
                self._connection.execute("update settings set purged = ?", (built,))
                self._connection.execute("delete from fields")
                metadata = self._connection.execute("select metadata from items")
                names: set[str] = set()
                while batch := metadata.fetchmany(_BATCH):
                    names |= filters.fields_of([text for (text,) in batch])
                self._connection.executemany(
                    "insert into fields values (?)", [(name,) for name in sorted(names)]
                )
            self._connection.execute("vacuum")
            self._connection.execute("pragma wal_checkpoint(truncate)")

    def check(self) -> list[str]:
        problems = []
        with self._snapshot() as connection:
            problems += [
                f"{self._file}: {' '.join(text.split())}"
                for (text,) in connection.execute("pragma integrity_check")
                if text != "ok"
            ]
            settings = database.read_settings(connection, self._file)
            rows = 0
            for row, name, metadata, total, blob in connection.execute(
                "select row, id, metadata, checksum, vector from items "
                "left join vectors using (row) order by row"
            ):
                rows += 1
                if blob is None or len(blob) != 4 * self.dimension:
                    problems.append(f"{self._file}: item {name!r} (row {row}) has no vector")
                elif database.checksum(name, metadata, blob) != total:
                    problems.append(f"{self._file}: item {name!r} (row {row}) was changed")
            (vectors,) = connection.execute("select count(*) from vectors").fetchone()
            if not rows == vectors == settings.items:
                problems.append(
                    f"{self._file}: {rows} items, {vectors} vectors, {settings.items} counted"
                )
        for opened in (self._read_matrix(), self._read_graph()):
            if isinstance(opened, str):
                problems.append(opened)
        return problems

    def facts(self) -> dict[str, Any]:
        with self._lock, one_line_errors(self._file):
            self._check_open()
            settings = database.read_settings(self._connection, self._file)
        sizes = {p.name: p.stat().st_size for p in self._folder.iterdir()}
        return {
            "items": settings.items,
            "dimension": self.dimension,
            "model": self.model,
            "similarity": self.similarity,
            "version": settings.version,
            "bytes": sum(sizes.values()),
            "approximate": self._graph_facts(),
        }

    def _graph_facts(self) -> dict[str, Any] | None:
        """Of the graph on the disk; None if there is none."""
        try:
            manifest = json.loads((self._folder / "graph.json").read_bytes())
            return {
                "items": manifest["count"],
                "version": manifest["version"],
                "recall@10": manifest["recall"],
                "search width": manifest["expansion"],
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def switch(self) -> None:
        self._check_writable()
        old = folder.current(self._path)
        if old == self._generation:
            raise InvalidInput(f"{self.place} is the present index already")
        folder.point(self._path, self._generation)
        shutil.rmtree(self._path / old, ignore_errors=True)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                if self.writable and self._lacks_much():
                    with self._build_lock, self._snapshot() as connection:
                        settings = database.read_settings(connection, self._file)
                        self._write_matrix(connection, settings)
            except (OSError, ValueError) as error:  # what is derived can be made later
                logging.warning("%s: the matrix was not updated: %s", self.place, error)
            finally:
                self._closed = True
                self._connection.close()
                self._view = None
                if self._writer_lock is not None:
                    self._writer_lock.close()

    def _lacks_much(self) -> bool:
        """Whether the matrix lacks more rows than a search should read from the database."""
        with one_line_errors(self._file):
            settings = database.read_settings(self._connection, self._file)
            version, last_row = matrix.position_of(self._folder)
            (added,) = self._connection.execute(
                "select count(*) from vectors where row > ?", (last_row,)
            ).fetchone()
            (deleted,) = self._connection.execute(
                "select count(*) from deleted where version > ?", (version,)
            ).fetchone()
        return added + deleted > max(_FEW, _SHARE * settings.items)


def _batches(
    connection: sqlite3.Connection, after: int, dimension: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row numbers and vectors after a row, ascending."""
    found = connection.execute(
        "select row, vector from vectors where row > ? order by row", (after,)
    )
    while batch := found.fetchmany(_BATCH):
        rows = np.fromiter((row for row, _ in batch), np.int64, len(batch))
        yield rows, database.decode_vectors([blob for _, blob in batch], dimension)


def _slices(vectors: matrix.Matrix, after: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows after a row and their vectors, some at a time."""
    first = int(np.searchsorted(vectors.rows, after, "right"))
    for start in range(first, len(vectors.rows), _BATCH):
        yield vectors.rows[start : start + _BATCH], vectors.vectors[start : start + _BATCH]


def _state(path: pathlib.Path) -> tuple[int, int] | None:
    """What changes when a file is replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _chunks(values: list[Any]) -> Iterator[list[Any]]:
    """Lists short enough for the parameters of one statement."""
    for start in range(0, len(values), _MARKS):
        yield values[start : start + _MARKS]


@contextlib.contextmanager
def _full_disk(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror or error}") from error
