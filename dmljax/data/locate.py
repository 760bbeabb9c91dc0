"""Finds the folder of a data set, and the images in a folder."""

import collections
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from absl import logging

from dmljax.files import image_formats
from dmljax.hints import counted


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


class _Files(NamedTuple):
    """What lies below a folder: images, images in other formats, and links that are not followed.

    A link is its path and the folder that it leads back to.
    """

    images: list[str]
    unread: list[str]
    links: list[tuple[str, str]]


def image_paths(folder: pathlib.Path, *, unread: list[str] | None = None) -> list[str]:
    """Paths of all images under `folder`, sorted, without hidden files.

    Paths of images in formats that are not read are added to `unread`; without it, one warning
    counts them. Links to folders are followed, except those that lead back: every folder is entered
    once, and none that contains `folder`.
    """
    files = _files(folder)
    for link, target in files.links:
        logging.warning("%s leads back to %s: not followed", link, target)
    if unread is None:
        warn_of_unread(folder, files.unread)
    else:
        unread += files.unread
    return sorted(files.images)


def has_images(folder: pathlib.Path) -> bool:
    """Whether `image_paths` returns any."""
    return bool(_files(folder).images)


def _files(folder: pathlib.Path) -> _Files:
    files = _Files([], [], [])
    visited, to_visit = {os.path.realpath(folder)}, [str(folder)]
    while to_visit:
        with os.scandir(to_visit.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    real = os.path.realpath(entry.path)
                    if real in visited or contains(real, folder):
                        files.links.append((entry.path, real))
                        continue
                    visited.add(real)
                    to_visit.append(entry.path)
                elif not (entry.is_file() or entry.is_symlink()):
                    continue  # reading a pipe would wait for ever
                elif entry.name.lower().endswith(image_formats.SUFFIXES):
                    files.images.append(entry.path)
                elif is_unread(entry.name):
                    files.unread.append(entry.path)
    return files


def contains(folder: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Whether `other` is `folder` or lies below it, with links resolved."""
    return pathlib.Path(os.path.realpath(other)).is_relative_to(os.path.realpath(folder))


def is_unread(name: str) -> bool:
    """Whether a file is an image in a format that is not read, by its name."""
    return name.lower().endswith(image_formats.UNREAD_SUFFIXES)


def warn_of_unread(folder: str | os.PathLike, paths: Sequence[str]) -> None:
    """One warning about all images in formats that are not read, if there are any."""
    if paths:
        logging.warning("%s: %s", folder, unread_text(paths))


def unread_text(paths: Sequence[str]) -> str:
    """How many images are in which formats that are not read, and what to do."""
    counts = collections.Counter(os.path.splitext(path)[1].lower() for path in paths)
    formats = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()))
    images = counted(len(paths), "image")
    return f"{images} in formats that are not read ({formats}): convert them to JPEG"
