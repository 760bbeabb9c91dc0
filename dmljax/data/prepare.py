"""Prepared data sets: images resized once, as JPEG in ArrayRecord shards, with a manifest.

The manifest is written last, so a folder that has one is complete.
"""

import concurrent.futures
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from dmljax.data import decode
from dmljax.data.digest import digest
from dmljax.data.records import ArrayRecords, Reader
from dmljax.data.splits import Split, Splits, record_name
from dmljax.data.transforms import operations as transforms
from dmljax.files import machine, reading
from dmljax.files import writing as files
from dmljax.hints import Progress, check_known

FORMAT = 1
MANIFEST = "manifest.json"
MARKS = {"query": bool, "gallery": bool, "superlabels": np.int32, "groups": np.int32}
GEOMETRIES: dict[str, Callable[[int], transforms.Operation]] = {
    "shorter": lambda size: transforms.resize_shorter_side(size=size),
    "squash": lambda size: transforms.resize(height=size, width=size, antialias=False),
    "pad": lambda size: transforms.pad_to_square(size=size),
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
    """Writes both splits to `out` and returns the manifest.

    `geometry` is 'shorter' (the shorter side becomes `size`), 'squash' or 'pad'. JPEGs that are
    small enough already are copied byte for byte. `settings` describes where `splits` come from. An
    interrupted call continues if it is repeated with the same arguments.
    """
    check_known("prepare has no geometry", [geometry], GEOMETRIES)
    check_known("`unreadable` has no value", [unreadable], ("raise", "skip"))
    if size < 16 or not 1 <= quality <= 100 or shard_size < 1:
        raise ValueError(
            f"`size` must be 16 or more, `quality` from 1 to 100 and `shard_size` 1 or more, got "
            f"{size}, {quality} and {shard_size}"
        )
    if any(isinstance(split.records, np.ndarray) for split in splits):
        raise ValueError("this data set is an array in memory: there is nothing to prepare")
    settings = {**settings, "size": size, "geometry": geometry, "quality": quality}
    settings |= {"shard_size": shard_size, "unreadable": unreadable, "source": digest(splits)}
    out = pathlib.Path(out).expanduser()
    finished = _open(out, settings)
    manifest: dict[str, Any] = {"format": FORMAT, "settings": settings, "splits": {}}
    with concurrent.futures.ThreadPoolExecutor(threads or machine.core_count()) as pool:
        for name, split in splits._asdict().items():
            shard_count = -(-len(split) // shard_size)
            shards = []
            with Progress(name, len(split), stream=sys.stderr) as progress:
                for shard in range(shard_count):
                    rows = range(shard * shard_size, min((shard + 1) * shard_size, len(split)))
                    file = f"{name}-{shard:05d}-of-{shard_count:05d}.array_record"
                    if file in finished:
                        progress.advance(len(rows))
                    else:
                        path = out / file
                        finished[file] = _write_shard(split, rows, path, settings, pool, progress)
                        state = {"settings": settings, "shards": finished}
                        files.write_json(out / _PROGRESS, state)
                    shards.append({"file": file, **finished[file]})
            manifest["splits"][name] = _summary(split, shards)
    files.write_json(out / MANIFEST, manifest)
    (out / _PROGRESS).unlink()
    return manifest


def _open(out: pathlib.Path, settings: dict[str, Any]) -> dict[str, dict]:
    """Creates `out`, or returns the shards that an earlier run with these settings has finished."""
    if not (out / _PROGRESS).exists():
        # A killed run may have left a temporary file of the first write.
        if out.exists() and not (out.is_dir() and all(x.suffix == ".tmp" for x in out.iterdir())):
            raise FileExistsError(f"--out={out} is not an empty folder: choose another one")
        files.make_folder(out)
        files.write_json(out / _PROGRESS, {"settings": settings, "shards": {}})
        return {}
    earlier = reading.json_file(out / _PROGRESS)
    if earlier["settings"] != settings:
        different = [k for k in settings if earlier["settings"].get(k) != settings[k]]
        raise ValueError(
            f"{out} holds an unfinished data set with another {', '.join(different)}: finish it "
            "with the same command, or delete it"
        )
    for leftover in out.glob("*.tmp"):
        leftover.unlink()
    digests = {path.name: files.sha256(path) for path in out.glob("*.array_record")}
    return {name: x for name, x in earlier["shards"].items() if digests.get(name) == x["sha256"]}


def _write_shard(
    split: Split,
    rows: range,
    path: pathlib.Path,
    settings: dict[str, Any],
    pool: concurrent.futures.Executor,
    progress: Progress,
) -> dict[str, Any]:
    """Writes the images `rows` to a temporary file and renames it to `path`; returns its entry."""
    from array_record.python import array_record_module

    reader = Reader(split)

    def encode(i: int) -> bytes | Exception:
        try:
            return _jpeg(reader, i, settings)
        except decode.UnreadableImage as error:
            return error

    temporary = path.with_suffix(".tmp")
    writer = array_record_module.ArrayRecordWriter(str(temporary), "group_size:1")
    written_rows, skipped = [], []
    for i, data in zip(rows, pool.map(encode, rows), strict=True):
        progress.advance()
        if isinstance(data, bytes):
            writer.write(data)
            written_rows.append(i)
        elif settings["unreadable"] == "raise":
            writer.close()
            temporary.unlink()
            raise data
        else:
            skipped.append(record_name(split.records, i))
            print(f"skipped: {data}", file=sys.stderr)
    writer.close()
    if not written_rows:
        raise decode.UnreadableImage(f"not a single image of {path.name} can be read")
    entry = {
        "count": len(written_rows),
        "bytes": temporary.stat().st_size,
        "sha256": files.sha256(temporary),
    }
    files.sync(temporary)
    os.replace(temporary, path)
    return {**entry, "first": rows.start, "rows": written_rows, "skipped": skipped}


def _jpeg(reader: Reader, i: int, settings: dict[str, Any]) -> bytes:
    """Encodes image `i` in the geometry of the settings."""
    image = reader(i)
    small = min(image.shape[:2]) <= settings["size"]
    if settings["geometry"] == "shorter":
        if small and reader.split.boxes is None and (data := _original(reader.split.records[i])):
            return data
        # Do not enlarge here: that would only cost bytes, and the transform enlarges anyway.
        size = min(settings["size"], *image.shape[:2])
    else:
        size = settings["size"]
    rng = np.random.default_rng(0)  # these transforms draw nothing
    image = GEOMETRIES[settings["geometry"]](size)(image, rng)
    return decode.encode(image, quality=settings["quality"])


def _original(record: Any) -> bytes | None:
    """Returns the bytes of a JPEG without EXIF, which may contain a rotation, else None."""
    data = record if isinstance(record, bytes) else pathlib.Path(record).read_bytes()
    return data if data[:2] == b"\xff\xd8" and b"Exif\0" not in data[:65536] else None


def _summary(split: Split, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the entry of a split in the manifest."""
    rows = [row for shard in shards for row in shard["rows"]]
    marks = {name: getattr(split, name) for name in MARKS}
    kept = ("file", "count", "bytes", "sha256")
    return {
        "count": len(rows),
        "classes": len(split.names),
        "names": list(split.names),
        "labels": split.labels[rows].tolist(),
        **{name: None if mark is None else mark[rows].tolist() for name, mark in marks.items()},
        "skipped": [name for shard in shards for name in shard["skipped"]],
        "shards": [{key: shard[key] for key in kept} for shard in shards],
    }


def manifest(root: str | os.PathLike) -> dict:
    """Reads the manifest of a prepared data set: settings; labels and shards of each split."""
    root = pathlib.Path(root).expanduser()
    path = root / MANIFEST
    if not path.is_file():
        unfinished = any(root.glob("*.array_record")) if root.is_dir() else False
        hint = "run the same prepare again to finish it" if unfinished else "run prepare first"
        raise FileNotFoundError(f"prepared: {path} does not exist; {hint} (dmljax prepare --help)")
    try:
        content = reading.json_value(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"prepared: {path} is not a manifest of prepare: {error}") from error
    return content


def prepared(*, root: str | os.PathLike) -> Splits:
    """Reads a data set that `prepare` wrote to `root`, with labels and marks of its source."""
    root = pathlib.Path(root).expanduser()
    splits, content = [], manifest(root)
    for name in Splits._fields:
        entry = content["splits"][name]
        for shard in entry["shards"]:
            path = root / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise FileNotFoundError(
                    f"prepared: {path} is missing or its size is not {shard['bytes']} bytes: "
                    f"delete {root} and run the same prepare again"
                )
        marks = {x: np.array(entry[x], t) for x, t in MARKS.items() if entry[x] is not None}
        records = ArrayRecords([root / shard["file"] for shard in entry["shards"]])
        splits.append(Split(records, entry["labels"], tuple(entry["names"]), **marks))
    return Splits(*splits)
