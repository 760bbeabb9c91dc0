"""Examines a data set: counts, classes, unreadable images, duplicates."""

import collections
import concurrent.futures
import dataclasses
import decimal
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dmljax.data import decode, prepared
from dmljax.data.published import PUBLISHED
from dmljax.data.reader import Reader
from dmljax.data.splits import Split, Splits, record_name
from dmljax.files import cores
from dmljax.files.progress import Progress
from dmljax.files.writing import sha256
from dmljax.hints import counted

_CUB_2010_IMAGES = 6_033
_SHARED_CLASSES = ("tiny_imagenet", "mnist")  # by design, train and test have the same classes
_EXAMPLES = 5  # names per finding


class Finding(NamedTuple):
    """One line of the report. `level` is 'ok', 'note' or 'WRONG'."""

    level: str
    text: str


@dataclasses.dataclass
class _Image:
    """What the doctor knows of an image after reading it."""

    digest: bytes = b""
    height: int = 0
    width: int = 0
    mode: str = ""
    error: str = ""


def examine(splits: Splits, *, dataset: str = "", threads: int | None = None) -> Iterator[Finding]:
    """The findings about a data set, quick ones first.

    `dataset` is the name of the published data set whose counts are expected.
    """
    yield from _counts(splits, dataset)
    yield from _names(splits)
    yield from _classes(splits, dataset)
    start = time.perf_counter()
    images = {name: _read(name, split, threads) for name, split in splits._asdict().items()}
    seconds = time.perf_counter() - start
    yield from _unreadable(splits, images)
    yield from _duplicates(splits, images)
    yield from _formats(images, dataset, seconds)


def examine_shards(root: str | os.PathLike) -> Iterator[Finding]:
    """Compares the shards of a prepared data set with the hashes in its manifest."""
    folder = pathlib.Path(root).expanduser()
    splits = prepared.manifest(folder)["splits"].values()
    shards = [shard for split in splits for shard in split["shards"]]
    damaged = [x["file"] for x in shards if sha256(folder / x["file"]) != x["sha256"]]
    text = f"{len(damaged)} shards differ from the manifest"
    yield _verdict(damaged, text, f"{len(shards)} shards agree with the manifest")
    if skipped := [name for split in splits for name in split["skipped"]]:
        yield Finding("note", f"prepare skipped {len(skipped)} images: {_examples(skipped)}")


def _counts(splits: Splits, dataset: str) -> Iterator[Finding]:
    for name, split in splits._asdict().items():
        text = f"{name}: {counted(len(split), 'image')} of {counted(len(split.names), 'class')}"
        if dataset not in PUBLISHED:
            if not len(split):
                text += ", so `dmljax train` refuses this data set"
            yield Finding("note" if len(split) else "WRONG", text)
            continue
        classes, images = PUBLISHED[dataset][0 if name == "train" else 2 :][:2]
        if (len(split.names), len(split)) == (classes, images):
            yield Finding("ok", text)
        else:
            text += f"; published are {images:,} images of {classes:,} classes"
            yield Finding("WRONG", text)
    if len(splits.test) and (reason := splits.test.missing_positives()):
        yield Finding("WRONG", f"there is nothing to score in the test split: {reason}")
    if dataset == "cub200" and sum(map(len, splits)) == _CUB_2010_IMAGES:
        text = "6,033 images are CUB-200 of 2010; the papers use the 11,788 images of 2011"
        yield Finding("WRONG", text)
    query, gallery = splits.test.query, splits.test.gallery
    if dataset == "inshop" and query is not None and gallery is not None:
        counts = int(query.sum()), int(gallery.sum())
        level = "ok" if counts == (14_218, 12_612) else "WRONG"
        text = f"query {counts[0]:,}, gallery {counts[1]:,}; published are 14,218 and 12,612"
        yield Finding(level, text)


def _classes(splits: Splits, dataset: str) -> Iterator[Finding]:
    shared = sorted(set(splits.train.names) & set(splits.test.names))
    if dataset in _SHARED_CLASSES:
        text = f"{len(shared)} classes are in train and test, as intended in this data set"
        yield Finding("ok", text)
    else:
        text = f"{len(shared)} classes are in train and test"
        yield _verdict(shared, text, "no class is in train and test")
    for name, split in splits._asdict().items():
        if not len(split):
            continue
        counts = np.bincount(split.labels, minlength=len(split.names))
        empty = np.flatnonzero(counts == 0)
        text = f"{name}: labels run from {split.labels.min()} to {split.labels.max()}"
        if len(empty):
            text += f"; no image of {_examples([split.names[c] for c in empty])}"
        yield Finding("WRONG" if len(empty) else "ok", text)
        smallest = np.argsort(counts, kind="stable")[:3]
        text = f"{name}: the smallest classes are "
        text += ", ".join(f"{split.names[c]!r} {counts[c]}" for c in smallest)
        if single := int((counts == 1).sum()):
            text += f"; {counted(single, 'class')} with one image, so no positive"
        yield Finding("note", text)


