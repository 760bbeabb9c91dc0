"""Says whether a data set on disk is what it should be.

    python -m dmljax.data.doctor --config=configs/cars_abe.py --config.dataset.root=stanford_cars
    python -m dmljax.data.doctor --dataset=cub200 --root=CUB_200_2011

reads every image and prints one line a finding: `ok`, `note`, or `WRONG`. The exit status is 1 if
anything is wrong, 2 if the set cannot be opened at all.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.data import command, decode, prepared
from dmljax.data.pipeline import Reader
from dmljax.data.splits import PUBLISHED, Split, Splits, record_name

__all__ = ["Finding", "examine", "main"]

_CUB_2010_IMAGES = 6_033
_CLOSED = ("tiny_imagenet", "mnist")  # the same classes in both halves, by design
_NAMED = 5  # at most so many examples a finding


class Finding(NamedTuple):
    """`level` is ok, note or WRONG."""

    level: str
    text: str


@dataclasses.dataclass
class _Image:
    """What reading one image told."""

    digest: bytes = b""
    height: int = 0
    width: int = 0
    mode: str = ""
    error: str = ""


def examine(splits: Splits, *, dataset: str = "", threads: int | None = None) -> Iterator[Finding]:
    """The findings, cheap ones first. `dataset` is the name whose published counts apply."""
    yield from _counts(splits, dataset)
    yield from _classes(splits, dataset)
    began = time.perf_counter()
    read = {name: _read(name, split, threads) for name, split in splits._asdict().items()}
    seconds = time.perf_counter() - began
    yield from _readable(splits, read)
    yield from _duplicates(splits, read)
    yield from _pictures(read, dataset, seconds)


def _counts(splits: Splits, dataset: str) -> Iterator[Finding]:
    total = sum(map(len, splits))
    for name, split in splits._asdict().items():
        found = (len(split.names), len(split))
        text = f"{name}: {found[1]:,} images of {found[0]:,} classes"
        if dataset not in PUBLISHED:
            level = "WRONG" if name == "test" and not len(split) else "note"
            yield Finding(level, text)
            continue
        published = PUBLISHED[dataset]
        wanted = published[:2] if name == "train" else published[2:]
        same = found == tuple(wanted)
        extra = "" if same else f"; published are {wanted[1]:,} images of {wanted[0]:,} classes"
        yield Finding("ok" if same else "WRONG", text + extra)
    if dataset == "cub200" and total == _CUB_2010_IMAGES:
        yield Finding(
            "WRONG", f"{total:,} images are CUB-200 of 2010; the papers use 2011's 11,788"
        )
    if dataset == "inshop" and splits.test.query is not None:
        sides = (int(splits.test.query.sum()), int(splits.test.gallery.sum()))
        level = "ok" if sides == (14_218, 12_612) else "WRONG"
        yield Finding(level, f"query {sides[0]:,}, gallery {sides[1]:,}; published 14,218, 12,612")


def _classes(splits: Splits, dataset: str) -> Iterator[Finding]:
    shared = sorted(set(splits.train.names) & set(splits.test.names))
    if dataset in _CLOSED:
        yield Finding("ok", f"{len(shared)} classes are in both halves, as this set has it")
    elif shared:
        yield Finding("WRONG", f"{len(shared)} classes are in both halves: {_some(shared)}")
    else:
        yield Finding("ok", "no class is in both halves")
    for name, split in splits._asdict().items():
        if not len(split):
            continue
        counts = np.bincount(split.labels, minlength=len(split.names))
        empty = np.flatnonzero(counts == 0)
        level = "WRONG" if len(empty) else "ok"
        text = f"{name}: labels run from {split.labels.min()} to {split.labels.max()}"
        missing = f"; no image of {_some([split.names[c] for c in empty])}" if len(empty) else ""
        yield Finding(level, text + missing)
        smallest = np.argsort(counts, kind="stable")[:3]
        named = ", ".join(f"{split.names[c]!r} {counts[c]}" for c in smallest)
        single = int((counts == 1).sum())
        extra = f"; {single} classes have one image, so no positive" if single else ""
        yield Finding("note", f"{name}: smallest classes are {named}{extra}")


def _look(split: Split, i: int) -> _Image:
    try:
        record = split.records[i]
        if isinstance(record, np.ndarray):
            data = np.ascontiguousarray(record).tobytes()
            return _Image(_digest(data), *record.shape[:2], "L" if record.shape[2] == 1 else "RGB")
        # The file is read once: hashed, and decoded as the pipeline would.
        data = record if isinstance(record, bytes) else pathlib.Path(record).read_bytes()
        image = Reader(dataclasses.replace(split, records=_One(data, i, len(split))), False)(i)
        return _Image(_digest(data), *image.shape[:2], decode.mode(data))
    except (ValueError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).split(" cannot be read: ")[-1]
        return _Image(error=reason.split(". Replace it")[0])


class _One:
    """A sequence whose only known record is `i`: bytes read already."""

    def __init__(self, data: bytes, i: int, length: int):
        self._data, self._i, self._length = data, i, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> bytes:
        assert i == self._i
        return self._data


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _read(name: str, split: Split, threads: int | None) -> list[_Image]:
    found = []
    with (
        concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count()) as pool,
        command.progress(name, len(split)) as bar,
    ):
        for image in pool.map(lambda i: _look(split, i), range(len(split))):
            found.append(image)
            bar.advance()
    return found


def _readable(splits: Splits, read: dict[str, list[_Image]]) -> Iterator[Finding]:
    bad = [
        f"{record_name(split.records, i)}: {image.error}"
        for (name, split) in splits._asdict().items()
        for i, image in enumerate(read[name])
        if image.error
    ]
    if bad:
        yield Finding("WRONG", f"{len(bad)} images cannot be read: {_some(bad)}")
    else:
        yield Finding("ok", "every image can be read")


def _duplicates(splits: Splits, read: dict[str, list[_Image]]) -> Iterator[Finding]:
    # With boxes one file holds several records, which is no duplicate within a half.
    where: dict[bytes, dict[str, list[int]]] = {}
    for name, images in read.items():
        for i, image in enumerate(images):
            if image.digest:
                where.setdefault(image.digest, {}).setdefault(name, []).append(i)
    across = [places for places in where.values() if len(places) > 1]
    if across:
        pairs = [
            " = ".join(record_name(getattr(splits, n).records, rows[0]) for n, rows in p.items())
            for p in across
        ]
        yield Finding("WRONG", f"{len(across)} images are in both halves: {_some(pairs)}")
    else:
        yield Finding("ok", "no file is in both halves")
    for name in read:
        split = getattr(splits, name)
        rows = [p[name] for p in where.values() if len(p.get(name, ())) > 1]
        if rows and split.boxes is None:
            clash = sum(len(set(split.labels[r].tolist())) > 1 for r in rows)
            extra = f", {clash} of them under different classes" if clash else ""
            named = _some([record_name(split.records, r[1]) for r in rows])
            yield Finding("note", f"{name}: {len(rows)} files are there again{extra}: {named}")


def _pictures(read: dict[str, list[_Image]], dataset: str, seconds: float) -> Iterator[Finding]:
    good = [image for images in read.values() for image in images if not image.error]
    if not good:
        return
    height, width = (np.mean([getattr(i, side) for i in good]) for side in ("height", "width"))
    rate = len(good) / max(seconds, 1e-9)
    yield Finding("note", f"mean size {width:.0f}x{height:.0f}, {rate:,.0f} images/s decoded")
    modes = collections.Counter(image.mode for image in good)
    grey = sum(n for mode, n in modes.items() if mode.startswith(("L", "I", "1")))
    alpha = sum(n for mode, n in modes.items() if mode.endswith(("A", "a")))
    yield Finding("note", f"greyscale {grey:,}, with alpha {alpha:,} (both become RGB)")
    # In-Shop's img is 256x256; img_highres is about 750x1101, and scores differ.
    if dataset == "inshop" and max(height, width) > 300:
        yield Finding(
            "WRONG",
            f"the images are Img/img_highres ({width:.0f}x{height:.0f}); published numbers use "
            "Img/img (256x256)",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return "; ".join(map(str, names[:_NAMED])) + more


def _shards(root: str) -> Iterator[Finding]:
    """Of a prepared set: the shards' hashes against the manifest."""
    home = pathlib.Path(root).expanduser()
    halves = prepared.manifest(home)["splits"].values()
    shards = [shard for half in halves for shard in half["shards"]]
    bad = []
    for shard in shards:
        with (home / shard["file"]).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
                bad.append(shard["file"])
    if bad:
        yield Finding("WRONG", f"{len(bad)} shards differ from the manifest: {_some(bad)}")
    else:
        yield Finding("ok", f"{len(shards)} shards agree with the manifest")
    if skipped := [name for half in halves for name in half["skipped"]]:
        yield Finding("note", f"{len(skipped)} images were skipped by prepare: {_some(skipped)}")


def _published_name(spec: dict[str, Any]) -> str:
    """The set whose counts apply: a prepared one is judged as what it was made from."""
    if spec["name"] == "prepared":
        return prepared.manifest(spec["root"])["settings"].get("dataset", {}).get("name", "")
    # A part of MNIST has no published count.
    return "" if spec.get("classes") else spec["name"]


def main(argv: Sequence[str]) -> int:
    parser = command.Parser("dmljax.data.doctor", __doc__)
    parser.add_argument("--config", help="a config file: its config.dataset is examined")
    command.add_dataset(parser)
    parser.add_argument("--threads", type=int, help="one a core by default")
    args, overrides = parser.parse_known_args(argv)
    if args.config:
        spec = command.spec_of_config(args.config, overrides)
    elif overrides:
        parser.error(f"{overrides[0]} is not known")
    else:
        spec = command.spec_of(args)
    splits = command.load(spec)
    wrong = 0
    findings = examine(splits, dataset=_published_name(spec), threads=args.threads)
    if spec["name"] == "prepared":
        findings = (f for part in (_shards(spec["root"]), findings) for f in part)
    for finding in findings:
        print(f"{finding.level:5s}  {finding.text}", flush=True)
        wrong += finding.level == "WRONG"
    print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    command.run(main)
