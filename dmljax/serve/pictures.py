"""Pictures of stored items: small copies of the files from which the index was made.

Ids are never used as paths. The folder is listed once, as `dmljax index` lists it, and an id is
only looked up in that list. A picture is decoded and encoded again, so that nothing but pixels of
a file reaches a browser.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import threading

from PIL import Image, ImageOps

from dmljax.bundle import collection, images
from dmljax.bundle.preprocessing import MAX_PIXELS

__all__ = ["Pictures"]

_SIDE = 384
_CACHE_BYTES = 64 << 20


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
        self._cache: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def read(self, name: str) -> bytes | None:
        """A JPEG of at most 384 pixels on a side; None if the item has no picture."""
        path = self._paths.get(name)
        if path is None:
            return None
        with self._lock:
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name]
        try:
            if not pathlib.Path(path).resolve().is_relative_to(self._root):
                return None  # a link that leads out of the folder
            data = _small(path)
        except Exception:  # the file was deleted or damaged since it was listed
            return None
        with self._lock:
            if name not in self._cache:
                self._cache[name] = data
                self._cached_bytes += len(data)
            while self._cached_bytes > _CACHE_BYTES:
                self._cached_bytes -= len(self._cache.popitem(last=False)[1])
        return data


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
