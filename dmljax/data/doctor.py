"""Examines a data set: counts, classes, unreadable images, duplicates."""

import collections
import concurrent.futures
import contextlib
import decimal
import functools
import hashlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dmljax.data import decode, prepare
from dmljax.data.datasets import PUBLISHED
from dmljax.data.records import Reader
from dmljax.data.splits import Split, Splits, record_name
from dmljax.files import machine
from dmljax.files.writing import sha256
from dmljax.hints import Progress, counted

_SHARED_CLASSES = ("tiny_imagenet", "mnist")  # by design, train and test have the same classes
_EXAMPLES = 5  # names per finding


class Finding(NamedTuple):
    """One line of the report. `level` is 'ok', 'note' or 'WRONG'."""

    level: str
    text: str


def examine(splits: Splits, *, dataset: str = "", threads: int | None = None) -> Iterator[Finding]:
    """Yields the findings about a data set, quick ones first.

    `dataset` is the name of the published data set whose counts are expected.
    """
    by_name = splits._asdict()
    for name, split in by_name.items():
        yield _count(name, split, dataset)
    if len(splits.test) and (reason := splits.test.missing_positives()):
        yield Finding("WRONG", f"there is nothing to score in the test split: {reason}")
    yield from _names(splits)
    shared = sorted(set(splits.train.names) & set(splits.test.names))
    text = f"{len(shared)} classes are in train and test"
    if dataset in _SHARED_CLASSES:
        yield Finding("ok", f"{text}, as intended in this data set")
    else:
        yield _verdict(shared, text, "no class is in train and test")
    for name, split in by_name.items():
        if len(split):
            yield from _classes(name, split)
    hashes: dict[str, list[bytes]] = {}
    errors: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(threads or machine.core_count()) as pool:
        for name, split in by_name.items():
            hashes[name] = []
            read_fn = functools.partial(_read, Reader(split))
            with Progress(name, len(split), stream=sys.stderr) as progress:
                for i, (hash_, error) in enumerate(pool.map(read_fn, range(len(split)))):
                    hashes[name].append(hash_)
                    if error:
                        errors.append(f"{record_name(split.records, i)}: {error}")
                    progress.advance()
    problem = f"{counted(len(errors), 'image')} cannot be read"
    yield _verdict(errors, problem, "every image can be read")
    yield from _duplicates(splits, hashes)


def examine_shards(root: str | os.PathLike) -> Iterator[Finding]:
    """Compares the shards of a prepared data set with the hashes in its manifest."""
    folder = pathlib.Path(root).expanduser()
    splits = prepare.manifest(folder)["splits"].values()
    shards = [shard for split in splits for shard in split["shards"]]
    damaged = [x["file"] for x in shards if sha256(folder / x["file"]) != x["sha256"]]
    text = f"{len(damaged)} shards differ from the manifest"
    yield _verdict(damaged, text, f"{len(shards)} shards agree with the manifest")
    if skipped := [name for split in splits for name in split["skipped"]]:
        yield Finding("note", f"prepare skipped {len(skipped)} images: {_examples(skipped)}")


def _count(name: str, split: Split, dataset: str) -> Finding:
    text = f"{name}: {counted(len(split), 'image')} of {counted(len(split.names), 'class')}"
    if dataset not in PUBLISHED:
        if len(split):
            return Finding("note", text)
        return Finding("WRONG", f"{text}, so `dmljax train` refuses this data set")
    classes, images = PUBLISHED[dataset][0 if name == "train" else 2 :][:2]
    if (len(split.names), len(split)) == (classes, images):
        return Finding("ok", text)
    return Finding("WRONG", f"{text}; published are {images:,} images of {classes:,} classes")


