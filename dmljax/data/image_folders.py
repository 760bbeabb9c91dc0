"""Folders of images: finds and lists them, and reads one folder per class as a data set."""

import collections
import os
import pathlib
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from dmljax.data.splits import Split, Splits, divide, encode
from dmljax.files import image_formats
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
    unread: list[str] = []
    splits = _splits(folder, split, unread)
    warn_of_unread(folder, unread)
    return splits


def _splits(folder: pathlib.Path, split: float | Sequence[str] | None, unread: list[str]) -> Splits:
    """Reads the splits of a folder, and appends images in unsupported formats to `unread`."""
    names = ("train", "test", "query", "gallery")
    exists = {name: split is None and (folder / name).is_dir() for name in names}
    if exists["query"] != exists["gallery"]:
        raise ValueError(f"folder: {folder} has only one of query/ and gallery/, and needs both")
    _check_validation(folder, split, has_test=exists["test"] or exists["query"])
    _check_single(folder)
    if exists["query"]:
        query, gallery = (_labeled_paths(folder / name, unread) for name in ("query", "gallery"))
        is_query = np.arange(len(query) + len(gallery)) < len(query)
        test = _split(query + gallery, query=is_query, gallery=~is_query)
        train = _labeled_paths(folder / "train", unread) if exists["train"] else []
        return Splits(_split(train), test)
    if exists["train"] and exists["test"]:
        return Splits(*(_split(_labeled_paths(folder / x, unread)) for x in ("train", "test")))
    return divide(_split(_labeled_paths(folder, unread)), train=0.5 if split is None else split)


def read_folders(
    root: str | os.PathLike, split: float | Sequence[str] | None = None
) -> list[pathlib.Path]:
    """Returns the folders whose subfolders `folder` reads as classes."""
    root = pathlib.Path(root).expanduser()
    exists = {name for name in ("train", "test", "query", "gallery") if (root / name).is_dir()}
    if split is None and (exists >= {"train", "test"} or exists >= {"query", "gallery"}):
        return [root / name for name in sorted(exists)]
    return [root]


def _check_validation(
    folder: pathlib.Path, split: float | Sequence[str] | None, *, has_test: bool
) -> None:
    """Refuses `train/` with `val/` only, which would be two classes; warns if it is unused."""
    if isinstance(split, Sequence) or not (folder / "train").is_dir():
        return
    for name in _VALIDATION:
        if not (folder / name).is_dir():
            continue
        if has_test:
            logging.warning(
                "%s is not read: --config.held_out=0.2 holds classes out of train/", folder / name
            )
        elif not (folder / "test").is_dir():
            raise ValueError(
                f"folder: {folder} has train/ and {name}/, which are not classes, and no test/: "
                f"rename {name}/ to test/, or move it away"
            )


def _check_single(folder: pathlib.Path) -> None:
    """Refuses `train/` or `test/` with folders of classes and without the other one."""
    folders = [x for x in folder.iterdir() if x.is_dir() and not x.name.startswith(".")]
    others = {"train": "test", "test": "train"}
    if len(folders) != 1 or (name := folders[0].name) not in others:
        return
    if any(x.is_dir() for x in folders[0].iterdir()):
        raise ValueError(
            f"folder: {folder} has {name}/ and no {others[name]}/: add it, with other classes, or "
            f"name {folder / name}, whose classes are then divided"
        )


def _split(labeled_paths: Sequence[tuple[str, str]], **marks: np.ndarray) -> Split:
    labels, names = encode([name for _, name in labeled_paths])
    return Split([path for path, _ in labeled_paths], labels, names, **marks)


