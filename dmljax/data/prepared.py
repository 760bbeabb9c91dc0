"""Reads what `prepare` wrote: ArrayRecord shards and a manifest."""

import os
import pathlib

import numpy as np

from dmljax.data.records import ArrayRecords
from dmljax.data.splits import Split, Splits
from dmljax.files import reading

FORMAT = 1
MANIFEST = "manifest.json"
MARKS = {"query": bool, "gallery": bool, "superlabels": np.int32, "groups": np.int32}


def manifest(root: str | os.PathLike) -> dict:
    """The manifest of a prepared data set: settings; counts, labels, shards of each split."""
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
    """A data set that `prepare` has written to `root`, with the labels and marks of its source."""
    root = pathlib.Path(root).expanduser()
    splits = []
    for name in Splits._fields:
        entry = manifest(root)["splits"][name]
        shards = [root / shard["file"] for shard in entry["shards"]]
        for path, shard in zip(shards, entry["shards"], strict=True):
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise FileNotFoundError(
                    f"prepared: {path} is missing or its size is not {shard['bytes']} bytes: "
                    f"delete it and {MANIFEST}, then run the same prepare again"
                )
        marks = {
            mark: np.array(entry[mark], dtype)
            for mark, dtype in MARKS.items()
            if entry[mark] is not None
        }
        records = ArrayRecords(shards)
        splits.append(Split(records, entry["labels"], tuple(entry["names"]), **marks))
    return Splits(*splits)
