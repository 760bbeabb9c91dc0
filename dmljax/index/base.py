"""`Index`: the public methods of every store, and the private ones that a store implements.

The public methods check their input and run a call in one transaction of the store. What the two
databases have in common is SQL here; the handle of a transaction is a connection, or a cursor.
"""

from __future__ import annotations

import abc
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from dmljax.hints import hint
from dmljax.index import filters, inputs
from dmljax.index.filters import Condition, Dialect
from dmljax.index.inputs import Damaged, DuplicateId, InvalidInput, UnknownId
from dmljax.index.nearest import SIMILARITIES

_ITEMS = "update {settings} set items = items + ?"
# While this function of the context is true, calls end with `Unavailable` and change nothing. An
# index in a folder stops within a statement; PostgreSQL has `statement_timeout` for that.
STOP_FN: ContextVar[Callable[[], bool] | None] = ContextVar("STOP_FN", default=None)


class Hit(NamedTuple):
    """An item that a search returns."""

    id: str
    similarity: float  # larger is better
    metadata: dict[str, Any]


class Item(NamedTuple):
    """A stored item."""

    id: str
    vector: np.ndarray
    metadata: dict[str, Any]


class File(NamedTuple):
    """The image file of an item, in a folder or a list, as it was when it was embedded."""

    folder: str
    stamp: str | None  # size and modification time


class State(NamedTuple):
    """The counters that every change of an index moves."""

    version: int  # changes so far
    items: int


