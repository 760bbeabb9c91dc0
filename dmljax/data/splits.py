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
from absl import logging

from dmljax.hints import check_all, check_known


class Records(Protocol):
    """What is read by index: paths, encoded images or pixels."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Any: ...


MARKS = ("query", "gallery", "boxes", "superlabels", "groups")  # optional arrays of a split


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
        for field in ("labels", *MARKS):
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

    def search(self, embeddings: np.ndarray) -> Search:
        """Returns the protocol of queries, gallery and groups for `embeddings [n ...]`.

        Images that could not be read, rows that hold a NaN, neither search nor are found.
        """
        readable = np.isfinite(embeddings).all(axis=tuple(range(1, embeddings.ndim)))
        queries = np.flatnonzero(readable if self.query is None else readable & self.query)
        options, items, within = {}, queries, self.gallery is None
        if self.groups is not None:
            options["groups"] = self.groups[queries]
        if self.gallery is not None:
            items = np.flatnonzero(readable & self.gallery)
            options |= {"gallery": embeddings[items], "gallery_labels": self.labels[items]}
            if self.groups is not None:
                options["gallery_groups"] = self.groups[items]
        vectors, labels = embeddings[queries], self.labels[queries]
        return Search(vectors, labels, options, queries, items, within, readable)

    def missing_positives(self, embeddings: np.ndarray | None = None) -> str:
        """Returns why no query can find an image of its class, or "" if there is one to score.

        With `embeddings`, images that could not be read do not count (`search`).
        """
        search = self.search(np.zeros((len(self), 1)) if embeddings is None else embeddings)
        for rows, role in ((search.queries, "query"), (search.items, "gallery")):
            if not len(rows):
                return f"no image has the role '{role}': give it to some, or to none"
        groups = np.full(len(self), -1) if self.groups is None else self.groups
        pairs = np.stack([self.labels, groups], axis=1)
        _, codes = np.unique(pairs, axis=0, return_inverse=True)
        of_class = np.bincount(search.item_labels, minlength=len(self.names))
        of_pair = np.bincount(codes[search.items], minlength=len(self))
        queries = search.queries
        ignored = np.where(groups[queries] == -1, search.within, of_pair[codes[queries]])
        if (of_class[self.labels[queries]] > ignored).any():
            return ""
        other = "no image has another one" if search.within else "no query has an image"
        where = "" if search.within else " in the gallery"
        note = "" if self.groups is None else " outside of its group: correct the groups"
        return f"{other} of its class{where}{note}"


def warn_of_one_class(
    split: Split, title: str, *, result: str = "every image is right, and the scores say nothing"
) -> None:
    """Warns, with the `result`, if the split called `title` has only one class."""
    if len(split.names) == 1:
        logging.warning("%s has one class, %r: %s", title, split.names[0], result)


class Search(NamedTuple):
    """One search of a split: `metrics.retrieval(search.embeddings, search.labels, **options)`.

    `embeddings` and `labels` belong to the queries. `options` has `gallery`, `gallery_labels`,
    `groups` and `gallery_groups`, as far as the protocol has them. `queries` and `items` (the
    gallery) are rows of the split. With `within` the queries search each other, and both are the
    same rows. `readable [n]` marks the images that have an embedding.
    """

    embeddings: np.ndarray
    labels: np.ndarray
    options: dict[str, Any]
    queries: np.ndarray
    items: np.ndarray
    within: bool
    readable: np.ndarray

    @property
    def item_labels(self) -> np.ndarray:
        return self.options.get("gallery_labels", self.labels)

    @property
    def candidates(self) -> int:
        """The number of items that a query ranks."""
        return len(self.items) - self.within


class Splits(NamedTuple):
    """The two splits of a data set. `train` is empty if the data set is only for testing."""

    train: Split
    test: Split


def encode(strings: Iterable[Any], *, names: Sequence[str] | None = None):
    """Returns `(labels, names)` of a list of class names.

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

    def fingerprint(self) -> str | None:
        text = getattr(self.records, "fingerprint", lambda: None)()
        return None if text is None else f"{text} {self.indices.tolist()}"


def select(records: Records, indices: np.ndarray) -> Records:
    """Selects the records at `indices`, without reading them."""
    if isinstance(records, np.ndarray):
        return records[indices]
    if isinstance(records, list | tuple):
        return tuple(records[int(i)] for i in indices)
    if isinstance(records, _Selection):
        return _Selection(records.records, records.indices[indices])
    return _Selection(records, np.asarray(indices))


def record_name(records: Records, i: int) -> str:
    """Returns the name of record `i` in messages: its path if it has one, otherwise its index."""
    if describe := getattr(records, "describe", None):
        return describe(i)
    if isinstance(records, np.ndarray):
        return f"record {i}"
    record = records[i]
    return str(record) if isinstance(record, str | pathlib.Path) else f"record {i}"


