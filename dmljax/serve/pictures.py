"""Pictures of stored items: small copies of the files from which the index was made.

Ids are never used as paths. The folder is listed once, as `dmljax index` lists it, and an id is
only looked up in that list. A picture is decoded and encoded again, so that nothing but pixels of
a file reaches a browser.
"""

from __future__ import annotations

import io
import os
import pathlib
import threading

from PIL import Image, ImageOps

from dmljax.bundle import collection, images
from dmljax.bundle.preprocessing import MAX_PIXELS

__all__ = ["Pictures"]

_SIDE = 384
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
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def read(self, name: str) -> bytes | None:
        """A JPEG of at most 384 pixels on a side; None if the item has no picture."""
        with self._lock:
            if data := self._cache.pop(name, None):
                self._cache[name] = data
                return data
        try:
            data = self._load(name)
        except Exception:  # the file was deleted or damaged since it was listed
            return None
        with self._lock:
            self._cached_bytes += len(data) - len(self._cache.pop(name, b""))
            self._cache[name] = data
            while self._cached_bytes > _CACHED_BYTES:
                self._cached_bytes -= len(self._cache.pop(next(iter(self._cache))))
        return data

    def _load(self, name: str) -> bytes:
        path = self._paths[name]
        if not pathlib.Path(path).resolve().is_relative_to(self._root):
            raise ValueError("a link leads out of the folder")
        return _small(path)


def _small(path: str) -> bytes:
    with Image.open(path, formats=images.FORMATS) as picture:
        if picture.width * picture.height > MAX_PIXELS:
            raise ValueError("too many pixels")
        picture.draft("RGB", (_SIDE, _SIDE))  # decodes a large JPEG at a fraction of its size
        small = ImageOps.exif_transpose(picture).convert("RGB")
        small.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=88)
    return file.getvalue()
