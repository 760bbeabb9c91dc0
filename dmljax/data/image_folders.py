"""Folders of images: finds and lists them, and reads one folder per class as a data set."""

import collections
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from dmljax.data import decode
from dmljax.data.splits import Split, Splits, divide, encode
from dmljax.hints import counted

_VALIDATION = ("val", "valid", "validation")  # folders that are not classes


def folder(*, root: str | os.PathLike, split: float | Sequence[str] | None = None) -> Splits:
    """Reads one folder of images per class, with any folders below.

    `split` is the fraction of the classes for training, in alphabetic order, or their names. If it
    is None and `root` has folders `train/` and `test/` (or `query/` and `gallery/`), these are the
    two splits. Otherwise the first half of the classes is for training. A folder `val/` is never
    read: with `train/` but without `test/` it is refused.
    """
    folder = find_folder(root, [], dataset="folder", origin="your own images")
    names = _check_folders(folder, split)
    if not names:
        return divide(_split(_labeled_paths(folder)), train=0.5 if split is None else split)
    labeled = {name: _labeled_paths(folder / name) for name in names}
    train = _split(labeled.get("train", []))
    if "query" not in names:
        return Splits(train, _split(labeled["test"]))
    rows = labeled["query"] + labeled["gallery"]
    is_query = np.arange(len(rows)) < len(labeled["query"])
    return Splits(train, _split(rows, query=is_query, gallery=~is_query))


def read_folders(
    root: str | os.PathLike, split: float | Sequence[str] | None = None
) -> list[pathlib.Path]:
    """Returns the folders whose subfolders `folder` reads as classes."""
    root = pathlib.Path(root).expanduser()
    return [root / name for name in _split_names(root, split)] or [root]


def _split_names(root: pathlib.Path, split: float | Sequence[str] | None) -> list[str]:
    """Returns the names of the folders that are splits; none if those in `root` are classes."""
    names = [x for x in ("train", "test", "query", "gallery") if (root / x).is_dir()]
    if split is not None or not ({"train", "test"} <= {*names} or {"query", "gallery"} <= {*names}):
        return []
    return [name for name in names if name != "test" or "query" not in names]


def _check_folders(folder: pathlib.Path, split: float | Sequence[str] | None) -> list[str]:
    """Returns `_split_names`; raises if folders with names of splits would become classes."""
    names = _split_names(folder, split)
    present = {x.name for x in folder.iterdir() if x.is_dir() and not x.name.startswith(".")}
    problem = ""
    if split is None and len(present & {"query", "gallery"}) == 1:
        problem = "has only one of query/ and gallery/, and needs both"
    for name in () if isinstance(split, Sequence) else _VALIDATION:
        if not present >= {"train", name}:
            continue
        if names:
            text = "%s is not read: --config.held_out=0.2 holds classes out of train/"
            logging.warning(text, folder / name)
        elif "test" not in present:
            problem = (
                f"has train/ and {name}/, which are not classes, and no test/: rename {name}/ to "
                "test/, or move it away"
            )
    (name,) = present if len(present) == 1 else ("",)
    other = {"train": "test", "test": "train"}.get(name)
    if other and any(x.is_dir() for x in (folder / name).iterdir()):
        problem = (
            f"has {name}/ and no {other}/: add it, with other classes, or name {folder / name}, "
            "whose classes are then divided"
        )
    if problem:
        raise ValueError(f"folder: {folder} {problem}")
    return names


def _split(labeled_paths: Sequence[tuple[str, str]], **marks: np.ndarray) -> Split:
    labels, names = encode([name for _, name in labeled_paths])
    return Split([path for path, _ in labeled_paths], labels, names, **marks)


def _labeled_paths(root: pathlib.Path) -> list[tuple[str, str]]:
    """Lists `(path, class)` of every image; a class is a folder in `root`."""
    labeled_paths: list[tuple[str, str]] = []
    try:
        files = _files(root, below=False)
        folders = sorted(x for x in root.iterdir() if x.is_dir() and not x.name.startswith("."))
        for class_folder in folders:
            if contains(class_folder, root):
                files.links.append((str(class_folder), os.path.realpath(root)))
                continue
            of_class = _files(class_folder)
            files.unread.extend(of_class.unread)
            files.links.extend(of_class.links)
            if not of_class.images:
                logging.warning("%s contains no image: it is not a class", class_folder)
            elif os.fsencode(class_folder.name).decode(errors="replace") != class_folder.name:
                raise ValueError(
                    f"folder: the name {os.fsencode(class_folder.name)!r} in {root} is not UTF-8: "
                    "rename it, because the class has the same name"
                )
            labeled_paths += [(path, class_folder.name) for path in sorted(of_class.images)]
    except PermissionError as error:
        raise PermissionError(
            f"folder: {error.filename} may not be read: change its permissions (chmod -R a+rX)"
        ) from error
    outside = counted(len(files.images), "image")
    if not labeled_paths:
        text = f"put the images of each class in a separate folder ({' '.join(decode.SUFFIXES)})"
        text = f"only {_unread_text(files.unread)}" if files.unread else text
        raise FileNotFoundError(
            f"folder: {root} contains no folder of images and {outside} directly in it: {text}"
        )
    files.warn(root)
    if files.images:
        logging.warning("%s: ignoring %s outside of class folders", root, outside)
    return labeled_paths