class Index(abc.ABC):
    """Vectors with ids and metadata, compared exactly by a similarity.

    A call either happens completely or changes nothing, and when it returns, its changes survive a
    kill of the process. `model` is the digest of the model that makes the vectors. Threads may
    share an index; their calls run one after another. Use it as a context manager, or call `close`.
    """

    model: str
    dimension: int
    similarity: str  # a name in `nearest.SIMILARITIES`
    _dialect: Dialect

    def __init__(self, place: str, generation: int, *, write: bool):
        """Sets the place, a path or an address without a password, and the generation from 1."""
        self.place, self.generation, self.writable = place, generation, write
        self._lock = threading.RLock()
        self._closed = False
        self._seen_fields: set[str] = set()

    def add(
        self,
        ids: Sequence[str],
        vectors: Any,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        replace: bool = False,
        files: Sequence[File | None] | None = None,
    ) -> None:
        """Adds items: all of them, or none if one of them is refused.

        `vectors` are [n, dimension], of length 1 (to 1e-3) if the similarity needs it. `metadata`
        is a JSON object per item. An id that exists already is an error, unless `replace` gives the
        item its new vector and metadata. `files` are the image files that items come from.
        """
        self._check_writable()
        ids = inputs.check_ids(ids)
        vectors = inputs.check_vectors(
            vectors, self.dimension, SIMILARITIES[self.similarity], count=len(ids)
        )
        texts = inputs.check_metadata(metadata, len(ids))
        origins = [file or (None, None) for file in files or [None] * len(ids)]
        with self._transaction(write=True) as transaction:
            existing = self._existing(transaction, ids)
            if existing and not replace:
                raise DuplicateId(
                    f"an item with the id {inputs.names(existing)} exists already: leave it out, "
                    "or add with replace=True"
                )
            if existing:
                self._remove(transaction, existing)
            self._insert(transaction, ids, vectors, texts, origins)
            self._rows(transaction, _ITEMS, [len(ids) - len(existing)])

    def delete(self, ids: Sequence[str]) -> None:
        """Deletes items: all of them, or none if one does not exist."""
        self._check_writable()
        ids = inputs.check_ids(ids)
        if not ids:
            return
        with self._transaction(write=True) as transaction:
            existing = set(self._existing(transaction, ids))
            if missing := [name for name in ids if name not in existing]:
                raise UnknownId(f"no item has the id {inputs.names(missing)}: nothing was deleted")
            self._remove(transaction, ids)
            self._rows(transaction, _ITEMS, [-len(ids)])

    def contains(self, ids: Sequence[str]) -> list[bool]:
        """Returns for each id whether there is an item."""
        ids = inputs.check_ids(ids, distinct=False)
        with self._transaction() as transaction:
            existing = set(self._existing(transaction, ids))
        return [name in existing for name in ids]

    def get(self, ids: Sequence[str]) -> list[Item]:
        """Returns the items with these ids, in this order."""
        ids = inputs.check_ids(ids, distinct=False)
        with self._transaction() as transaction:
            items = {item.id: item for item in self._items(transaction, ids)}
        if missing := [name for name in ids if name not in items]:
            raise UnknownId(f"no item has the id {inputs.names(missing)}")
        return [items[name] for name in ids]

    def files(self, ids: Sequence[str] | None = None) -> dict[str, File]:
        """Returns the image files of items with these ids, or of all, as far as they are known."""
        text = "select id, folder, stamp from {items} where folder is not null"
        parameters = []
        if ids is not None:
            text += f" and id {self._dialect.ids}"
            parameters = [self._dialect.list_fn(inputs.check_ids(ids, distinct=False))]
        with self._transaction() as transaction:
            rows = self._rows(transaction, text, parameters)
        return {name: File(folder, stamp) for name, folder, stamp in rows}

    def search(
        self,
        vectors: Any,
        k: int,
        *,
        where: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        allow_fewer: bool = False,
        exclude: Sequence[str] | None = None,
    ) -> list[list[Hit]]:
        """Returns the `k` most similar items of each of the `vectors` [q, dimension], best first.

        Of equal similarities, the item that was added first comes first.

        Args:
            vectors: queries, of length 1 where the similarity needs unit vectors.
            k: at most 1,000. More than there are items is an error, unless `allow_fewer`.
            where: conditions on metadata (`dmljax.index.filters`); fewer items may match than k.
            threshold: leave out items of a lower similarity; an empty list means "no match".
            allow_fewer: return all items if there are fewer than k.
            exclude: for each query, the id of a stored item that it does not return.
        """
        similarity = SIMILARITIES[self.similarity]
        queries = inputs.check_vectors(vectors, self.dimension, similarity)
        conditions = filters.parse(where)
        least = inputs.check_threshold(threshold, similarity)
        more = exclude is not None
        excluded: Sequence[str | None] = exclude or [None] * len(queries)
        with self._transaction() as transaction:
            count = self._state(transaction).items - more
            inputs.check_k(k, count, allow_fewer=allow_fewer or bool(conditions))
            self._check_fields(transaction, conditions)
            if count <= 0:
                return [[] for _ in queries]
            results, items = self._search(transaction, queries, k + more, conditions)
        hits = [
            [
                Hit(items[row][0], value, items[row][1])
                for row, value in zip(rows.tolist(), values.tolist(), strict=True)
                if items[row][0] != name and value >= least
            ]
            for (rows, values), name in zip(results, excluded, strict=True)
        ]
        return [row[:k] for row in hits]

    def search_ids(self, ids: Sequence[str], k: int, **options: Any) -> list[list[Hit]]:
        """Searches by the vectors of stored items, each without itself; `options` of `search`."""
        ids = inputs.check_ids(ids, distinct=False)
        if not ids:
            return []
        queries = np.stack([item.vector for item in self.get(ids)])
        return self.search(queries, k, exclude=ids, **options)

    def count(self, where: Mapping[str, Any] | None = None) -> int:
        """Returns the number of items, or of the items that match a filter."""
        conditions = filters.parse(where)
        with self._transaction() as transaction:
            if not conditions:
                return self._state(transaction).items
            self._check_fields(transaction, conditions)
            text, parameters = filters.to_sql(conditions, self._dialect)
            return self._rows(
                transaction, f"select count(*) from {{items}} where {text}", parameters
            )[0][0]

    def fields(self) -> set[str]:
        """Returns the names of the metadata fields of all items."""
        with self._transaction() as transaction:
            return self._fields(transaction)

    def scan(self, batch_size: int = 10_000) -> Iterator[list[Item]]:
        """Yields all items in the order of their addition, as they were when the scan began."""
        with self._snapshot() as transaction:
            items = iter(self._items(transaction, None))
            while batch := list(itertools.islice(items, batch_size)):
                yield batch

    def check(self) -> list[str]:
        """Reads everything and returns what is damaged, one line each."""
        with self._snapshot() as transaction:
            return self._problems(transaction)

    def facts(self) -> dict[str, Any]:
        """Returns the count of items, the model, the similarity and the size in bytes."""
        with self._transaction() as transaction:
            version, items = self._state(transaction)
            facts = {"items": items, "dimension": self.dimension, "model": self.model}
            facts |= {"similarity": self.similarity, "version": version, "search": "exact"}
            return facts | self._facts(transaction)

    @property
    def version(self) -> int:
        """Returns the number of changes since the index was created."""
        with self._transaction() as transaction:
            return self._state(transaction).version

    @property
    def superseded(self) -> bool:
        """Tells whether `reindex` has replaced the index since it was opened: open it again."""
        return self._current() != self.generation

    def switch(self) -> None:
        """Puts an index of `reindex` in the place of the present one, in one step."""
        self._check_writable()
        if not self.superseded:
            raise InvalidInput(f"{self.place} is the present index already")
        self._switch()

    def discard(self) -> None:
        """Closes the index and deletes it, with all items. No other process may write to it."""
        self._check_open()
        self._check_writable()
        self._discard()

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_fields(self, transaction: Any, conditions: list[Condition]) -> None:
        """Refuses a field that no item has or had."""
        has_field = f"select 1 from {{items}} where {self._dialect.type} is not null limit 1"
        for field, *_ in conditions:
            parameters = [self._dialect.field_fn(field)]
            if field in self._seen_fields or self._rows(transaction, has_field, parameters):
                self._seen_fields.add(field)
                continue
            near = hint(field, self._fields(transaction))
            raise InvalidInput(f"no item has the field {inputs.shorten(field)}{near}")

    def _fields(self, transaction: Any) -> set[str]:
        text = f"select distinct key from {{items}}, {self._dialect.each}"
        return {name for (name,) in self._rows(transaction, text)}

    def _existing(self, transaction: Any, ids: list[str]) -> list[str]:
        """Returns the ids that exist, in any order."""
        text = f"select id from {{items}} where id {self._dialect.ids}"
        return [name for (name,) in self._rows(transaction, text, [self._dialect.list_fn(ids)])]

    def _read_settings(self, transaction: Any) -> inputs.Settings:
        """Reads the model of the index and how its vectors are compared."""
        rows = self._rows(transaction, "select model, dimension, similarity from {settings}")
        try:
            self.model, self.dimension, self.similarity = settings = inputs.check_settings(*rows[0])
        except (ValueError, IndexError):
            raise self._without_settings() from None
        return settings

    def _state(self, transaction: Any) -> State:
        rows = self._rows(transaction, "select version, items from {settings}")
        if not rows or not all(isinstance(value, int) for value in rows[0]):
            raise self._without_settings()
        return State(*rows[0])

    def _without_settings(self) -> Damaged:
        return Damaged(f"{self.place} lacks its settings, or has others: restore it from a backup")

    def _check_writable(self) -> None:
        if not self.writable:
            raise InvalidInput(f"{self.place} is open for reading: open it with write=True")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput(f"{self.place} is closed: open it again")

    # A store implements the rest, and the class methods `create(place, settings)`, `open(place,
    # write=)` and `reindex(place, settings)`.

    @abc.abstractmethod
    def close(self) -> None: ...  # a second call does nothing

    @abc.abstractmethod
    def compact(self) -> None:
        """Gives the space of deleted items back, and makes derived files again."""

    @abc.abstractmethod
    def _current(self) -> int: ...  # the generation that `open` opens

    @abc.abstractmethod
    def _switch(self) -> None: ...  # makes the generation of this index the current one

    @abc.abstractmethod
    def _discard(self) -> None: ...  # closes the index and deletes all that is in its place

    # Transactions. All reads of one see the same version. One that writes counts a new version, and
    # happens completely or not at all. Other calls may change the index during a `_snapshot`.

    @abc.abstractmethod
    def _transaction(self, *, write: bool = False) -> AbstractContextManager: ...

    @abc.abstractmethod
    def _snapshot(self) -> AbstractContextManager: ...

    @abc.abstractmethod  # runs SQL with the tables {settings} and {items}, and `?` for parameters
    def _rows(self, transaction: Any, text: str, parameters: Sequence[Any] = ()) -> list: ...

    @abc.abstractmethod  # in any order; for None, all items in the order of their addition
    def _items(self, transaction: Any, ids: list[str] | None) -> Iterator[Item]: ...

    @abc.abstractmethod  # the ids do not exist; `metadata` are JSON objects
    def _insert(
        self,
        transaction: Any,
        ids: list[str],
        vectors: np.ndarray,
        metadata: list[str],
        files: Sequence[tuple[str | None, str | None]],
    ) -> None: ...

    @abc.abstractmethod
    def _remove(self, transaction: Any, ids: list[str]) -> None: ...  # they exist

    @abc.abstractmethod
    def _search(
        self, transaction: Any, queries: np.ndarray, k: int, conditions: list[Condition]
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], dict[int, tuple[str, dict[str, Any]]]]:
        """Returns what `nearest.best` does for each query, and id and metadata of these rows."""

    @abc.abstractmethod
    def _problems(self, transaction: Any) -> list[str]: ...  # all damage, one line each

    @abc.abstractmethod
    def _facts(self, transaction: Any) -> dict[str, Any]: ...  # "bytes", and others of the store
