"""Notes of the image file of every item: its folder, size and modification time.

`images.jsonl` in the folder of a generation has a line for every addition; later lines override
earlier ones:

    {"images": "/photos", "stamps": {"cats/1.jpg": "52011 1764192000000000000", "cats/2.jpg": null}}

A stamp is null while the item is being added. An index on a server lacks these notes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping

from dmljax.files import reading
from dmljax.files import writing as files
from dmljax.index.folder import name_of


def stamp(path: str | bytes) -> str | None:
    """Returns size and modification time of a file; None if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{status.st_size} {status.st_mtime_ns}"


class Sources:
    """The folders, or lists, of images from which the items of an index were made."""

    def __init__(self, place: str | os.PathLike, generation: int):
        self._file = pathlib.Path(place) / name_of(generation) / "images.jsonl"
        self._further: dict[str, str] = {}  # folders of the items that are not of the first one
        self.folders: list[str] = []  # all folders, the first one first
        for folder, stamps in self._notes():
            self._remember(folder, stamps)

    def _notes(self) -> Iterator[tuple[str, dict[str, str | None]]]:
        try:
            lines = self._file.read_bytes().split(b"\n")
        except OSError:
            return
        for line in lines:
            # A line may be empty, or cut off by a kill.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                note = reading.json_value(line)
                yield str(note["images"]), dict(note["stamps"])

    def _remember(self, folder: str, ids: Iterable[str]) -> None:
        if folder not in self.folders:
            self.folders.append(folder)
        if folder != self.folders[0]:
            self._further |= dict.fromkeys(ids, folder)
        elif self._further:
            for name in ids:
                self._further.pop(name, None)

    @functools.cached_property
    def _stamps(self) -> dict[str, str]:
        return {x: stamp for _, stamps in self._notes() for x, stamp in stamps.items() if stamp}

    def folder_of(self, name: str) -> str | None:
        """Returns the folder of the item with this id; None in an index without notes."""
        return self._further.get(name, self.folders[0] if self.folders else None)

    def stamp_of(self, name: str) -> str | None:
        """Returns the stamp of the file that was embedded, if it was noted."""
        return self._stamps.get(name)

    def has_changed(self, name: str, stamp: str | None) -> bool:
        """Returns whether the stamp of a file differs from the one that was embedded."""
        return stamp is not None and self._stamps.get(name, stamp) != stamp

    def has_other_file(self, name: str, path: str) -> bool:
        """Returns whether an item comes from a file that still exists and is not `path`."""
        file = os.path.join(self.folder_of(name) or path, name)
        return os.path.exists(file) and os.path.exists(path) and not os.path.samefile(file, path)

    def is_of(self, images: str | os.PathLike) -> bool:
        """Returns whether all items come from this folder."""
        return self.folders == [_absolute(images)]

    def note(self, images: str | os.PathLike, stamps: Mapping[str, str | None]) -> None:
        """Notes the folder and the stamps of items.

        It is called with None before items are added, so that no item lacks a folder, and with
        their stamps afterwards: if the addition is killed, a changed file is embedded again.
        """
        folder = _absolute(images)
        new = {
            name: stamp
            for name, stamp in stamps.items()
            if self.folder_of(name) != folder or stamp not in (None, self.stamp_of(name))
        }
        if not new:
            return
        self._stamps.update({name: stamp for name, stamp in new.items() if stamp})
        self._remember(folder, new)
        if self._file.parent.is_dir():  # not on a server
            line = json.dumps({"images": folder, "stamps": new}, ensure_ascii=False)
            with self._file.open("ab") as file:
                file.write(b"\n" + line.encode() + b"\n")  # the line before may be cut off
                file.flush()
                os.fsync(file.fileno())
            files.sync(self._file.parent)

    def copy_to(self, other: Sources) -> None:
        """Gives the notes to the next generation of the index."""
        other._file.unlink(missing_ok=True)
        if self._file.exists():
            shutil.copy(self._file, other._file)


def _absolute(images: str | os.PathLike) -> str:
    return str(pathlib.Path(images).resolve())