def _labeled_paths(root: pathlib.Path, unread: list[str]) -> list[tuple[str, str]]:
    """Lists `(path, class)` of every image; a class is a folder in `root`.

    Images in formats that are not read are added to `unread`.
    """
    labeled_paths: list[tuple[str, str]] = []
    unread_of_root: list[str] = []
    outside = 0  # images that lie directly in root
    folders: dict[str, str] = {}
    try:
        for entry in sorted(root.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir() and contains(entry, root):
                logging.warning("%s leads back to %s: not followed", entry, entry.resolve())
            elif entry.is_dir():
                unread_of_class: list[str] = []
                paths = image_paths(entry, unread=unread_of_class)
                unread_of_root += unread_of_class
                if not paths:
                    kind = "image that is read" if unread_of_class else "image"
                    logging.warning("%s contains no %s: it is not a class", entry, kind)
                raw = os.fsencode(entry.name)
                if paths and raw.decode(errors="replace") != entry.name:
                    raise ValueError(
                        f"folder: the name {raw!r} in {root} is not UTF-8: rename it, because "
                        "the class has the same name"
                    )
                name = unicodedata.normalize("NFC", entry.name)
                if paths and folders.setdefault(name, entry.name) != entry.name:
                    logging.warning(
                        "%s has two folders %r, in two forms of Unicode (NFC and NFD): their "
                        "images are one class",
                        root,
                        name,
                    )
                labeled_paths += [(path, entry.name) for path in paths]
            elif entry.name.lower().endswith(image_formats.SUFFIXES):
                outside += 1
            elif is_unread(entry.name):
                unread_of_root.append(str(entry))
    except PermissionError as error:
        raise PermissionError(
            f"folder: {error.filename} may not be read: change its permissions (chmod -R a+rX)"
        ) from error
    if not labeled_paths:
        note = f" ({counted(outside, 'image')} directly in it)" if outside else ""
        text = f", only {unread_text(unread_of_root)}"
        if not unread_of_root:
            text = ": put the images of each class in a separate folder; known suffixes are "
            text += " ".join(image_formats.SUFFIXES)
        raise FileNotFoundError(f"folder: {root} contains no folder of images{note}{text}")
    unread += unread_of_root
    if outside:
        logging.warning("%s: ignoring %s outside of class folders", root, counted(outside, "image"))
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
    if root.is_dir():
        folders = [root, *(root / name for name in inside)]
        best = max(folders, key=lambda folder: sum((folder / file).exists() for file in files))
        missing = [file for file in files if not (best / file).exists()]
        if not missing:
            return best
        problem = f"{best} has no {', no '.join(missing)}"
    else:
        problem = f"root {root} is a file, not a folder"
        problem = problem if root.exists() else f"the folder {root} does not exist"
    raise FileNotFoundError(f"{dataset}: {problem}. {help_}")


class _Files(NamedTuple):
    """What lies below a folder: images, images in other formats, and links that are not followed.

    A link is its path and the folder that it leads back to.
    """

    images: list[str]
    unread: list[str]
    links: list[tuple[str, str]]


def image_paths(folder: pathlib.Path, *, unread: list[str] | None = None) -> list[str]:
    """Lists the paths of all images under `folder`, sorted, without hidden files.

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
    """Tells whether `image_paths` returns any."""
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
    """Tells whether `other` is `folder` or lies below it, with links resolved."""
    return pathlib.Path(os.path.realpath(other)).is_relative_to(os.path.realpath(folder))


def is_unread(name: str) -> bool:
    """Tells by its name whether a file is an image in an unsupported format."""
    return name.lower().endswith(image_formats.UNREAD_SUFFIXES)


def warn_of_unread(folder: str | os.PathLike, paths: Sequence[str]) -> None:
    """Warns once about all images in unsupported formats, if there are any."""
    if paths:
        logging.warning("%s: %s", folder, unread_text(paths))


def unread_text(paths: Sequence[str]) -> str:
    """Describes how many images are in which unsupported formats, and what to do."""
    counts = collections.Counter(os.path.splitext(path)[1].lower() for path in paths)
    formats = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()))
    images = counted(len(paths), "image")
    return f"{images} in formats that are not read ({formats}): convert them to JPEG"
