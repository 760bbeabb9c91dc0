"""A folder that many processes fill with parts of the rows, without communication.

vectors/
    shards.json          the number of parts and what all parts must have in common
    part-0-of-8.lock     locked by the process that writes this part; says which
    part-0-of-8/         its files; part.json, the last one, has their SHA-256 and the rows

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

from dmljax.files import reading
from dmljax.files.writing import Taken, lock, make_folder, sha256, sync, write_json

TASK = "shards.json"
_PART, _LOCK = "part.json", "shards.lock"


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
        first, stop = (i * total // self.count for i in (self.index, self.index + 1))
        return range(first, stop)


def parse(text: str) -> Shard:
    """Parses a shard such as '3/8'.

    >>> parse("3/8").rows(100)
    range(37, 50)
    """
    numbers = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    shard = Shard(*map(int, numbers.groups())) if numbers else Shard(0, 0)
    if shard.index >= shard.count:
        raise ValueError(
            f"{text} is not I/N with I from 0 to N - 1, such as 0/8 for the first of eight"
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
    out, task = pathlib.Path(out), {"parts": shard.count, **task}
    make_folder(out)
    with lock(out / _LOCK, wait=True):
        if not (out / TASK).exists():
            if any(path.name != _LOCK and path.suffix != ".tmp" for path in out.iterdir()):
                raise FileExistsError(f"{out} is not empty: choose another folder")
            write_json(out / TASK, task, indent=1)
        first = reading.json_file(out / TASK)
    if names := [name for name in {**first, **task} if first.get(name) != task.get(name)]:
        values = ", ".join(f"{x} ({first.get(x)}, not {task.get(x)})" for x in names)
        raise ValueError(f"{out} was begun with another value of {values}: choose another folder")
    folder = out / shard.folder
    try:
        file = lock(out / f"{shard.folder}.lock")
    except Taken as owner:
        raise ValueError(f"{shard.folder} in {out} is being written by {owner}") from None
    with file:
        make_folder(folder)
        for path in folder.glob("*.tmp"):
            path.unlink()  # a killed process was writing it
        yield folder


def is_complete(folder: pathlib.Path) -> bool:
    """Returns whether the part in `folder`, which `claimed` gave, is complete."""
    return (folder / _PART).exists()


def finish(folder: pathlib.Path, *, rows: range, **facts: Any) -> None:
    """Writes `part.json` with the digests of all files in `folder`: the part is complete."""
    files = sorted(folder.iterdir())
    for file in files:
        sync(file)
    content = {"task": reading.json_file(folder.parent / TASK), "rows": [rows.start, rows.stop]}
    content |= {**facts, "files": {path.name: sha256(path) for path in files}}
    write_json(folder / _PART, content, indent=1)


def state(out: str | os.PathLike) -> dict[str, Any]:
    """Returns the task, the facts of complete parts (`folders`) and names of others (`missing`).

    A part of another task is missing, too.
    """
    task = reading.json_file(pathlib.Path(out, TASK))
    folders, missing = [], []
    for shard in (Shard(i, task["parts"]) for i in range(task["parts"])):
        part = reading.json_object_or_empty(pathlib.Path(out, shard.folder, _PART))
        if part.pop("task", None) == task:
            folders.append({"folder": shard.folder, **part})
        else:
            missing.append(shard.folder)
    return {**task, "folders": folders, "missing": missing}


def read(out: str | os.PathLike, *, verify: bool = False) -> dict[str, Any]:
    """Returns the `state` of a complete folder; raises, with their names, if parts are missing.

    With `verify`, a part is missing if one of its files differs from its SHA-256.
    """
    content = state(out)
    missing = content["missing"]
    for part in content["folders"] if verify else ():
        for name, digest in part["files"].items():
            path = pathlib.Path(out, part["folder"], name)
            if not path.exists() or sha256(path) != digest:
                missing.append(f"{part['folder']} ({name})")
    if missing:
        names = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" * (len(missing) > 8))
        raise ValueError(
            f"{out} is not complete: {names} missing, damaged or of another task; delete them and "
            f"run their commands (--shard=I/{content['parts']}) again"
        )
    return content
