"""A folder as it may be after a power cut, from what `recorder.c` recorded of its writers.

A disk keeps what was synced: the content of a file at its last fsync, and the names in a folder at
the last fsync of that folder. Of everything later it may keep all, nothing, or some. `Disk` holds
both, and `Disk.cut` writes one of the possible results into a new folder:

* names: 'synced'; 'all' (a file that was renamed before its content was synced is then empty, or
  has old content); 'part' (all changes of names up to some moment, as a journal keeps them).
* contents: 'synced'; 'all'; 'part' (each write at random, and only some of its sectors of 512
  bytes); 'zeros' (files have their new sizes, with zeros in place of what was not synced).
"""

from __future__ import annotations

import itertools
import os
import pathlib
import struct
import subprocess
import sys
from typing import NamedTuple

import numpy as np

HERE = pathlib.Path(__file__).parent
VARIANTS = [
    ("synced", "synced"),
    ("all", "synced"),
    ("all", "zeros"),
    ("all", "part"),
    ("part", "part"),
    ("synced", "all"),
    ("all", "all"),
]
_HEAD, _SECTOR = struct.Struct("=6Q"), 512


class Record(NamedTuple):
    """One record: the kinds are explained in `Disk.apply`."""

    kind: str
    a: int
    b: int
    first: str
    second: str
    data: bytes


class _File:
    """A file: what was synced, what was written since, and what processes read from it."""

    def __init__(self, content: bytes = b""):
        self.synced, self.live = content, bytearray(content)
        self.writes: list[tuple[int, bytes]] = []  # offset and data, or -1 - size to truncate

    def write(self, offset: int, data: bytes) -> None:
        self.writes.append((offset, data))
        _write(self.live, offset, data)

    def sync(self) -> None:
        self.synced, self.writes = bytes(self.live), []

    def content(self, kind: str, rng: np.random.Generator) -> bytes:
        if kind in ("synced", "all") or not self.writes:
            return bytes(self.live) if kind == "all" else self.synced
        content = bytearray(self.synced)
        for offset, data in self.writes:
            if kind == "zeros":
                end = -1 - offset if offset < 0 else max(len(content), offset + len(data))
                _write(content, -1 - end, b"")
            elif offset < 0:
                if rng.random() < 0.5:
                    _write(content, offset, data)
            elif rng.random() < 0.7:
                for start, stop in _sectors(offset, offset + len(data)):
                    if rng.random() < 0.7:
                        _write(content, start, data[start - offset : stop - offset])
        return bytes(content)


def _write(content: bytearray, offset: int, data: bytes) -> None:
    size = -1 - offset if offset < 0 else max(len(content), offset + len(data))
    del content[size:]
    content.extend(bytes(size - len(content)))
    if offset >= 0:
        content[offset : offset + len(data)] = data


def _sectors(start: int, stop: int):
    edges = [start, *range(start - start % _SECTOR + _SECTOR, stop, _SECTOR), stop]
    return itertools.pairwise(edges)


class _Folder:
    """The names of a folder after each change, and which of these states was synced."""

    def __init__(self):
        self.states: list[tuple[int, dict]] = [(0, {})]
        self.synced = 0

    @property
    def live(self) -> dict:
        return self.states[-1][1]

    def change(self, moment: int, **names) -> None:
        state = self.live | names
        self.states.append((moment, {name: x for name, x in state.items() if x is not None}))

    def sync(self) -> None:
        self.states = [(0, self.live)]

    def at(self, moment: int) -> dict:
        """Returns the names that the disk keeps if its journal holds all changes up to a moment."""
        return [names for when, names in self.states if when <= moment or when == 0][-1]


