"""Which folder of images every item of an index comes from: a note beside the items.

`images.jsonl` in the folder of a generation has a line for the folder of all items that no later
line names, and one for every addition from another folder:

    {"images": "/photos"}
    {"images": "/more", "ids": ["cats/1.jpg", "cats/2.jpg"]}

Of an index that an earlier version of dmljax filled, `images.json` beside the generations names the
folder of all items. An index on a server has no such note.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Sequence

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index.folder import name_of

_FILE, _OLD_FILE = "images.jsonl", "images.json"


class Sources:
    """The folders, or lists, of images from which the items of an index were made."""

    def __init__(self, place: str | os.PathLike, generation: int):
        self._file = pathlib.Path(place) / name_of(generation) / _FILE
        self._folder_of_id: dict[str, str] = {}
        self.first: str | None = None  # of all items that `_folder_of_id` lacks
        try:
            lines = self._file.read_bytes().split(b"\n")
        except OSError:
            lines = []
        for line in lines:
            try:
                note = reading.json_value(line)
                images, ids = str(note["images"]), note.get("ids")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # an empty line, or a part of one that a killed process left
            if not isinstance(ids, list | None):
                continue
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
        self._append({"images": self.first})

    def note(self, images: str | os.PathLike, ids: Sequence[str]) -> None:
        """Notes the folder of some items. Called before they are added.

        So an item of a killed addition may have a note, but no item lacks its own one.
        """
        folder = _absolute(images)
        if new := [name for name in ids if self.folder_of(name) != folder]:
            self._folder_of_id |= dict.fromkeys(new, folder)
            self._append({"images": folder, "ids": new})

    def copy_to(self, other: Sources) -> None:
        """Gives the notes to the next generation of the index."""
        if self._file.exists():
            shutil.copy(self._file, other._file)
        else:
            other._file.unlink(missing_ok=True)

    def _append(self, note: dict) -> None:
        if self._file.parent.is_dir():  # not on a server
            with self._file.open("ab") as file:
                # The line before may be a part of one.
                file.write(b"\n" + json.dumps(note, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            files.sync(self._file.parent)


def _absolute(images: str | os.PathLike) -> str:
    return str(pathlib.Path(images).resolve())
