"""The interface of every index: checks, then the store's own methods."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.index import filters, inputs
from dmljax.index.errors import InvalidInput, UnknownId
from dmljax.index.filters import Condition

__all__ = ["Hit", "Index", "Item", "Record"]


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


class Record(NamedTuple):
    """A row of a store: its number grows with every addition."""

    row: int
    id: str
    similarity: float
    metadata: dict[str, Any]


class Index(abc.ABC):
    """Vectors with ids and metadata, searched by cosine or by Euclidean distance.

    A call either happens completely or changes nothing, and when it returns, what it changed
    survives a kill of the process. `model` is the digest of the model that makes the vectors. Use
    it as a context manager, or call `close`.
    """

    place: str  # the path or address, without a password
    model: str
    dimension: int
    similarity: str
    writable: bool

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
        is a JSON object per item.
        An id that exists already is an error, unless `replace` gives the item its new vector and
        metadata.
        """
        self._check_writable()
        ids = inputs.check_ids(ids)
        vectors = inputs.check_vectors(
            vectors, self.dimension, similarity=self.similarity, count=len(ids)
        )
        self._add(ids, vectors, inputs.check_metadata(metadata, len(ids)), replace)

    def delete(self, ids: Sequence[str]) -> None:
        """Deletes items: all of them, or none if one does not exist."""
        self._check_writable()
        if ids := inputs.check_ids(ids):
            self._delete(ids)

    def contains(self, ids: Sequence[str]) -> list[bool]:
        """Whether there is an item for each of the ids."""
        ids = inputs.check_ids(ids, distinct=False)
        existing = self._exist(list(dict.fromkeys(ids)))
        return [name in existing for name in ids]

    def get(self, ids: Sequence[str]) -> list[Item]:
        """The items with these ids, in this order."""
        ids = inputs.check_ids(ids, distinct=False)
        items = self._get(list(dict.fromkeys(ids)))
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
    ) -> list[list[Hit]]:
        """The `k` most similar items of each of the `vectors` [q, dimension], best first.

        Of equal similarities, the item that was added first comes first.

        Args:
            vectors: queries, of length 1 where cosines are compared.
            k: at most 1,000. More than there are items is an error, unless `allow_fewer`.
            where: conditions on metadata (`dmljax.index.filters`); fewer items may match than k.
            exact: compare with all items even where there is an approximate graph.
            threshold: leave out items of a lower similarity; an empty list means "no match". With
                Euclidean distances, -0.5 leaves out items farther away than 0.5.
            allow_fewer: return what there is if there are fewer items than k.
        """
        queries = inputs.check_vectors(vectors, self.dimension, similarity=self.similarity)
        return self._hits(queries, k, [None] * len(queries), where, exact, threshold, allow_fewer)

    def search_ids(
        self,
        ids: Sequence[str],
        k: int,
        *,
        where: Mapping[str, Any] | None = None,
        exact: bool = False,
        threshold: float | None = None,
        allow_fewer: bool = False,
    ) -> list[list[Hit]]:
        """`search` by the vectors of stored items. An item is left out of its own result."""
        ids = inputs.check_ids(ids, distinct=False)
        if not ids:
            return []
        queries = np.stack([item.vector for item in self.get(ids)])
        return self._hits(queries, k, ids, where, exact, threshold, allow_fewer)

    def _hits(
        self,
        queries: np.ndarray,
        k: int,
        exclude: Sequence[str | None],
        where: Mapping[str, Any] | None,
        exact: bool,
        threshold: float | None,
        allow_fewer: bool,
    ) -> list[list[Hit]]:
        excludes = any(name is not None for name in exclude)
        conditions = filters.parse(where)
        threshold = inputs.check_threshold(threshold, self.similarity)
        fewer = allow_fewer or bool(conditions)
        count = self.count() - excludes
        k = inputs.check_k(k, count, allow_fewer=fewer)
        if conditions:
            filters.check_fields(conditions, self.fields())
        if count <= 0:
            return [[] for _ in queries]
        results = self._search(queries, k + excludes, conditions, exact)
        return [
            _decode([r for r in records if r.id != name][:k], threshold)
            for records, name in zip(results, exclude, strict=True)
        ]

    def _check_writable(self) -> None:
        if not self.writable:
            raise InvalidInput(f"{self.place} is open for reading: open it with write=True")

    def __len__(self) -> int:
        return self.count()

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """How many changes were made to the index since its creation."""

    @property
    @abc.abstractmethod
    def superseded(self) -> bool:
        """Whether the index was replaced (`reindex`) since it was opened: open it again."""

    @abc.abstractmethod
    def count(self, where: Mapping[str, Any] | None = None) -> int:
        """The number of items, or of those that match a filter."""

    @abc.abstractmethod
    def fields(self) -> set[str]:
        """The names of the fields of metadata that items have or had."""

    @abc.abstractmethod
    def scan(self, batch_size: int = 10_000) -> Iterator[list[Item]]:
        """All items in the order in which they were added, as they were when the scan began."""

    @abc.abstractmethod
    def build(self, *, approximate: bool | None = None) -> dict[str, Any]:
        """Brings what searches use up to date and returns facts about it: see `facts`.

        `approximate` asks for a graph (True) or for none (False); by default there is one from
        50,000 items on. Searches and changes may go on at the same time.
        """

    @abc.abstractmethod
    def compact(self) -> None:
        """Gives the space of deleted items back, and builds everything anew."""

    @abc.abstractmethod
    def check(self) -> list[str]:
        """Reads everything and returns what is wrong with it, one line each."""

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Count, model, sizes in bytes, and the measured recall of the approximate search."""

    @abc.abstractmethod
    def switch(self) -> None:
        """Puts an index of `reindex` in the place of the present one, at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the use of the index. A second call does nothing."""

    @abc.abstractmethod
    def _add(self, ids: list[str], vectors: np.ndarray, metadata: list[str], replace: bool) -> None:
        """Adds checked items."""

    @abc.abstractmethod
    def _delete(self, ids: list[str]) -> None:
        """Deletes items with checked ids."""

    @abc.abstractmethod
    def _exist(self, ids: list[str]) -> set[str]:
        """Those of the ids that items have."""

    @abc.abstractmethod
    def _get(self, ids: list[str]) -> dict[str, Item]:
        """The items that exist, by id."""

    @abc.abstractmethod
    def _search(
        self, queries: np.ndarray, k: int, conditions: list[Condition], exact: bool
    ) -> list[list[Record]]:
        """The best records of each query, at most `k`."""


def _decode(records: list[Record], threshold: float | None) -> list[Hit]:
    return [
        Hit(record.id, record.similarity, record.metadata)
        for record in records
        if threshold is None or record.similarity >= threshold
    ]
