"""Where records come from: folders, TFDS, ArrayRecord shards, idx files. Nothing here decodes."""

from __future__ import annotations

import gzip
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from absl import logging

__all__ = ["IMAGE_SUFFIXES", "ArrayRecords", "TfdsRecords", "idx", "look_for", "tfds_set", "walk"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def look_for(
    root: str | os.PathLike | None,
    files: Sequence[str],
    *,
    dataset: str,
    origin: str,
    inside: Sequence[str] = (),
) -> pathlib.Path:
    """The folder that holds all `files`: `root`, or one of the folders `inside` it.

    Otherwise one error: what was looked for, where, where it comes from, how to point at it.
    """
    target = f"the folder that holds {files[0]}" if files else "a folder of class folders"
    help_ = f"{dataset} comes from {origin}; point root= at {target}"
    if root is None:
        raise ValueError(f"{dataset}: no root is given. {help_}")
    root = pathlib.Path(root).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"{dataset}: the folder {root} does not exist. {help_}")
    if not root.is_dir():
        raise NotADirectoryError(f"{dataset}: root {root} is a file, not a folder. {help_}")
    places = [root, *(root / name for name in inside)]
    for place in places:
        if all((place / file).exists() for file in files):
            return place
    best = max(places, key=lambda place: sum((place / file).exists() for file in files))
    missing = [file for file in files if not (best / file).exists()]
    raise FileNotFoundError(f"{dataset}: {best} has no {', no '.join(missing)}. {help_}")


def walk(folder: pathlib.Path) -> list[str]:
    """Paths of all images under `folder`, sorted; hidden files are left out.

    Links to folders are followed, but every folder is entered once, so a loop ends.
    """
    found, seen, todo = [], {os.path.realpath(folder)}, [str(folder)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if (real := os.path.realpath(entry.path)) in seen:
                        logging.warning("%s leads back to %s: not followed", entry.path, real)
                        continue
                    seen.add(real)
                    todo.append(entry.path)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    found.append(entry.path)
    return sorted(found)


class ArrayRecords:
    """Encoded images in ArrayRecord shards, read by index. Pickles as its list of shards."""

    def __init__(self, shards: Sequence[str | os.PathLike]):
        from array_record.python import array_record_data_source

        self._shards = [os.fspath(shard) for shard in shards]
        # An empty half has no shards, which ArrayRecord does not accept.
        self._source = (
            array_record_data_source.ArrayRecordDataSource(self._shards) if self._shards else ()
        )

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> bytes:
        return self._source[range(len(self._source))[i]]

    def __getstate__(self):
        return self._shards

    def __setstate__(self, shards):
        self.__init__(shards)

    def describe(self, i: int) -> str:
        where = os.path.dirname(self._shards[0])
        return f"record {i} of {where}"


class TfdsRecords:
    """The encoded images of a TFDS data source; decoding is ours, as TFDS keeps odd modes."""

    def __init__(self, source, name: str):
        self._source, self._name = source, name

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> bytes:
        return self._source[range(len(self._source))[i]]["image"]

    def describe(self, i: int) -> str:
        return f"record {i} of tfds {self._name}"


def tfds_set(
    name: str, *, split: str, data_dir: str | None, columns: Sequence[str], skip: Sequence[str] = ()
):
    """`(records, {column: its values}, features)` of a TFDS set stored as ArrayRecord.

    Images in `skip` besides "image" stay encoded, so that the scan of the columns is quick.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise FileNotFoundError(
            f"tfds {name}: source='tfds' needs TFDS: pip install 'dmljax[tfds]'"
        ) from error
    where = data_dir or tfds.core.constants.DATA_DIR
    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        skipped = {key: tfds.decode.SkipDecoding() for key in ("image", *skip)}
        source = builder.as_data_source(split=split, decoders=skipped)
        records = [source[i] for i in range(min(1, len(source)))]
    except Exception as error:  # TFDS has a dozen ways of saying that nothing is there
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"tfds {name}: no ArrayRecord data under {where} ({reason[0][:120]}). Make it once, "
            f"where TensorFlow is installed: tfds build {name} --file_format=array_record "
            f"--data_dir={where}; or read the original files with root="
        ) from error
    if not records:
        raise FileNotFoundError(f"tfds {name}: the split {split} under {where} is empty")
    items = (source[i] for i in range(len(source)))
    rows = [[item[column] for column in columns] for item in items]
    values = dict(zip(columns, zip(*rows, strict=True), strict=True))
    return TfdsRecords(source, name), values, builder.info.features


def idx(path: pathlib.Path) -> np.ndarray:
    """An array in the idx format of MNIST (`uint8`), gzipped or not."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError) as error:
            raise ValueError(f"{path} is a damaged gzip file: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes: it starts with {data[:4]!r}")
    rank = data[3]
    shape = tuple(np.frombuffer(data, ">u4", rank, 4).tolist()) if len(data) >= 4 + 4 * rank else ()
    wanted = 4 + 4 * rank + int(np.prod(shape, dtype=np.int64))
    if not shape or len(data) != wanted:
        raise ValueError(f"{path} has {len(data)} bytes, but its header announces {wanted}")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * rank).reshape(shape)