def find_folder(
    root: str | os.PathLike | None,
    files: Sequence[str],
    *,
    dataset: str,
    origin: str,
    inside: Sequence[str] = (),
) -> pathlib.Path:
    """Finds the folder that contains all `files`: `root`, or one of its subfolders `inside`.

    A file may be a pattern, such as `*.txt`. If there is no such folder, the error says what is
    missing, where the data set comes from, and what to set.
    """
    target = f"the folder that contains {files[0]}" if files else "a folder of class folders"
    help_ = (
        f"{dataset} comes from {origin}; set root= (in a run --config.dataset.root=) to {target}"
    )
    if root is None:
        raise ValueError(f"{dataset}: no root is given. {help_}")
    root = pathlib.Path(root).expanduser()
    if root.is_dir():
        folders = [root, *(root / name for name in inside)]
        missing_of = {
            folder: [file for file in files if not any(folder.glob(file))] for folder in folders
        }
        best = min(folders, key=lambda folder: len(missing_of[folder]))
        if not (missing := missing_of[best]):
            return best
        problem = f"{best} has no {', no '.join(missing)}"
    else:
        problem = f"root {root} is a file, not a folder"
        problem = problem if root.exists() else f"the folder {root} does not exist"
    raise FileNotFoundError(f"{dataset}: {problem}. {help_}")


class _Files(NamedTuple):
    """The files below a folder; a link (path, target) that leads to a parent is not followed."""

    images: list[str]
    unread: list[str]
    links: list[tuple[str, str]]

    def warn(self, folder: pathlib.Path) -> None:
        """Warns of links, and once of all images in unsupported formats."""
        for link, target in self.links:
            logging.warning("%s leads back to %s: not followed", link, target)
        if self.unread:
            logging.warning("%s: %s", folder, _unread_text(self.unread))


def image_paths(folder: pathlib.Path) -> list[str]:
    """Lists the paths of all images under `folder`, sorted, without hidden files.

    One warning counts the images in formats that are not read. Links to folders are followed,
    except those that lead back: every folder is entered once, and none that contains `folder`.
    """
    files = _files(folder)
    files.warn(folder)
    return sorted(files.images)


def has_images(folder: pathlib.Path) -> bool:
    """Tells whether `image_paths` returns any."""
    return bool(_files(folder).images)


def _files(folder: pathlib.Path, *, below: bool = True) -> _Files:
    """Lists the files in a folder, and in all folders `below` it."""
    files = _Files([], [], [])
    visited, to_visit = {os.path.realpath(folder)}, [str(folder)]
    while to_visit:
        with os.scandir(to_visit.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if not below:
                        continue
                    real = os.path.realpath(entry.path)
                    if real in visited or contains(real, folder):
                        files.links.append((entry.path, real))
                        continue
                    visited.add(real)
                    to_visit.append(entry.path)
                elif not (entry.is_file() or entry.is_symlink()):
                    continue  # reading a pipe would wait for ever
                elif entry.name.lower().endswith(decode.SUFFIXES):
                    files.images.append(entry.path)
                elif entry.name.lower().endswith(decode.UNREAD_SUFFIXES):
                    files.unread.append(entry.path)
    return files


def contains(folder: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Tells whether `other` is `folder` or lies below it, with links resolved."""
    return pathlib.Path(os.path.realpath(other)).is_relative_to(os.path.realpath(folder))


def _unread_text(paths: Sequence[str]) -> str:
    """Describes how many images are in which unsupported formats, and what to do."""
    counts = collections.Counter(os.path.splitext(path)[1].lower() for path in paths)
    formats = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()))
    images = counted(len(paths), "image")
    return f"{images} in formats that are not read ({formats}): convert them to JPEG"
