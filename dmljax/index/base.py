"""`Index`: what all stores share, and the contract that a store fulfills.

The public methods check their input and express a call as one read or one change of the store. The
abstract methods are the contract. `T` is the handle of a transaction of the store: a connection, a
cursor.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from absl import logging

from dmljax.index import filters, inputs, tuning
from dmljax.index.errors import DuplicateId, InvalidInput, UnknownId
from dmljax.index.filters import Condition
from dmljax.index.inputs import Settings
from dmljax.index.view import Answers

T = TypeVar("T")
R = TypeVar("R")


_of_thread = threading.local()


@contextlib.contextmanager
def stopped_when(stop_fn: Callable[[], bool]) -> Iterator[None]:
    """Calls of this thread, in the block, end with `Unavailable` soon after `stop_fn()` is true.

    A call that is stopped changes nothing. An index in a folder stops in the middle of a statement;
    a server of PostgreSQL has `statement_timeout` for that.
    """
    _of_thread.stop_fn = stop_fn
    try:
        yield
    finally:
        _of_thread.stop_fn = None


def stop_fn() -> Callable[[], bool] | None:
    """The function of the block `stopped_when` of this thread; None outside of one."""
    return getattr(_of_thread, "stop_fn", None)


@contextlib.contextmanager
def counted_by(count_fn: Callable[[int], None]) -> Iterator[None]:
    """Calls of this thread, in the block, report the bytes of ids and metadata that they read.

    `count_fn(bytes)` is called before they become objects, and may raise to end the call.
    """
    _of_thread.count_fn = count_fn
    try:
        yield
    finally:
        _of_thread.count_fn = None


def count_bytes(name: str, metadata: str | Mapping[str, Any], *, times: int = 1) -> None:
    """Reports an item that a store has read for the result of a call; see `counted_by`."""
    if (count_fn := getattr(_of_thread, "count_fn", None)) is not None:
        text = metadata if isinstance(metadata, str) else json.dumps(metadata)
        count_fn(times * (len(name) + len(text)))


class Hit(NamedTuple):
    """An item that a search returns."""

    id: str
    similarity: float  # the cosine, or minus the Euclidean distance
    metadata: dict[str, Any]


class Item(NamedTuple):
    """A stored item."""

    id: str
    vector: np.ndarray
    metadata: dict[str, Any]


class State(NamedTuple):
    """The counters that every change of an index moves."""

    version: int  # changes so far
    items: int


class Index(abc.ABC, Generic[T]):
    """Vectors with ids and metadata, searched by cosine or by Euclidean distance.

    A call either happens completely or changes nothing, and when it returns, its changes survive a
    kill of the process. `model` is the digest of the model that makes the vectors. Threads may
    share an index; their calls run one after another. Use it as a context manager, or call `close`.
    """

    model: str
    dimension: int
    similarity: str

    def __init__(self, place: str, generation: int, *, write: bool):
        """`place` is a path or an address without a password; `generation` is counted from 1."""
        self.place, self.generation, self.writable = place, generation, write
        self._lock = threading.RLock()
        self._closed = False
        self._warnings: set[str] = set()

    def add(
        self,
        ids: Sequence[str],
        vectors: Any,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        replace: bool = False,
    ) -> None:
        """Adds items: all of them, or none if one of them is refused.

        `vectors` are [n, dimension], of length 1 (to 1e-3) where cosines are compared. `metadata`
        is a JSON object per item. An id that exists already is an error, unless `replace` gives the
        item its new vector and metadata.
        """
        self._check_writable()
        ids = inputs.check_ids(ids)
        vectors = inputs.check_vectors(
            vectors, self.dimension, similarity=self.similarity, count=len(ids)
        )
        texts = inputs.check_metadata(metadata, len(ids))

        def change(transaction: T) -> int:
            existing = self._existing(transaction, ids)
            if existing and not replace:
                raise DuplicateId(
                    f"an item with the id {inputs.names(existing)} exists already: leave it out, "
                    "or add with replace=True"
                )
            if existing:
                self._remove(transaction, existing)
            self._insert(transaction, ids, vectors, texts)
            return len(ids) - len(existing)

        self._change(change)

    def delete(self, ids: Sequence[str]) -> None:
        """Deletes items: all of them, or none if one does not exist."""
        self._check_writable()
        ids = inputs.check_ids(ids)

        def change(transaction: T) -> int:
            existing = set(self._existing(transaction, ids))
            if missing := [name for name in ids if name not in existing]:
                raise UnknownId(f"no item has the id {inputs.names(missing)}: nothing was deleted")
            self._remove(transaction, ids)
            return -len(ids)

        if ids:
            self._change(change)

    def contains(self, ids: Sequence[str]) -> list[bool]:
        """Whether there is an item for each of the ids."""
        ids = inputs.check_ids(ids, distinct=False)
        existing = set(self._read(lambda t: self._existing(t, list(dict.fromkeys(ids)))))
        return [name in existing for name in ids]

    def get(self, ids: Sequence[str]) -> list[Item]:
        """The items with these ids, in this order."""
        ids = inputs.check_ids(ids, distinct=False)
        stored = self._read(lambda t: list(self._items(t, list(dict.fromkeys(ids)))))
        items = {item.id: item for item in stored}
        if missing := [name for name in ids if name not in items]:
            raise UnknownId(f"no item has the id {inputs.names(missing)}")
        return [items[name] for name in ids]

    def search(
        self,
        vectors: Any,
        k: int,
        *,
        where: Mapping[str, Any] | None = None,
        exact: bool = False,
        threshold: float | None = None,
        allow_fewer: bool = False,
    ) -> Answers[list[Hit]]:
        """The `k` most similar items of each of the `vectors` [q, dimension], best first.

        Of equal similarities, the item that was added first comes first. The attribute `exact` of
        the result is false if a graph, or a first stage, chose the items that were compared.

        Args:
            vectors: queries, of length 1 where cosines are compared.
            k: at most 1,000. More than there are items is an error, unless `allow_fewer`.
            where: conditions on metadata (`dmljax.index.filters`); fewer items may match than k.
            exact: compare with all items even where there is a graph or a search in two stages.
            threshold: leave out items of a lower similarity; an empty list means "no match". With
                Euclidean distances, -0.5 leaves out items farther away than 0.5.
            allow_fewer: return what there is if there are fewer items than k.
        """
        queries = inputs.check_vectors(vectors, self.dimension, similarity=self.similarity)
        return self._hits(queries, k, None, where, exact, threshold, allow_fewer)

    def search_ids(
        self,
        ids: Sequence[str],
        k: int,
        *,
        where: Mapping[str, Any] | None = None,
        exact: bool = False,
        threshold: float | None = None,
        allow_fewer: bool = False,
    ) -> Answers[list[Hit]]:
        """`search` by the vectors of stored items. An item is left out of its own result."""
        ids = inputs.check_ids(ids, distinct=False)
        if not ids:
            return Answers()
        queries = np.stack([item.vector for item in self.get(ids)])
        return self._hits(queries, k, ids, where, exact, threshold, allow_fewer)

    def _hits(
        self,
        queries: np.ndarray,
        k: int,
        exclude: Sequence[str] | None,
        where: Mapping[str, Any] | None,
        exact: bool,
        threshold: float | None,
        allow_fewer: bool,
    ) -> Answers[list[Hit]]:
        conditions = filters.parse(where)
        threshold = inputs.check_threshold(threshold, self.similarity)
        excludes = exclude is not None

        def read(transaction: T) -> Answers[list[Hit]]:
            count = self._state(transaction).items - excludes
            inputs.check_k(k, count, allow_fewer=allow_fewer or bool(conditions))
            self._check_fields(transaction, conditions)
            if count <= 0:
                return Answers([] for _ in queries)
            return self._search(transaction, queries, k + excludes, conditions, exact)

        least = -np.inf if threshold is None else threshold
        excluded: Sequence[str | None] = exclude or [None] * len(queries)
        answers = self._read(read)
        chosen = (
            [hit for hit in hits if hit.id != name and hit.similarity >= least][:k]
            for hits, name in zip(answers, excluded, strict=True)
        )
        return Answers(chosen, exact=answers.exact)

    def count(self, where: Mapping[str, Any] | None = None) -> int:
        """The number of items, or of the items that match a filter."""

        def read(transaction: T) -> int:
            self._check_fields(transaction, conditions)
            return self._count(transaction, conditions)

        if conditions := filters.parse(where):
            return self._read(read)
        return self._read(self._state).items

    def fields(self) -> set[str]:
        """The names of the fields of metadata that items have or had."""
        return self._read(self._fields)

    def scan(self, batch_size: int = 10_000) -> Iterator[list[Item]]:
        """All items in the order in which they were added, as they were when the scan began."""
        with self._snapshot() as transaction:
            items = iter(self._items(transaction, None))
            while batch := list(itertools.islice(items, batch_size)):
                yield batch

    def build(
        self,
        *,
        approximate: bool | None = None,
        first: int | str | None = None,
        recall: float | None = None,
    ) -> dict[str, Any]:
        """Brings what searches use up to date and returns facts about it: see `facts`.

        `approximate` asks for a graph (True) or for none (False); by default there is one from
        50,000 items on, and where there is one already. `first` asks for a search in two stages
        instead: candidates by 'bits' or by a prefix of the vectors, such as 64 numbers, are
        compared by their whole vectors. It stays until another build asks for something else.
        Searches and changes may go on meanwhile.

        `recall` is the wanted recall@10, 0.95 by default. It is measured with stored vectors, with
        perturbed ones and with vectors between two items. The search is as wide as the worst of
        these needs; if no width reaches it, every search is exact.
        """
        self._check_writable()
        wanted = self._wanted_recall if recall is None else inputs.check_recall(recall)
        if first is not None:
            first = inputs.check_first(first, self.dimension, self.similarity)
            if approximate is not None:
                raise InvalidInput("build: give either approximate or first")
        elif approximate is None:
            first = self.first_stage
        if first is not None:
            self._build_codes(first, wanted)
            return self.facts()
        if approximate and (refusal := self._graph_refusal()):
            raise refusal
        has_graph = self._has_graph_by_default() if approximate is None else approximate
        self._build(has_graph, wanted)
        return self.facts()

    def compact(self) -> None:
        """Gives the space of deleted items back, and makes what searches use from nothing."""
        self._check_writable()
        first, wanted = self.first_stage, self._wanted_recall
        self._compact(first is None and self._has_graph_by_default(), wanted)
        if first is not None:
            self._build_codes(first, wanted)

    @property
    def first_stage(self) -> int | str | None:
        """What a search in two stages compares first, see `build`; None without such a search."""
        return (self.facts()["approximate"] or {}).get("first")

    @property
    def _wanted_recall(self) -> float:
        return (self.facts()["approximate"] or {}).get("wanted", tuning.WANTED_RECALL)

    def _has_graph_by_default(self) -> bool:
        has_graph = self.facts()["approximate"] is not None
        is_large = self.count() >= tuning.GRAPH_FROM
        return (has_graph or is_large) and self._graph_refusal() is None

    def check(self) -> list[str]:
        """Reads everything and returns what is wrong with it, one line each."""
        with self._snapshot() as transaction:
            return self._problems(transaction)

    def verify(self, after: int = 0, *, count: int = 1000) -> tuple[list[int], list[str]]:
        """The numbers of up to `count` rows after a row, and what is wrong with these items.

        A `check` in steps that hold nobody up. A store without checksums of its own has no rows
        to compare.
        """
        return [], []

    def facts(self) -> dict[str, Any]:
        """Count, model, sizes in bytes, and the measured recall of the approximate search."""

        def read(transaction: T) -> dict[str, Any]:
            version, items = self._state(transaction)
            facts = {"items": items, "dimension": self.dimension, "model": self.model}
            facts |= {"similarity": self.similarity, "version": version, "approximate": None}
            return facts | self._facts(transaction)

        return self._read(read)

    @property
    def version(self) -> int:
        """How many changes were made to the index since its creation."""
        return self._read(self._state).version

    @property
    def superseded(self) -> bool:
        """Whether the index was replaced (`reindex`) since it was opened: open it again."""
        return self._current() != self.generation

    def switch(self) -> None:
        """Puts an index of `reindex` in the place of the present one, at once."""
        self._check_writable()
        if not self.superseded:
            raise InvalidInput(f"{self.place} is the present index already")
        self._switch()

    def discard(self) -> None:
        """Closes the index and deletes it, with all items. No other process may write to it."""
        self._check_open()
        self._check_writable()
        self._discard()

    def __len__(self) -> int:
        return self.count()

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_fields(self, transaction: T, conditions: list[Condition]) -> None:
        if conditions:
            names = [condition.field for condition in conditions]
            if set(names) - self._fields(transaction, names):  # all names are many, for a hint only
                filters.check_fields(conditions, self._fields(transaction))

    def _check_writable(self) -> None:
        if not self.writable:
            raise InvalidInput(f"{self.place} is open for reading: open it with write=True")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput(f"{self.place} is closed: open it again")

    def _warn(self, text: str) -> None:
        """Logs a warning, once for every text."""
        if text not in self._warnings:
            self._warnings.add(text)
            logging.warning("%s", text)

    def _is_good(self, recalls: Mapping[str, float], wanted: float) -> bool:
        """Whether an approximate search of these recalls is used. If not, a warning says so."""
        kind, recall = min(recalls.items(), key=lambda item: item[1])
        if recall < wanted:
            self._warn(
                f"{self.place}: the recall@10 is {recall:.3f} for {kind} vectors, below {wanted}: "
                "every search is exact"
            )
        return recall >= wanted

    # The contract of a store. First, the places:

    @classmethod
    @abc.abstractmethod
    def create(cls, place: str | os.PathLike, settings: Settings) -> Index:
        """An empty index, open for writing. It appears when it is complete."""

    @classmethod
    @abc.abstractmethod
    def open(cls, place: str | os.PathLike, *, write: bool) -> Index:
        """The present index; FileNotFoundError if there is none."""

    @classmethod
    @abc.abstractmethod
    def reindex(cls, place: str | os.PathLike, settings: Settings, *, continues: bool) -> Index:
        """The next generation: empty, or as it was left with these settings, if it `continues`."""

    @classmethod
    @abc.abstractmethod
    def signature(cls, place: str | os.PathLike) -> Hashable:
        """What changes when another index is put in this place by hand; None without an index."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the use of the index. A second call does nothing."""

    @abc.abstractmethod
    def _current(self) -> int:
        """The generation that `open` opens."""

    @abc.abstractmethod
    def _switch(self) -> None:
        """Makes the generation of this index the current one."""

    @abc.abstractmethod
    def _discard(self) -> None:
        """Closes the index and deletes all that is in its place."""

    # Transactions:

    @abc.abstractmethod
    def _read(self, read_fn: Callable[[T], R]) -> R:
        """What `read_fn` returns. All that it reads is of one version."""

    @abc.abstractmethod
    def _change(self, change_fn: Callable[[T], int]) -> None:
        """Counts a new version, and lets `change_fn` change items, completely or not at all.

        `change_fn` returns how many more items there are.
        """

    @abc.abstractmethod
    def _snapshot(self) -> AbstractContextManager[T]:
        """A long read of one version. Others read and change the index meanwhile."""

    # Within a transaction:

    @abc.abstractmethod
    def _state(self, transaction: T) -> State:
        """The version and the number of items."""

    @abc.abstractmethod
    def _existing(self, transaction: T, ids: list[str]) -> list[str]:
        """The ids that items have."""

    @abc.abstractmethod
    def _items(self, transaction: T, ids: list[str] | None) -> Iterator[Item]:
        """The items with these ids in any order; for None, all items in the order of addition."""

    @abc.abstractmethod
    def _insert(
        self, transaction: T, ids: list[str], vectors: np.ndarray, metadata: list[str]
    ) -> None:
        """Adds items whose ids do not exist; `metadata` are JSON objects."""

    @abc.abstractmethod
    def _remove(self, transaction: T, ids: list[str]) -> None:
        """Removes items that exist."""

    @abc.abstractmethod
    def _fields(self, transaction: T, among: list[str] | None = None) -> set[str]:
        """The names of the fields of metadata; with `among`, only the ones in this list."""

    @abc.abstractmethod
    def _count(self, transaction: T, conditions: list[Condition]) -> int:
        """The number of items that fulfill all conditions."""

    @abc.abstractmethod
    def _search(
        self, transaction: T, queries: np.ndarray, k: int, conditions: list[Condition], exact: bool
    ) -> Answers[list[Hit]]:
        """The best `k` items of each query that fulfill all conditions, as `nearest` orders them.

        Unless `exact`, a graph may leave items out; `exact` of the answers says whether it could.
        """

    # What searches use, and upkeep:

    @abc.abstractmethod
    def _graph_refusal(self) -> Exception | None:
        """Why the index cannot have a graph."""

    @abc.abstractmethod
    def _build(self, approximate: bool, recall: float) -> None:
        """Makes what searches use, with a graph that has the recall, or without one."""

    def _build_codes(self, first: int | str, recall: float) -> None:
        """Makes a search in two stages, in the place of a graph. A store may do without."""
        raise InvalidInput(
            f"{self.place} has no search in two stages (first={first!r}): leave it out"
        )

    @abc.abstractmethod
    def _compact(self, approximate: bool, recall: float) -> None:
        """Gives the space of deleted items back, and makes what searches use from nothing."""

    @abc.abstractmethod
    def _problems(self, transaction: T) -> list[str]:
        """What is wrong with anything that is stored, one line each."""

    @abc.abstractmethod
    def _facts(self, transaction: T) -> dict[str, Any]:
        """The "bytes" of the index; with a graph also "approximate": its facts.

        The facts of a graph are its "items", its "recalls" by the kind of query, the least of them
        as "recall@10", the "wanted" one, and its "search width". A search in two stages has "first"
        and its number of "candidates" instead of the width.
        """