def subset(split: Split, indices: np.ndarray) -> Split:
    """Selects the images at `indices`, in that order. Classes without images are removed."""
    indices = np.asarray(indices)
    if indices.dtype == bool:
        indices = np.flatnonzero(indices)
    present, labels = np.unique(split.labels[indices], return_inverse=True)
    marks = {name: getattr(split, name) for name in MARKS}
    return Split(
        records=select(split.records, indices),
        labels=labels,
        names=tuple(split.names[c] for c in present),
        **{name: None if rows is None else rows[indices] for name, rows in marks.items()},
    )


def repeated(split: Split, times: int) -> Split:
    """Repeats every image `times` in a row, without marks of queries and gallery."""
    rows = np.repeat(np.arange(len(split)), times)
    boxes = None if split.boxes is None else split.boxes[rows]
    return Split(_Selection(split.records, rows), split.labels[rows], split.names, boxes=boxes)


def images_of(split: Split) -> Split:
    """Returns the split with images as records, where its records are features of images."""
    selection = split.records if isinstance(split.records, _Selection) else None
    records = split.records if selection is None else selection.records
    rows = None if selection is None else selection.indices
    images = getattr(records, "images", None)
    if images is None:
        return split
    records = images.records if rows is None else select(images.records, rows)
    boxes = images.boxes if rows is None or images.boxes is None else images.boxes[rows]
    return dataclasses.replace(split, records=records, boxes=boxes)


def divide(split: Split, *, train: float | Sequence[str]) -> Splits:
    """Divides a split by class. `train` is a fraction of the classes or their names.

    A fraction selects the first classes in their order.

    It divides a data set into training and test classes, or a training split into training and
    validation classes.
    """
    if isinstance(train, str) or not isinstance(train, float | int | Sequence):
        raise ValueError(f"train must be a fraction or a list of class names, not {train!r}")
    if isinstance(train, Sequence):
        train_names = {unicodedata.normalize("NFC", str(name)) for name in train}
        check_known("no class is called", sorted(train_names), split.names)
        is_train = np.array([name in train_names for name in split.names], bool)
    else:
        if not 0 <= train <= 1:
            raise ValueError(f"the fraction of training classes must be in 0..1, not {train}")
        is_train = np.arange(len(split.names)) < round(train * len(split.names))
    rows = is_train[split.labels] if len(split) else np.zeros(0, bool)
    return Splits(subset(split, rows), subset(split, ~rows))


def fold_of_classes(
    classes: int, *, fold: int, folds: int = 4, seed: int | None = None
) -> np.ndarray:
    """Returns which classes a fold holds out, as bool `[classes]`: about one in `folds`.

    Fold 0 holds out the last classes in their order. The other folds hold out contiguous blocks
    from the first class on (Musgrave et al., 2020): of 100 classes, 75 to 99, 0 to 24, 25 to 49 and
    50 to 74. All blocks have the same length, so if `folds` does not divide `classes`, a few
    classes are in no block. With a `seed`, the classes are shuffled before they are divided.

    >>> fold_of_classes(5, fold=1, folds=2)
    array([ True,  True, False, False, False])
    """
    count = f"held_out.count={folds}"
    few = f"{count} of {classes} classes: choose 2 to {classes // 2}, so that two are held out"
    none = f"held_out.index={fold} must be one of 0 to {folds - 1}, as {count}"
    check_all({few: not 2 <= folds <= classes // 2, none: not 0 <= fold < folds})
    end = classes * fold // folds or classes
    block = np.arange(end - classes // folds, end)
    order = np.arange(classes) if seed is None else np.random.default_rng(seed).permutation(classes)
    is_held_out = np.zeros(classes, bool)
    is_held_out[order[block]] = True
    return is_held_out


def queries_and_gallery(split: Split) -> Split:
    """Marks every second image of a class as a query, and the others as the gallery."""
    order = np.argsort(split.labels, kind="stable")
    starts = np.searchsorted(split.labels[order], np.arange(len(split.names)))
    query = np.zeros(len(split), bool)
    query[order] = (np.arange(len(split)) - starts[split.labels[order]]) % 2 == 1
    return dataclasses.replace(split, query=query, gallery=~query)


def share(split: Split, *, images: float = 1.0, classes: float = 1.0, seed: int) -> Split:
    """Draws a fraction of the classes with `seed`, and a fraction of the images of each.

    Two classes, and two images of a class that has them, always remain. With the same seed, a
    smaller share is a part of a larger one.
    """
    for name, value in (("images", images), ("classes", classes)):
        if not 0 < value <= 1:
            raise ValueError(f"the share of the {name} must be above 0 and at most 1, not {value}")
    rng = np.random.default_rng([seed, 0])
    count = max(2, round(classes * len(split.names)))
    is_drawn = np.zeros(len(split.names), bool)
    is_drawn[rng.permutation(len(split.names))[:count]] = True
    rng = np.random.default_rng([seed, 1])
    rows = []
    for label in range(len(split.names)):
        members = rng.permutation(np.flatnonzero(split.labels == label))
        if is_drawn[label]:
            rows.append(members[: max(2, round(images * len(members)))])
    return subset(split, np.sort(np.concatenate(rows)))
