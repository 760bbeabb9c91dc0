"""Writes a data set once, small and quick to read.

    python -m dmljax.data.prepare --dataset=cars196 --root=stanford_cars --out=cars256

resizes every image once (shorter side 256) and stores it as JPEG in ArrayRecord shards, with a
manifest of counts, labels, hashes and settings. Then `--config.dataset.name=prepared` and
`--config.dataset.root=cars256` train on it. Interrupted, the same command goes on where it was;
the manifest is written last, so a folder that has one is whole. `--geometry` may be `shorter`,
`squash` (DVML) or `pad` (ABE). Images that are small enough JPEGs already keep their bytes.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmljax.data import command, decode, transforms
from dmljax.data.pipeline import Reader
from dmljax.data.prepared import FORMAT, MANIFEST, MARKS
from dmljax.data.splits import Split, Splits, record_name

__all__ = ["GEOMETRIES", "main", "prepare"]

GEOMETRIES = {
    "shorter": transforms.resize,
    "squash": transforms.squash,
    "pad": transforms.pad,
}
_PROGRESS = "progress.json"


def prepare(
    splits: Splits,
    *,
    out: str | os.PathLike,
    settings: dict[str, Any],
    size: int = 256,
    geometry: str = "shorter",
    quality: int = 90,
    shard_size: int = 1024,
    unreadable: str = "raise",
    threads: int | None = None,
) -> dict:
    """Writes both halves to `out` and returns the manifest. `settings` says what `splits` is."""
    if geometry not in GEOMETRIES:
        raise ValueError(f"geometry must be one of {', '.join(GEOMETRIES)}, not {geometry!r}")
    if size < 16 or not 1 <= quality <= 100 or shard_size < 1:
        raise ValueError(f"size {size}, quality {quality}, shard_size {shard_size}: out of range")
    if unreadable not in ("raise", "skip"):
        raise ValueError(f"unreadable must be 'raise' or 'skip', not {unreadable!r}")
    if any(isinstance(split.records, np.ndarray) for split in splits):
        raise ValueError("this set is held in memory as arrays: there is nothing to prepare")
    settings = {
        **settings,
        "size": size,
        "geometry": geometry,
        "quality": quality,
        "shard_size": shard_size,
        "unreadable": unreadable,
        "source": _fingerprint(splits),
    }
    out = pathlib.Path(out).expanduser()
    shards = _begin(out, settings)
    result: dict[str, Any] = {"format": FORMAT, "settings": settings, "splits": {}}
    workers = threads or os.cpu_count()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for name, split in splits._asdict().items():
            parts = -(-len(split) // shard_size)
            entries = []
            with command.progress(name, len(split)) as bar:
                for part in range(parts):
                    rows = range(part * shard_size, min((part + 1) * shard_size, len(split)))
                    file = f"{name}-{part:05d}-of-{parts:05d}.array_record"
                    if file not in shards:
                        shards[file] = _write(split, rows, out / file, settings, pool, bar)
                        _save(out / _PROGRESS, {"settings": settings, "shards": shards})
                    else:
                        for _ in rows:
                            bar.advance()
                    entries.append({"file": file, **shards[file]})
            result["splits"][name] = _summary(split, entries)
    _save(out / MANIFEST, result)
    (out / _PROGRESS).unlink()
    return result


def _begin(out: pathlib.Path, settings: dict) -> dict[str, dict]:
    """Makes `out`, or finds what an earlier run of the same settings has finished there."""
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out {out} is a file: choose a folder")
    if (out / MANIFEST).exists():
        raise FileExistsError(f"{out} holds a prepared set already: delete it or choose another")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / _PROGRESS).exists():
        if any(out.iterdir()):
            raise FileExistsError(f"{out} is not empty: choose another --out")
        _save(out / _PROGRESS, {"settings": settings, "shards": {}})
        return {}
    begun = json.loads((out / _PROGRESS).read_text())
    if begun["settings"] != settings:
        other = [k for k in settings if begun["settings"].get(k) != settings[k]]
        raise ValueError(
            f"{out} was begun with another {', '.join(other)}: finish it with the same command, "
            "or delete it"
        )
    for leftover in out.glob("*.tmp"):
        leftover.unlink()
    done = begun["shards"]
    return {f: e for f, e in done.items() if (out / f).exists() and _hash(out / f) == e["sha256"]}


def _write(split: Split, rows: range, path: pathlib.Path, settings: dict, pool, bar) -> dict:
    """One shard: written aside and renamed, so that under its own name it is whole."""
    from array_record.python import array_record_module

    reader = Reader(split, cache=False)

    def job(i: int) -> bytes | Exception:
        try:
            return _jpeg(reader, i, settings)
        except decode.UnreadableImage as error:
            return error

    aside = path.with_suffix(".tmp")
    writer = array_record_module.ArrayRecordWriter(str(aside), "group_size:1")
    kept, skipped = [], []
    for i, data in zip(rows, pool.map(job, rows), strict=True):
        bar.advance()
        if isinstance(data, bytes):
            writer.write(data)
            kept.append(i)
        elif settings["unreadable"] == "raise":
            writer.close()
            aside.unlink()
            raise data
        else:
            skipped.append(record_name(split.records, i))
            print(f"skipped: {data}", file=sys.stderr)
    writer.close()
    if not kept:
        raise decode.UnreadableImage(f"not one image of {path.name} can be read")
    entry = {"count": len(kept), "bytes": aside.stat().st_size, "sha256": _hash(aside)}
    os.replace(aside, path)
    return {**entry, "first": rows.start, "rows": kept, "skipped": skipped}


def _jpeg(reader: Reader, i: int, settings: dict) -> bytes:
    image = reader(i)
    small = min(image.shape[:2]) <= settings["size"]
    if settings["geometry"] == "shorter":
        if small and reader.split.boxes is None and (data := _as_is(reader.split.records[i])):
            return data
        # Enlarging is left to the transform: it would only cost bytes here.
        size = min(settings["size"], *image.shape[:2])
    else:
        size = settings["size"]
    rng = np.random.default_rng(0)  # geometry draws nothing
    image = GEOMETRIES[settings["geometry"]](image, rng, size=size)
    return decode.encode(image, quality=settings["quality"])


def _as_is(record: Any) -> bytes | None:
    """The record's own bytes where they are a JPEG that needs no turning."""
    data = record if isinstance(record, bytes) else pathlib.Path(record).read_bytes()
    return data if data[:2] == b"\xff\xd8" and b"Exif\0" not in data[:65536] else None


