"""A folder that many processes fill with parts of the rows, without communication.

vectors/
    shards.json          the number of parts and what all parts must have in common
    part-0-of-8.lock     locked by the process that writes this part; says which
    part-0-of-8/         its files; part.json, the last one, has their SHA-256 and the rows
    manifest.json        the parts that are complete; "complete": true when all are

The operating system keeps the locks (`flock`) and ends them with the process. The file system
of a cluster must support them: NFS 4, Lustre with `-o flock`, Filestore. A bucket does not.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dmljax.files import locks, reading
from dmljax.files.writing import make_folder, sha256, sync, write_json

_SHARDS, _PART, _MANIFEST, _FORMAT = "shards.json", "part.json", "manifest.json", 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` of `count`; the first index is 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def folder(self) -> str:
        return f"part-{self.index}-of-{self.count}"

    def rows(self, total: int) -> range:
        """Returns the rows `[index total / count, (index + 1) total / count)` of `total`."""
        return range(
            self.index * total // self.count,
            (self.index + 1) * total // self.count,
        )


def parse(text: str, *, flag: str = "--shard") -> Shard:
    """Parses a shard such as '3/8'.

    >>> parse("3/8").rows(100)
    range(37, 50)
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    shard = Shard(*map(int, match.groups())) if match else Shard(0, 0)
    if not shard.index < shard.count:
        raise ValueError(
            f"{flag}={text} is not I/N with I from 0 to N - 1, such as 0/8 for the first of eight"
        )
    return shard


@contextlib.contextmanager
def claimed(
    out: str | os.PathLike, shard: Shard, task: Mapping[str, Any]
) -> Iterator[pathlib.Path]:
    """Locks a part until the block ends, and yields its folder.

    `task` is JSON: what all parts have in common, such as the digest of the model. `out` must be
    new or empty, or begun with the same number of parts and the same task.
    """
    out = pathlib.Path(out)
    make_folder(out)
    common = {"format": _FORMAT, "parts": shard.count, **task}
    with locks.lock(out / "shards.lock", wait=True):
        _begin(out, common)
    try:
        file = locks.lock(out / f"{shard.folder}.lock")
    except locks.Taken as owner:
        raise ValueError(f"{shard.folder} in {out} is being written by {owner}") from None
    with file:
        folder = out / shard.folder
        make_folder(folder)
        for path in folder.glob("*.tmp"):
            path.unlink()  # a killed process was writing it
        yield folder


def _begin(out: pathlib.Path, common: dict[str, Any]) -> None:
    """Writes what the parts have in common, or compares it with what the first one wrote."""
    if not (out / _SHARDS).exists():
        if any(p.name != "shards.lock" and p.suffix != ".tmp" for p in out.iterdir()):
            raise FileExistsError(f"{out} is not empty: choose another folder")
        write_json(out / _SHARDS, common, indent=1)
        return
    begun_with = _common(out)
    if begun_with["parts"] != common["parts"]:
        count = begun_with["parts"]
        raise ValueError(
            f"{out} was begun with {count} parts, not {common['parts']}: give --shard=I/{count}, "
            "or choose another folder"
        )
    different = [k for k in {**begun_with, **common} if begun_with.get(k) != common.get(k)]
    if different:
        values = ", ".join(
            f"{name} ({begun_with.get(name)}, not {common.get(name)})" for name in different
        )
        raise ValueError(f"{out} was begun with another {values}: choose another folder")


def _common(out: pathlib.Path) -> dict[str, Any]:
    try:
        return reading.json_file(out / _SHARDS)
    except FileNotFoundError:
        raise FileNotFoundError(f"{out} lacks {_SHARDS}: it is not a folder of parts") from None


def is_complete(folder: pathlib.Path) -> bool:
    """Returns whether the part in `folder`, which `claimed` gave, is complete."""
    return (folder / _PART).exists()


def finish(folder: pathlib.Path, shard: Shard, *, rows: range, **facts: Any) -> None:
    """Writes `part.json`, the digests of all files in `folder`: after it the part is complete.

    `progress.json` is not part of it; whoever wrote that file deletes it afterwards.
    """
    files = sorted(p for p in folder.iterdir() if p.name != "progress.json" and p.is_file())
    for file in files:
        sync(file)
    content = {
        "part": shard.index,
        "shards": _common(folder.parent),
        "rows": [rows.start, rows.stop],
        **facts,
        "files": {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in files},
    }
    write_json(folder / _PART, content, indent=1)


def complete(out: str | os.PathLike) -> dict[str, Any]:
    """Writes and returns the manifest: which parts are complete, with their rows and digests.

    Every process calls it when its part is complete, so the last one writes the full manifest.
    """
    out = pathlib.Path(out)
    with locks.lock(out / "shards.lock", wait=True):
        common = _common(out)
        parts, missing = [], []
        for index in range(common["parts"]):
            shard = Shard(index, common["parts"])
            path = out / shard.folder / _PART
            if not path.exists():
                missing.append(shard.folder)
                continue
            part = reading.json_file(path)
            if part.pop("shards") != common or part["part"] != index:
                raise ValueError(
                    f"{shard.folder} in {out} is a part of something else (another model, list or "
                    f"number of parts): delete it and run --shard={shard} again"
                )
            parts.append({"folder": shard.folder, **part})
        rows = sum(part["rows"][1] - part["rows"][0] for part in parts)
        manifest = {"complete": not missing, **common, "rows": rows, "missing": missing}
        manifest["folders"] = parts
        write_json(out / _MANIFEST, manifest, indent=1)
    return manifest


def read(out: str | os.PathLike) -> dict[str, Any]:
    """Reads the manifest of a folder; raises, with their names, if parts are missing."""
    out = pathlib.Path(out)
    common = _common(out)
    if (out / _MANIFEST).exists():
        manifest = reading.json_file(out / _MANIFEST)
    else:
        shards = (Shard(i, common["parts"]) for i in range(common["parts"]))
        manifest = {"missing": [shard.folder for shard in shards], "folders": []}
    absent = [p["folder"] for p in manifest["folders"] if not (out / p["folder"] / _PART).exists()]
    missing = manifest["missing"] + absent
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" * (len(missing) > 8))
        raise ValueError(
            f"{out} is not complete: {names} missing; run their commands (--shard=I/"
            f"{common['parts']}) again"
        )
    return manifest


def verify(out: str | os.PathLike) -> dict[str, Any]:
    """Reads the manifest, as `read`, and compares every file with its SHA-256."""
    out, manifest = pathlib.Path(out), read(out)
    for part in manifest["folders"]:
        for name, entry in part["files"].items():
            path = out / part["folder"] / name
            if not path.exists() or sha256(path) != entry["sha256"]:
                problem = "differs from its SHA-256" if path.exists() else "is missing"
                raise ValueError(
                    f"{path} {problem}: delete {out / part['folder']} and run "
                    f"--shard={part['part']}/{manifest['parts']} again"
                )
    return manifest