def _names(splits: Splits) -> Iterator[Finding]:
    alike = collections.defaultdict(list)
    for name in sorted({*splits.train.names, *splits.test.names}):
        text = " ".join(name.casefold().split())
        with contextlib.suppress(ArithmeticError):  # a float would join long numbers
            text = str(decimal.Decimal(text).normalize())
        alike[text].append(name)
    if similar := [" = ".join(map(repr, names)) for names in alike.values() if len(names) > 1]:
        text = f"names of classes that differ only in case, blanks or zeros: {_examples(similar)}"
        yield Finding("note", f"{text}. If they mean one class, give its images one label")
    for name, split in splits._asdict().items():
        with contextlib.suppress(ValueError):
            numbers = list(map(float, split.names))
            if numbers != sorted(numbers):
                text = f"{name}: classes are numbers in the order of text: {_examples(split.names)}"
                yield Finding("note", f"{text}. Labels without '.0' have the order of numbers")


def _classes(name: str, split: Split) -> Iterator[Finding]:
    counts = np.bincount(split.labels, minlength=len(split.names))
    text = f"{name}: labels run from {split.labels.min()} to {split.labels.max()}"
    empty = [split.names[c] for c in np.flatnonzero(counts == 0)]
    yield _verdict(empty, f"{text}; no image of", text, separator=" ")
    smallest = np.argsort(counts, kind="stable")[:3]
    text = ", ".join(f"{split.names[c]!r} {counts[c]}" for c in smallest)
    if single := int((counts == 1).sum()):
        text += f"; {counted(single, 'class')} with one image, so no positive"
    yield Finding("note", f"{name}: the smallest classes are {text}")


def _read(reader: Reader, i: int) -> tuple[bytes, str]:
    """Reads an image once: hashes its bytes, then decodes them as the pipeline does."""
    try:
        record = reader.split.records[i]
        if isinstance(record, np.ndarray):
            data = np.ascontiguousarray(record).tobytes()
        else:
            data = record if isinstance(record, bytes) else pathlib.Path(record).read_bytes()
            reader(i, data)
    except decode.UnreadableImage as error:
        return b"", str(error.__cause__)
    except OSError as error:
        return b"", error.strerror or str(error)
    return hashlib.blake2b(data, digest_size=16).digest(), ""


def _duplicates(splits: Splits, hashes: dict[str, list[bytes]]) -> Iterator[Finding]:
    rows_of: dict[bytes, dict[str, list[int]]] = collections.defaultdict(dict)
    for name, split_hashes in hashes.items():
        for i, digest in enumerate(split_hashes):
            if digest:
                rows_of[digest].setdefault(name, []).append(i)

    def title(name: str, row: int) -> str:
        return record_name(getattr(splits, name).records, row)

    leaks = [
        " = ".join(title(name, rows[0]) for name, rows in by_split.items())
        for by_split in rows_of.values()
        if len(by_split) > 1
    ]
    yield _verdict(
        leaks, f"{len(leaks)} images are in train and test", "no file is in train and test"
    )
    for name in hashes:
        split = getattr(splits, name)
        repeated = [x[name] for x in rows_of.values() if len(x.get(name, ())) > 1]
        # With boxes, several records of a split may share a file.
        if repeated and split.boxes is None:
            clashes = sum(len(set(split.labels[rows].tolist())) > 1 for rows in repeated)
            text = f"{name}: {len(repeated)} files occur more than once"
            text += f", {clashes} of them in different classes" if clashes else ""
            yield Finding("note", f"{text}: {_examples([title(name, x[1]) for x in repeated])}")


def _verdict(
    names: Sequence[str], problem: str, otherwise: str, *, separator: str = ": "
) -> Finding:
    """Returns the problem with examples of `names`, or what is right if there are no names."""
    if names:
        return Finding("WRONG", f"{problem}{separator}{_examples(names)}")
    return Finding("ok", otherwise)


def _examples(names: Sequence[str]) -> str:
    more = f" and {len(names) - _EXAMPLES} more" if len(names) > _EXAMPLES else ""
    return "; ".join(map(str, names[:_EXAMPLES])) + more