def _summary(split: Split, entries: list[dict]) -> dict[str, Any]:
    rows = [row for entry in entries for row in entry.pop("rows")]
    marks = {m: getattr(split, m) for m in MARKS}
    return {
        "count": len(rows),
        "classes": len(split.names),
        "names": list(split.names),
        "labels": split.labels[rows].tolist(),
        **{m: None if v is None else v[rows].tolist() for m, v in marks.items()},
        "skipped": [name for entry in entries for name in entry["skipped"]],
        "shards": [
            {k: entry[k] for k in ("file", "count", "bytes", "sha256")} for entry in entries
        ],
    }


def _fingerprint(splits: Splits) -> str:
    """Of names, labels and marks: a changed source is not mixed with an earlier run's shards."""
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.labels.tobytes())
        digest.update("\0".join(split.names).encode("utf-8", "surrogateescape"))
        for mark in ("boxes", *MARKS):
            if (values := getattr(split, mark)) is not None:
                digest.update(mark.encode() + np.ascontiguousarray(values).tobytes())
        if isinstance(split.records, list | tuple):
            digest.update("\0".join(map(str, split.records)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _hash(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _save(path: pathlib.Path, content: dict) -> None:
    aside = path.with_suffix(".tmp")
    with aside.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def main(argv: Sequence[str]) -> int:
    parser = command.Parser("dmljax.data.prepare", __doc__)
    command.add_dataset(parser)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--size", type=int, default=256, help="of the shorter side (or the square)")
    parser.add_argument("--geometry", default="shorter", help=", ".join(GEOMETRIES))
    parser.add_argument("--quality", type=int, default=90, help="of the JPEGs")
    parser.add_argument("--unreadable", default="raise", help="raise (default) or skip and report")
    parser.add_argument("--shard_size", type=int, default=1024, help="images of a shard")
    parser.add_argument("--threads", type=int, help="one a core by default")
    args = parser.parse_args(argv)
    spec = command.spec_of(args)
    options = ("out", "size", "geometry", "quality", "unreadable", "shard_size", "threads")
    done = prepare(
        command.load(spec), settings={"dataset": spec}, **{o: getattr(args, o) for o in options}
    )
    for name, half in done["splits"].items():
        size = sum(shard["bytes"] for shard in half["shards"]) / 2**20
        note = f", {len(half['skipped'])} skipped" if half["skipped"] else ""
        print(f"{name}: {half['count']} images of {half['classes']} classes, {size:.1f} MiB{note}")
    print(f"train on it with --config.dataset.name=prepared --config.dataset.root={args.out}")
    return 0


if __name__ == "__main__":
    command.run(main)
