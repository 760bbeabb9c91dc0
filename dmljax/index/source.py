"""The folder of images from which an index in a folder was made, for whoever shows them."""

from __future__ import annotations

import json
import os
import pathlib

from dmljax.files import writing as files

__all__ = ["record", "recorded"]

_FILE = "images.json"


def record(place: str | os.PathLike, images: str | os.PathLike) -> None:
    """Notes the folder beside the index at `place`. An index on a server has no such note."""
    folder = pathlib.Path(place)
    if folder.is_dir():
        files.write_json(folder / _FILE, {"images": str(pathlib.Path(images).resolve())})


def recorded(place: str | os.PathLike) -> str | None:
    """The folder that `record` noted; None if there is none, or if it is gone."""
    try:
        path = json.loads((pathlib.Path(place) / _FILE).read_bytes())["images"]
        return path if os.path.isdir(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
