"""Which file shows a stored item. Its small copy, which `decoding` makes, stays in memory.

Ids are never used as paths. A folder is listed once, as `dmljax index` lists it, and an id is only
looked up in that list. Two folders may have files of the same name, so an item is only shown by the
file of the folder that it was made from, as far as the index knows it (`index.sources`). `decoding`
decodes a picture and encodes it again, so that nothing but pixels of a file reaches a browser.
Everything but `read` runs in one thread.
"""

import os
import pathlib

from dmljax.bundle import collection, images
from dmljax.index.sources import Sources

_CACHED_BYTES = 64 << 20  # of the pictures in memory


class Pictures:
    """The pictures of an index, by its ids: those in `folder`, or in the folders of `sources`.

    `folder` may be another place of the images. If the index was made from it and from further
    folders, an item of a further folder is looked for in it only if the further one is gone.
    """

    def __init__(self, folder: str | os.PathLike | None, sources: Sources | None = None):
        self._paths: dict[str, tuple[str, pathlib.Path]] = {}  # with the folder
        noted = [] if sources is None else sources.folders
        present = [name for name in noted if os.path.isdir(name)]
        roots = [pathlib.Path(name) for name in present]
        if folder is not None:
            roots = [pathlib.Path(folder).resolve()]
            if not roots[0].is_dir():
                raise FileNotFoundError(f"--images={folder} is not a folder")
        for root in roots:
            place, resolved = str(root), root.resolve()
            is_elsewhere = folder is not None and place not in noted
            for name, path, _ in collection.images_below(root):
                origin = place if sources is None else sources.folder_of(name)
                is_lost = folder is not None and origin not in present
                if origin == place or is_elsewhere or is_lost:
                    self._paths.setdefault(name, (str(path), resolved))
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
        file_name, root = self._paths[name]
        path = pathlib.Path(file_name).resolve()
        if not path.is_relative_to(root):
            raise ValueError("a link leads out of the folder")
        with path.open("rb") as file:
            data = file.read(images.MAX_BYTES + 1)
        if len(data) > images.MAX_BYTES:
            raise ValueError("the file is too large")
        return data
