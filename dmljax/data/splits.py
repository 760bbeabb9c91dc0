"""Records, labels and class names of a data set, divided into a training and a test split.

A record is a path, the encoded bytes of one image, or a decoded `uint8 [h w c]` array; `records` is
any sequence of them that can be pickled. The labels of a split are 0 to the number of its classes
minus 1, and index its `names`. A class is identified by its name, so two splits have a class in
common exactly if they have a name in common.
"""

from __future__ import annotations

import dataclasses
import pathlib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = [
    "Records",
    "Split",
    "Splits",
    "divide",
    "encode",
    "record_name",
    "select",
    "subset",
]


class Records(Protocol):
    """What is read by index: paths, encoded images or pixels."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


_MARKS = ("query", "gallery", "boxes", "superlabels", "groups")  # optional arrays of a split


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """Some images of a data set. Every array has one row per record.

    `query` and `gallery` mark the images of a retrieval protocol; without them, every image is
    both. `boxes` (left, top, right, bottom in pixels of the upright image) crop the image before
    any transform. `superlabels` are coarser classes. If the `groups` of a query and of a gallery
    item are equal and not -1, the evaluation ignores the pair (the same camera or photograph).
    """

    records: Records
    labels: np.ndarray
    names: tuple[str, ...]
    query: np.ndarray | None = None
    gallery: np.ndarray | None = None
    boxes: np.ndarray | None = None
    superlabels: np.ndarray | None = None
    groups: np.ndarray | None = None

    def __post_init__(self):
        object.__setattr__(self, "labels", np.asarray(self.labels, np.int32))
        for field in ("labels", *_MARKS):
            rows = getattr(self, field)
            if rows is not None and len(rows) != len(self.records):
                raise ValueError(f"{len(rows)} {field} for {len(self.records)} records")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < len(self.names):
            raise ValueError(
                f"labels run from {self.labels.min()} to {self.labels.max()}, but there are "
                f"{len(self.names)} names"
            )

    def __len__(self) -> int:
        return len(self.labels)


class Splits(NamedTuple):
    """The two splits of a data set. `train` is empty if the data set is only for testing."""

    train: Split
    test: Split


def encode(strings: Iterable[Any], *, names: Sequence[str] | None = None):
    """`(labels, names)` of a list of class names.

    `names` are sorted (numbers by value) unless given. Names are compared in Unicode's composed
    form, because some file systems store 'é' as one code point and others as two.

    >>> encode(["b", "a", "b"])
    (array([1, 0, 1], dtype=int32), ('a', 'b'))
    """
    strings = [unicodedata.normalize("NFC", str(s)) for s in strings]
    if names is None:
        distinct = set(strings)
        numbers = all(name.isdecimal() and name.isascii() for name in distinct)
        names = sorted(distinct, key=(lambda n: (int(n), n)) if numbers else None)
    names = tuple(unicodedata.normalize("NFC", str(n)) for n in names)
    if len(set(names)) < len(names):
        repeated = next(n for i, n in enumerate(names) if n in names[:i])
        raise ValueError(f"the class name {repeated!r} occurs more than once")
    index = {name: i for i, name in enumerate(names)}
    unknown = [s for s in strings if s not in index]
    if unknown:
        raise ValueError(f"class {unknown[0]!r} is not among the {len(names)} class names")
    return np.fromiter((index[s] for s in strings), np.int32, len(strings)), names


@dataclasses.dataclass(frozen=True)
class _Selection:
    """Some records of a sequence that cannot be indexed by an array."""

    records: Records
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int):
        return self.records[int(self.indices[i])]

    def describe(self, i: int) -> str:
        return record_name(self.records, int(self.indices[i]))


def select(records: Records, indices: np.ndarray) -> Records:
    """`records` at `indices`, without reading them."""
    if isinstance(records, np.ndarray):
        return records[indices]
    if isinstance(records, list | tuple):
        return tuple(records[int(i)] for i in indices)
    if isinstance(records, _Selection):
        return _Selection(records.records, records.indices[indices])
    return _Selection(records, np.asarray(indices))


def record_name(records: Records, i: int) -> str:
    """What messages call record `i`: its path if it has one, otherwise its number."""
    if describe := getattr(records, "describe", None):
        return describe(i)
    if isinstance(records, np.ndarray):
        return f"record {i}"
    record = records[i]
    return str(record) if isinstance(record, str | pathlib.Path) else f"record {i}"


def subset(split: Split, indices: np.ndarray) -> Split:
    """The images at `indices`, in that order. Classes without images are removed."""
    indices = np.asarray(indices)
    if indices.dtype == bool:
        indices = np.flatnonzero(indices)
    present, labels = np.unique(split.labels[indices], return_inverse=True)
    marks = {name: getattr(split, name) for name in _MARKS}
    return Split(
        records=select(split.records, indices),
        labels=labels,
        names=tuple(split.names[c] for c in present),
        **{name: None if rows is None else rows[indices] for name, rows in marks.items()},
    )


def divide(split: Split, *, train: float | Sequence[str]) -> Splits:
    """Splits without a common class. `train` is a fraction of the classes or their names.

    A fraction selects the first classes in their order.

    It divides a data set into training and test classes, or a training split into training and
    validation classes.
    """
    if isinstance(train, str) or not isinstance(train, float | int | Sequence):
        raise ValueError(f"train must be a fraction or a list of class names, not {train!r}")
    if isinstance(train, Sequence):
        wanted = {unicodedata.normalize("NFC", str(name)) for name in train}
        if unknown := sorted(wanted - set(split.names)):
            raise ValueError(f"no class is called {unknown[0]!r}; there are {len(split.names)}")
        is_train = np.array([name in wanted for name in split.names], bool)
    else:
        if not 0 <= train <= 1:
            raise ValueError(f"the fraction of training classes must be in 0..1, not {train}")
        is_train = np.arange(len(split.names)) < round(train * len(split.names))
    rows = is_train[split.labels] if len(split) else np.zeros(0, bool)
    return Splits(subset(split, rows), subset(split, ~rows))
