"""Pictures of stored items: small copies of the files from which the index was made.

Ids are never used as paths. The folder is listed once, as `dmljax index` lists it, and an id is
only looked up in that list. `decoding` decodes a picture and encodes it again, so that nothing but
pixels of a file reaches a browser. Everything but `read` runs in one thread.
"""

from __future__ import annotations

import os
import pathlib

from dmljax.bundle import collection, images

_CACHED_BYTES = 64 << 20  # of the pictures in memory


class Pictures:
    """The pictures in a folder, by the ids of `dmljax index`; none without a folder."""

    def __init__(self, folder: str | os.PathLike | None):
        self._paths: dict[str, str] = {}
        self._root = pathlib.Path()
        if folder is not None:
            self._root = pathlib.Path(folder).resolve()
            if not self._root.is_dir():
                raise FileNotFoundError(f"--images={folder} is not a folder")
            for name, path in collection.images_below(self._root):
                self._paths.setdefault(name, str(path))
        self._cache: dict[str, bytes] = {}  # the least recently used picture comes first
        self._cached_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def kept(self, name: str) -> bytes | None:
        """The small picture, if it is in memory."""
        if (data := self._cache.pop(name, None)) is not None:
            self._cache[name] = data
        return data

    def keep(self, name: str, small: bytes) -> None:
        """Keeps a small picture in memory, and the last used ones of others."""
        self._cached_bytes += len(small) - len(self._cache.pop(name, b""))
        self._cache[name] = small
        while self._cached_bytes > _CACHED_BYTES:
            self._cached_bytes -= len(self._cache.pop(next(iter(self._cache))))

    def read(self, name: str) -> bytes:
        """The file of a picture; OSError or ValueError if it cannot be read."""
        path = pathlib.Path(self._paths[name]).resolve()
        if not path.is_relative_to(self._root):
            raise ValueError("a link leads out of the folder")
        with path.open("rb") as file:
            data = file.read(images.MAX_BYTES + 1)
        if len(data) > images.MAX_BYTES:
            raise ValueError("the file is too large")
        return data
