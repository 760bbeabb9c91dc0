"""Finds the folder of a data set, and the images in a folder."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from absl import logging

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def find_folder(
    root: str | os.PathLike | None,
    files: Sequence[str],
    *,
    dataset: str,
    origin: str,
    inside: Sequence[str] = (),
) -> pathlib.Path:
    """The folder that contains all `files`: `root`, or one of its subfolders `inside`.

    If there is none, the error says what is missing, where the data set comes from, and what to
    set.
    """
    target = f"the folder that contains {files[0]}" if files else "a folder of class folders"
    help_ = (
        f"{dataset} comes from {origin}; set root= (in a run --config.dataset.root=) to {target}"
    )
    if root is None:
        raise ValueError(f"{dataset}: no root is given. {help_}")
    root = pathlib.Path(root).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"{dataset}: the folder {root} does not exist. {help_}")
    if not root.is_dir():
        raise NotADirectoryError(f"{dataset}: root {root} is a file, not a folder. {help_}")
    folders = [root, *(root / name for name in inside)]
    for folder in folders:
        if all((folder / file).exists() for file in files):
            return folder
    best = max(folders, key=lambda folder: sum((folder / file).exists() for file in files))
    missing = [file for file in files if not (best / file).exists()]
    raise FileNotFoundError(f"{dataset}: {best} has no {', no '.join(missing)}. {help_}")


def image_paths(folder: pathlib.Path) -> list[str]:
    """Paths of all images under `folder`, sorted, without hidden files.

    Links to folders are followed. Every folder is entered once, so loops end.
    """
    paths, visited, to_visit = [], {os.path.realpath(folder)}, [str(folder)]
    while to_visit:
        with os.scandir(to_visit.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if (real := os.path.realpath(entry.path)) in visited:
                        logging.warning("%s leads back to %s: not followed", entry.path, real)
                        continue
                    visited.add(real)
                    to_visit.append(entry.path)
                elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                    paths.append(entry.path)
    return sorted(paths)
