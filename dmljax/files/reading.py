"""Files that a run leaves, as plain data."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

__all__ = ["config_of_run"]


def config_of_run(folder: str | os.PathLike, name: str = "config.json") -> dict[str, Any]:
    """The config of the run in a folder, or another JSON object in its file `name`."""
    path = pathlib.Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no object with named fields")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}): restore it, or make the run again with --overwrite"
        ) from error
    return content
