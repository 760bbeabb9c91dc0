"""Reads what `prepare` wrote: ArrayRecord shards and a manifest."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np

from dmljax.data import sources
from dmljax.data.splits import Split, Splits

__all__ = ["FORMAT", "MANIFEST", "manifest", "prepared"]

FORMAT = 1
MANIFEST = "manifest.json"
MARKS = {"query": bool, "gallery": bool, "superlabels": np.int32, "groups": np.int32}


def manifest(root: str | os.PathLike) -> dict:
    """The manifest of a prepared set: settings, and of each half counts, labels, shards, hashes."""
    root = pathlib.Path(root).expanduser()
    path = root / MANIFEST
    if not path.is_file():
        partial = any(root.glob("*.array_record")) if root.is_dir() else False
        hint = "it was not finished: run the same prepare again" if partial else "run prepare first"
        raise FileNotFoundError(f"prepared: {path} does not exist; {hint} (dmljax prepare --help)")
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, this version reads {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"prepared: {path} is not a manifest of prepare: {error}") from error
    return found


def prepared(*, root: str | os.PathLike) -> Splits:
    """A set that `prepare` has written to `root`; classes, labels and marks are the set's own."""
    root = pathlib.Path(root).expanduser()
    halves = []
    for name in Splits._fields:
        half = manifest(root)["splits"][name]
        shards = [root / shard["file"] for shard in half["shards"]]
        for shard, entry in zip(shards, half["shards"], strict=True):
            if not shard.is_file() or shard.stat().st_size != entry["bytes"]:
                raise FileNotFoundError(
                    f"prepared: {shard} is missing or not of {entry['bytes']} bytes: delete it and "
                    f"{MANIFEST}, then run the same prepare again"
                )
        marks = {k: np.array(half[k], t) for k, t in MARKS.items() if half[k] is not None}
        records = sources.ArrayRecords(shards)
        halves.append(Split(records, half["labels"], tuple(half["names"]), **marks))
    return Splits(*halves)