def _names(splits: Splits) -> Iterator[Finding]:
    alike: dict[str | decimal.Decimal, list[str]] = {}
    for name in sorted({*splits.train.names, *splits.test.names}):
        alike.setdefault(_plain(name), []).append(name)
    if similar := [" = ".join(map(repr, names)) for names in alike.values() if len(names) > 1]:
        text = f"names of classes that differ only in case, blanks or zeros: {_examples(similar)}"
        yield Finding("note", f"{text}. If they mean one class, give its images one label")
    for name, split in splits._asdict().items():
        plain = [_plain(x) for x in split.names]
        numbers = [x for x in plain if isinstance(x, decimal.Decimal)]
        if len(numbers) == len(plain) and numbers != sorted(numbers):
            text = f"{name}: classes are numbers in the order of text: {_examples(split.names)}"
            yield Finding("note", f"{text}. Labels without '.0' have the order of numbers")


def _plain(name: str) -> str | decimal.Decimal:
    """The name without case and blanks, or its value if it is a number."""
    text = " ".join(name.casefold().split())
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        return text
    return number if number.is_finite() else text


def _read(name: str, split: Split, threads: int | None) -> list[_Image]:
    """Reads every image of a split."""
    images = []
    with (
        concurrent.futures.ThreadPoolExecutor(threads or cores.count()) as pool,
        Progress(name, len(split), stream=sys.stderr) as progress,
    ):
        reader = Reader(split)
        for image in pool.map(lambda i: _read_image(reader, i), range(len(split))):
            images.append(image)
            progress.advance()
    return images


def _read_image(reader: Reader, i: int) -> _Image:
    try:
        record = reader.split.records[i]
        if isinstance(record, np.ndarray):
            data = np.ascontiguousarray(record).tobytes()
            height, width, channels = record.shape
            return _Image(_digest(data), height, width, "L" if channels == 1 else "RGB")
        # Read the file once: hash its bytes, then decode them as the pipeline does.
        data = record if isinstance(record, bytes) else pathlib.Path(record).read_bytes()
        image = reader(i, data)
        return _Image(_digest(data), image.shape[0], image.shape[1], decode.mode(data))
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).split(" cannot be read: ")[-1]
        return _Image(error=reason.split(". Replace it")[0])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _unreadable(splits: Splits, images: dict[str, list[_Image]]) -> Iterator[Finding]:
    errors = [
        f"{record_name(split.records, i)}: {image.error}"
        for name, split in splits._asdict().items()
        for i, image in enumerate(images[name])
        if image.error
    ]
    yield _verdict(
        errors, f"{counted(len(errors), 'image')} cannot be read", "every image can be read"
    )


def _duplicates(splits: Splits, images: dict[str, list[_Image]]) -> Iterator[Finding]:
    rows_of_digest: dict[bytes, dict[str, list[int]]] = {}
    for name, split_images in images.items():
        for i, image in enumerate(split_images):
            if image.digest:
                rows_of_split = rows_of_digest.setdefault(image.digest, {})
                rows_of_split.setdefault(name, []).append(i)
    leaks = [rows for rows in rows_of_digest.values() if len(rows) > 1]
    names = [
        " = ".join(record_name(getattr(splits, n).records, i[0]) for n, i in rows.items())
        for rows in leaks
    ]
    text = f"{len(leaks)} images are in train and test"
    yield _verdict(names, text, "no file is in train and test")
    for name in images:
        split = getattr(splits, name)
        repeated = [rows[name] for rows in rows_of_digest.values() if len(rows.get(name, ())) > 1]
        # With boxes, several records of a split may share a file.
        if repeated and split.boxes is None:
            clashes = sum(len(set(split.labels[rows].tolist())) > 1 for rows in repeated)
            text = f"{name}: {len(repeated)} files occur more than once"
            text += f", {clashes} of them in different classes" if clashes else ""
            names = [record_name(split.records, rows[1]) for rows in repeated]
            yield Finding("note", f"{text}: {_examples(names)}")


def _formats(images: dict[str, list[_Image]], dataset: str, seconds: float) -> Iterator[Finding]:
    readable = [image for split in images.values() for image in split if not image.error]
    if not readable:
        return
    height = np.mean([image.height for image in readable])
    width = np.mean([image.width for image in readable])
    rate = len(readable) / max(seconds, 1e-9)
    yield Finding("note", f"mean size {width:.0f}x{height:.0f}, {rate:,.0f} images/s decoded")
    modes = collections.Counter(image.mode for image in readable)
    gray = sum(n for mode, n in modes.items() if mode.startswith(("L", "I", "1")))
    alpha = sum(n for mode, n in modes.items() if mode.endswith(("A", "a")))
    yield Finding("note", f"grayscale {gray:,}, with alpha {alpha:,} (both are converted to RGB)")
    # In-Shop's img is 256x256; img_highres is about 750x1101 and gives other scores.
    if dataset == "inshop" and max(height, width) > 300:
        yield Finding(
            "WRONG",
            f"the images are Img/img_highres ({width:.0f}x{height:.0f}); published numbers use "
            "Img/img (256x256)",
        )


def _verdict(names: Sequence[str], problem: str, otherwise: str) -> Finding:
    """The problem of `names` with examples; what is right instead if there are no names."""
    if names:
        return Finding("WRONG", f"{problem}: {_examples(names)}")
    return Finding("ok", otherwise)


def _examples(names: Sequence[str]) -> str:
    more = f" and {len(names) - _EXAMPLES} more" if len(names) > _EXAMPLES else ""
    return "; ".join(map(str, names[:_EXAMPLES])) + more
