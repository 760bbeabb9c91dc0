"""Which folder of images every item of an index comes from: a note beside the items.

`images.jsonl` in the folder of a generation has a line for the folder of all items that no later
line names, and one for every addition from another folder:

    {"images": "/photos"}
    {"images": "/more", "ids": ["cats/1.jpg", "cats/2.jpg"]}

Of an index that an earlier version of dmljax filled, `images.json` beside the generations names the
folder of all items. `stamps.jsonl` has size and time of the file of every item, as they were when
it was embedded:

    {"cats/1.jpg": "52011 1764192000000000000", "cats/2.jpg": "48730 1764192000000000000"}

An index on a server has no such notes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index.folder import name_of

_FILE, _OLD_FILE, _STAMPS = "images.jsonl", "images.json", "stamps.jsonl"


def stamp(path: str | bytes) -> str | None:
    """Size and modification time of a file; None if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{status.st_size} {status.st_mtime_ns}"


class Sources:
    """The folders, or lists, of images from which the items of an index were made."""

    def __init__(self, place: str | os.PathLike, generation: int):
        self._file = pathlib.Path(place) / name_of(generation) / _FILE
        self._folder_of_id: dict[str, str] = {}
        self.first: str | None = None  # of all items that `_folder_of_id` lacks
        for note in _notes(self._file):
            ids = note.get("ids")
            if "images" not in note or not isinstance(ids, list | None):
                continue
            images = str(note["images"])
            if ids is None:
                self.first, self._folder_of_id = images, {}
            else:
                self._folder_of_id |= dict.fromkeys(map(str, ids), images)
        if self.first is None:
            try:
                note = reading.json_value((pathlib.Path(place) / _OLD_FILE).read_bytes())
                self.first = str(note["images"])
            except (OSError, ValueError, KeyError, TypeError):
                pass

    @functools.cached_property
    def _stamps(self) -> dict[str, Any]:
        stamps: dict[str, Any] = {}
        for note in _notes(self._file.with_name(_STAMPS)):
            stamps |= note
        return stamps

    @property
    def folders(self) -> list[str]:
        """All folders, the first one first."""
        return list(dict.fromkeys(filter(None, (self.first, *self._folder_of_id.values()))))

    def folder_of(self, name: str) -> str | None:
        """The folder that the item with this id comes from; None if nobody noted it."""
        return self._folder_of_id.get(name, self.first)

    def has_other_file(self, name: str, path: str) -> bool:
        """Whether the item with this id comes from a file that still exists and is not `path`."""
        file = os.path.join(self.folder_of(name) or path, name)
        return os.path.exists(file) and os.path.exists(path) and not os.path.samefile(file, path)

    def is_of(self, images: str | os.PathLike) -> bool:
        """Whether all items come from this folder, as far as it is noted."""
        return self.folders == [_absolute(images)]

    def note_all(self, images: str | os.PathLike) -> None:
        """Notes the folder of all items: the index is empty now."""
        self.first, self._folder_of_id = _absolute(images), {}
        _append(self._file, {"images": self.first})

    def note(self, images: str | os.PathLike, ids: Sequence[str]) -> None:
        """Notes the folder of some items. Called before they are added.

        So an item of a killed addition may have a note, but no item lacks its own one.
        """
        folder = _absolute(images)
        if new := [name for name in ids if self.folder_of(name) != folder]:
            self._folder_of_id |= dict.fromkeys(new, folder)
            _append(self._file, {"images": folder, "ids": new})

    def has_changed(self, name: str, stamp: str | None) -> bool:
        """Whether the file of an item is not as it was, as far as that is noted."""
        return stamp is not None and self._stamps.get(name, stamp) != stamp

    def note_stamps(self, stamps: Mapping[str, str | None]) -> None:
        """Notes size and time of the files of items. Called after they are added.

        So a changed file whose addition was killed is embedded again.
        """
        if new := {name: x for name, x in stamps.items() if x and self._stamps.get(name) != x}:
            self._stamps |= new
            _append(self._file.with_name(_STAMPS), new)

    def copy_to(self, other: Sources) -> None:
        """Gives the notes to the next generation of the index."""
        if self._file.exists():
            shutil.copy(self._file, other._file)
        else:
            other._file.unlink(missing_ok=True)


def _notes(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The objects in the lines of a file, if it exists."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError):  # an empty line, or a part that a killed process left
            if isinstance(note := reading.json_value(line), dict):
                yield note


def _append(file: pathlib.Path, note: Mapping[str, Any]) -> None:
    if file.parent.is_dir():  # not on a server
        with file.open("ab") as opened:
            # The line before may be a part of one.
            opened.write(b"\n" + json.dumps(note, ensure_ascii=False).encode() + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        files.sync(file.parent)


def _absolute(images: str | os.PathLike) -> str:
    return str(pathlib.Path(images).resolve())
