"""What every data set is: records, integer labels and names, divided by class.

`Split` is the contract between the files on disk and the pipeline. A record is a path, the encoded
bytes of one image, or a decoded `uint8 [h w c]` array; `records` is any sequence of them that can
be pickled. Labels are dense within their split: `labels[i]` indexes `names`, and a class is its
name, so two splits are disjoint exactly when their names are.
"""

from __future__ import annotations

import dataclasses
import pathlib
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "Split",
    "Splits",
    "divide",
    "encode",
    "record_name",
    "select",
    "subset",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """One half of a data set. Every array has one row a record.

    `query` and `gallery` mark the two sides of a retrieval protocol; without them every image is
    both. `boxes` (left, top, right, bottom in pixels of the upright image) crop the record before
    any transform.
    `superlabels` are coarser classes. Where the `groups` of a query and a gallery item agree and
    are not -1, the evaluator ignores the pair (the same camera, the same photograph).
    """

    records: Sequence[Any]
    labels: np.ndarray
    names: tuple[str, ...]
    query: np.ndarray | None = None
    gallery: np.ndarray | None = None
    boxes: np.ndarray | None = None
    superlabels: np.ndarray | None = None
    groups: np.ndarray | None = None

    def __post_init__(self):
        object.__setattr__(self, "labels", np.asarray(self.labels, np.int32))
        for field in ("labels", "query", "gallery", "boxes", "superlabels", "groups"):
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
    """Both halves; `train` may be empty where a set is only for testing."""

    train: Split
    test: Split


def encode(strings: Iterable[Any], *, names: Sequence[str] | None = None):
    """Class names to dense labels: `(labels, names)`, sorted (numbers by value) unless given.

    Names are compared in Unicode's composed form, since one file system stores 'é' as one code
    point and another as two.
    """
    strings = [unicodedata.normalize("NFC", str(s)) for s in strings]
    if names is None:
        distinct = set(strings)
        numbers = all(name.isdecimal() and name.isascii() for name in distinct)
        names = sorted(distinct, key=(lambda n: (int(n), n)) if numbers else None)
    names = tuple(unicodedata.normalize("NFC", str(n)) for n in names)
    if len(set(names)) < len(names):
        twice = next(n for i, n in enumerate(names) if n in names[:i])
        raise ValueError(f"the class name {twice!r} is there twice")
    index = {name: i for i, name in enumerate(names)}
    unknown = [s for s in strings if s not in index]
    if unknown:
        raise ValueError(f"class {unknown[0]!r} is not among the {len(names)} names given")
    return np.fromiter((index[s] for s in strings), np.int32, len(strings)), names


@dataclasses.dataclass(frozen=True)
class _Picked:
    """Some records of a sequence that cannot be fancy-indexed."""

    records: Sequence[Any]
    indices: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int):
        return self.records[int(self.indices[i])]

    def describe(self, i: int) -> str:
        return record_name(self.records, int(self.indices[i]))


def select(records: Sequence[Any], indices: np.ndarray) -> Sequence[Any]:
    """`records` at `indices`, without reading any."""
    if isinstance(records, np.ndarray):
        return records[indices]
    if isinstance(records, list | tuple):
        return tuple(records[int(i)] for i in indices)
    if isinstance(records, _Picked):
        return _Picked(records.records, records.indices[indices])
    return _Picked(records, np.asarray(indices))


def record_name(records: Sequence[Any], i: int) -> str:
    """What to call record `i` in a message: its path where it has one, else its number."""
    if describe := getattr(records, "describe", None):
        return describe(i)
    if isinstance(records, np.ndarray):
        return f"record {i}"
    record = records[i]
    return str(record) if isinstance(record, str | pathlib.Path) else f"record {i}"


def subset(split: Split, indices: np.ndarray) -> Split:
    """The split at `indices` (in that order), with labels made dense again."""
    indices = np.asarray(indices)
    if indices.dtype == bool:
        indices = np.flatnonzero(indices)
    present, labels = np.unique(split.labels[indices], return_inverse=True)
    others = ("query", "gallery", "boxes", "superlabels", "groups")
    marks = {f: getattr(split, f) for f in others}
    return Split(
        records=select(split.records, indices),
        labels=labels,
        names=tuple(split.names[c] for c in present),
        **{f: None if rows is None else rows[indices] for f, rows in marks.items()},
    )


def divide(split: Split, *, train: float | Sequence[str]) -> Splits:
    """Class-disjoint halves. `train` is the fraction of the classes, in order, or their names.

    The first half for training is what the benchmarks of the field do. The same function holds out
    validation classes of a training split: none of the published splits has any.
    """
    if isinstance(train, str) or not isinstance(train, float | int | Sequence):
        raise ValueError(f"train must be a fraction or a list of class names, not {train!r}")
    if isinstance(train, Sequence):
        wanted = {unicodedata.normalize("NFC", str(name)) for name in train}
        if unknown := sorted(wanted - set(split.names)):
            raise ValueError(f"no class is called {unknown[0]!r}; there are {len(split.names)}")
        mine = np.array([name in wanted for name in split.names], bool)
    else:
        if not 0 <= train <= 1:
            raise ValueError(f"the fraction of training classes must be in 0..1, not {train}")
        mine = np.arange(len(split.names)) < round(train * len(split.names))
    chosen = mine[split.labels] if len(split) else np.zeros(0, bool)
    return Splits(subset(split, chosen), subset(split, ~chosen))