class Disk:
    """What was done to a folder up to some record. It begins with what is in the folder, synced."""

    def __init__(self, root: pathlib.Path):
        self.moment, self.acknowledged = 0, b""
        self._nodes: dict[int, _File | _Folder] = {}
        self._root = self._node(root)

    def _node(self, path: pathlib.Path) -> _File | _Folder:
        if path.is_dir():
            node: _File | _Folder = _Folder()
            node.states = [(0, {p.name: self._node(p) for p in path.iterdir()})]
        else:
            node = _File(path.read_bytes())
        self._nodes[path.stat().st_ino] = node
        return node

    def apply(self, record: Record) -> None:
        """Does again what was recorded."""
        self.moment += 1
        kind, a, b, first, second, data = record
        if kind == "A":  # an acknowledgement
            self.acknowledged += data
        elif kind in "CD":  # a new file, a new folder
            self._nodes[b] = _File() if kind == "C" else _Folder()
            self._nodes[a].change(self.moment, **{first: self._nodes[b]})
        elif kind == "L":  # another name of a file
            self._nodes[a].change(self.moment, **{first: self._nodes[b]})
        elif kind == "U":  # a name is removed
            self._nodes[a].change(self.moment, **{first: None})
        elif kind == "R":
            node = self._nodes[a].live[first]
            self._nodes[a].change(self.moment, **{first: None})
            self._nodes[b].change(self.moment, **{second: node})
        elif kind == "W":
            self._nodes[a].write(b, data)
        elif kind == "T":
            self._nodes[a].write(-1 - b, b"")
        elif kind == "X":  # the whole content
            if bytes(self._nodes[a].live) != data:
                self._nodes[a].write(0, data)
                self._nodes[a].write(-1 - len(data), b"")
        else:
            assert kind == "F"
            self._nodes[a].sync()

    def cut(
        self, out: pathlib.Path, names: str, contents: str, rng: np.random.Generator
    ) -> pathlib.Path:
        """Writes the folder as the power cut leaves it to `out`."""
        kept = {"synced": 0, "all": self.moment}.get(names, self._moment_of_journal(rng))
        _write_folder(self._root, out, kept, contents, rng)
        return out

    def _moment_of_journal(self, rng: np.random.Generator) -> int:
        folders = [node for node in self._nodes.values() if isinstance(node, _Folder)]
        moments = sorted({when for folder in folders for when, _ in folder.states})
        return int(rng.choice(moments[-20:]))


def _write_folder(
    folder: _Folder, out: pathlib.Path, moment: int, contents: str, rng: np.random.Generator
) -> None:
    out.mkdir()
    for name, node in sorted(folder.at(moment).items()):
        if isinstance(node, _Folder):
            _write_folder(node, out / name, moment, contents, rng)
        else:
            (out / name).write_bytes(node.content(contents, rng))


def library(folder: pathlib.Path) -> pathlib.Path:
    """Compiles the recorder and returns its path."""
    out = folder / "recorder.so"
    words = ["gcc", "-O1", "-shared", "-fPIC", "-o", out, HERE / "recorder.c", "-ldl", "-lpthread"]
    subprocess.run(words, check=True)
    return out


def recorded(
    words: list, root: pathlib.Path, scratch: pathlib.Path, **options
) -> tuple[Disk, list[Record]]:
    """Runs a program that changes `root`, and returns the disk before it and all records.

    Acknowledgements are what the program writes to its standard output. The replay of all records
    must give the very content of the folder: this shows that nothing escaped the recorder.
    """
    log, acks = scratch / "log", scratch / "acks"
    environment = os.environ | {"LD_PRELOAD": str(library(scratch))}
    environment |= {"POWER_ROOT": str(root), "POWER_LOG": str(log), "POWER_ACKS": str(acks)}
    disk, complete = Disk(root), Disk(root)
    with acks.open("wb") as out:
        subprocess.run([sys.executable, *words], stdout=out, env=environment, check=True, **options)
    records = read(log)
    for record in records:
        complete.apply(record)
    copy = complete.cut(scratch / "copy", "all", "all", np.random.default_rng(0))
    assert _contents(copy) == _contents(root)
    assert complete.acknowledged == acks.read_bytes()
    return disk, records


def read(log: pathlib.Path) -> list[Record]:
    """Reads the records of a log."""
    content, records, place = log.read_bytes(), [], 0
    while place < len(content):
        kind, a, b, *sizes = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        first, second, data = (
            content[place + sum(sizes[:i]) : place + sum(sizes[: i + 1])] for i in range(3)
        )
        place += sum(sizes)
        records.append(Record(chr(kind), a, b, os.fsdecode(first), os.fsdecode(second), data))
    return records


def _contents(root: pathlib.Path) -> dict[str, bytes | None]:
    """Reads all files and folders. SQLite changes its -shm files by mmap, and makes them again."""
    paths = sorted(path for path in root.rglob("*") if not path.name.endswith("-shm"))
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in paths
    }
