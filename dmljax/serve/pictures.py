"""The files that show stored items.

Ids are never used as paths. A folder is listed once, as `dmljax index` lists it, and an id is only
looked up in that list. Two folders may have files of the same name, so an item is only shown by the
file of the folder that it was made from, as far as the index knows it. `decoding`
decodes a picture and encodes it again, so that nothing but pixels of a file reaches a browser.
"""

import os
import pathlib
from collections.abc import Mapping

from dmljax.bundle import collection, preprocessing
from dmljax.index.base import File


class Pictures:
    """The pictures of an index by the ids of its items, in `folder` or in the folders of `files`.

    `folder` may be a copy of the indexed one. If the index was made from it and from further
    folders, an item of a further folder is looked up in `folder` only if the further one is gone.
    """

    def __init__(self, folder: str | os.PathLike | None, files: Mapping[str, File] | None = None):
        self._paths: dict[str, tuple[str, pathlib.Path]] = {}  # with the folder
        files = files or {}
        noted = list(dict.fromkeys(file.folder for file in files.values()))
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
                origin = files[name].folder if name in files else noted[0] if noted else place
                is_lost = folder is not None and origin not in present
                if origin == place or is_elsewhere or is_lost:
                    self._paths.setdefault(name, (str(path), resolved))

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def read(self, name: str) -> bytes:
        """Reads the file of a picture; raises `OSError` or `ValueError` if it cannot be read."""
        file_name, root = self._paths[name]
        path = pathlib.Path(file_name).resolve()
        if not path.is_relative_to(root) or path.stat().st_size > preprocessing.MAX_BYTES:
            raise ValueError("the file is too large, or a link leads out of the folder")
        return path.read_bytes()
