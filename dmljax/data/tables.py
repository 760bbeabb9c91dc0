"""Own images: a folder for each class, a table of paths and labels, or arrays in one file."""

from __future__ import annotations

import csv
import os
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from dmljax.data import sources
from dmljax.data.splits import Split, Splits, divide, encode, subset

__all__ = ["folder", "npz", "table"]

_Train = float | Sequence[str]
_HALF = 0.5


def folder(*, root: str | os.PathLike, split: _Train | None = None) -> Splits:
    """A folder for each class, images anywhere below.

    The classes are divided by `split`: the fraction for training (in alphabetic order) or their
    names. Without it, folders `train/` and `test/` (or `query/` and `gallery/`) under root are the
    two halves where they exist, otherwise half of the classes is for training.
    """
    where = sources.look_for(root, [], dataset="folder", origin="your own images")
    has = {name: (where / name).is_dir() for name in ("train", "test", "query", "gallery")}
    if split is None and has["query"] != has["gallery"]:
        raise ValueError(f"folder: {where} needs both query/ and gallery/, and has only one")
    if split is None and has["query"]:
        sides = [_class_folders(where / side) for side in ("query", "gallery")]
        labels, names = encode([name for side in sides for _, name in side])
        is_query = np.arange(len(labels)) < len(sides[0])
        paths = [path for side in sides for path, _ in side]
        test = Split(paths, labels, names, query=is_query, gallery=~is_query)
        return Splits(_of(_class_folders(where / "train")) if has["train"] else _empty(), test)
    if split is None and has["train"] and has["test"]:
        return Splits(_of(_class_folders(where / "train")), _of(_class_folders(where / "test")))
    return divide(_of(_class_folders(where)), train=_HALF if split is None else split)


def _of(pairs: Sequence[tuple[str, str]]) -> Split:
    labels, names = encode([name for _, name in pairs])
    return Split([path for path, _ in pairs], labels, names)


def _empty() -> Split:
    return Split([], np.zeros(0, np.int32), ())


def _class_folders(root: pathlib.Path) -> list[tuple[str, str]]:
    """`(path, class)` of every image; a class is a folder in `root`."""
    pairs: list[tuple[str, str]] = []
    loose = 0
    try:
        for entry in sorted(root.iterdir()):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                mine = [(path, entry.name) for path in sources.walk(entry)]
                if not mine:
                    logging.warning("%s holds no image: no class", entry)
                pairs += mine
            elif entry.name.lower().endswith(sources.IMAGE_SUFFIXES):
                loose += 1
    except PermissionError as error:
        raise PermissionError(
            f"folder: {error.filename} may not be read: change its permissions (chmod -R a+rX)"
        ) from error
    if not pairs:
        extra = f" ({loose} images lie in it directly)" if loose else ""
        kinds = " ".join(sources.IMAGE_SUFFIXES)
        raise FileNotFoundError(
            f"folder: {root} has no folder of images{extra}: put the images of each class in a "
            f"folder of its own; known suffixes are {kinds}"
        )
    if loose:
        logging.warning("%s: %d images outside of any class folder are ignored", root, loose)
    return pairs


def table(
    *,
    path: str | os.PathLike,
    root: str | os.PathLike | None = None,
    split: _Train | None = None,
    columns: Mapping[str, str] | None = None,
) -> Splits:
    """A CSV or Parquet table with columns `path` and `label`, one row an image (or a box of one).

    Optional columns: `split` (train or test), `role` (query, gallery or both; test rows only),
    `box` (left top right bottom, in pixels of the upright image), `superlabel`, and `group` (pairs
    of a query and a gallery item of one group are ignored; empty is none).
    `columns` maps these names to those of the file. Paths are relative to `root`, by default the
    folder of the table. Without a column `split`, classes are divided as in `folder`.
    """
    file = pathlib.Path(path).expanduser()
    columns = dict(columns or {})
    known = ("path", "label", "split", "role", "box", "superlabel", "group")
    if wrong := sorted(set(columns) - set(known)):
        raise ValueError(f"table: columns= names {wrong[0]!r}; known are {', '.join(known)}")
    data = _read(file)
    for name in known:
        title = columns.get(name, name)
        if title not in data and (name in ("path", "label") or name in columns):
            raise ValueError(f"table: {file} has no column {title!r}; it has {', '.join(data)}")
    cells = {n: data[columns.get(n, n)] for n in known if columns.get(n, n) in data}
    rows = len(cells["path"])
    if not rows:
        raise ValueError(f"table: {file} has no rows")
    for name in ("path", "label"):
        for i, cell in enumerate(cells[name]):
            if cell == "":
                raise ValueError(f"table: {file} row {i + 1} has an empty {name}")
    seen: dict[tuple, int] = {}
    for i, key in enumerate(zip(cells["path"], cells.get("box", [""] * rows), strict=True)):
        if key in seen:
            raise ValueError(
                f"table: {file} has {key[0]!r} twice, in rows {seen[key] + 1} and {i + 1}: remove "
                "one (rows may share an image only with different boxes)"
            )
        seen[key] = i
    home = pathlib.Path(root).expanduser() if root is not None else file.parent
    paths = [str(home / cell) for cell in cells["path"]]
    if not os.path.exists(paths[0]):
        raise FileNotFoundError(f"table: {paths[0]} of row 1 does not exist; paths start at {home}")
    labels, names = encode(cells["label"])
    roles = _checked(cells.get("role"), ("query", "gallery", "both", ""), "role", file)
    whole = Split(
        paths,
        labels,
        names,
        query=None if roles is None else np.isin(roles, ("query", "both")),
        gallery=None if roles is None else np.isin(roles, ("gallery", "both")),
        boxes=_boxes(cells["box"], file) if "box" in cells else None,
        superlabels=encode(cells["superlabel"])[0] if "superlabel" in cells else None,
        groups=_groups(cells["group"]) if "group" in cells else None,
    )
    sides = _checked(cells.get("split"), ("train", "test"), "split", file)
    if sides is None:
        return divide(whole, train=_HALF if split is None else split)
    if split is not None:
        raise ValueError(f"table: {file} has a column split, so split={split!r} has no use")
    return Splits(*(subset(whole, sides == side) for side in ("train", "test")))


def _read(file: pathlib.Path) -> dict[str, list[str]]:
    """Columns of text; Parquet's numbers as they would stand in a CSV."""
    if not file.is_file():
        raise FileNotFoundError(f"table: {file} is no file; point path= at a .csv or .parquet")
    if file.suffix.lower() == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError(
                f"table: reading {file} needs pyarrow: pip install 'dmljax[parquet]'"
            ) from error
        try:
            columns = parquet.read_table(file).to_pydict()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"table: {file} is not Parquet: {error}") from error
        return {name: [_text(cell) for cell in cells] for name, cells in columns.items()}
    with file.open(newline="", encoding="utf-8-sig") as lines:  # spreadsheets write the mark
        try:
            reader = csv.reader(lines, strict=True)
            header = next(reader, None)
            if not header:
                raise ValueError(f"table: {file} is empty; its first line must name the columns")
            if len(set(header)) < len(header):
                raise ValueError(f"table: {file} names a column twice: {', '.join(header)}")
            rows = [(reader.line_num, row) for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"table: {file} is not a CSV in UTF-8: {error}") from error
    for number, row in rows:
        if len(row) != len(header):
            raise ValueError(f"table: {file}:{number} has {len(row)} cells, not {len(header)}")
    return {name: [row[i].strip() for _, row in rows] for i, name in enumerate(header)}


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return " ".join(map(str, cell)) if isinstance(cell, list | tuple) else str(cell)


def _checked(cells, allowed: Sequence[str], name: str, file: pathlib.Path) -> np.ndarray | None:
    if cells is None:
        return None
    for i, cell in enumerate(cells):
        if cell not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise ValueError(f"table: {file} row {i + 1}: {name} {cell!r} is none of {choices}")
    return np.array(cells)


def _boxes(cells: Sequence[str], file: pathlib.Path) -> np.ndarray:
    boxes = np.empty((len(cells), 4), np.int32)
    for i, cell in enumerate(cells):
        try:
            left, top, right, bottom = (round(float(n)) for n in cell.replace(",", " ").split())
        except (ValueError, OverflowError):
            left, top, right, bottom = 0, 0, 0, 0
        if not (0 <= left < right and 0 <= top < bottom):
            raise ValueError(
                f"table: {file} row {i + 1}: box {cell!r} is not 'left top right bottom'"
            )
        boxes[i] = left, top, right, bottom
    return boxes


def _groups(cells: Sequence[str]) -> np.ndarray:
    index = {cell: i for i, cell in enumerate(sorted(set(cells) - {""}))}
    return np.array([index.get(cell, -1) for cell in cells], np.int32)


def npz(*, path: str | os.PathLike, split: _Train | None = None) -> Splits:
    """One NumPy file: `images` (`uint8 [n h w]` or `[n h w c]`) and `labels` (integers).

    It may also hold `class_names` and `class_is_test`, one of each a class; `split` overrules the
    latter. Pickled objects are refused.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"npz: {file} does not exist; point path= at an .npz file")
    if not zipfile.is_zipfile(file):
        raise ValueError(f"npz: {file} cannot be read: it is not what numpy.savez writes")
    wanted = ("images", "labels", "class_names", "class_is_test")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            there = list(arrays)
            data = {name: arrays[name] for name in wanted if name in there}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"npz: {file} cannot be read: {error}") from error
    if missing := [name for name in wanted[:2] if name not in data]:
        raise ValueError(f"npz: {file} has no {missing[0]!r}; it has {', '.join(there) or 'none'}")
    images, labels = data["images"], data["labels"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(
            f"npz: images must be uint8 [n h w] or [n h w c], not {images.dtype} {images.shape}"
        )
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"npz: labels must be {len(images)} integers, not {labels.dtype} {labels.shape}"
        )
    images = images[..., None] if images.ndim == 3 else images
    if "class_names" in data:
        whole = Split(images, labels, tuple(map(str, data["class_names"])))
    else:
        whole = Split(images, *encode(labels))
    if split is None and "class_is_test" in data:
        if len(data["class_is_test"]) != len(whole.names):
            count = len(data["class_is_test"])
            raise ValueError(
                f"npz: class_is_test has {count} entries for {len(whole.names)} classes"
            )
        split = [n for n, test in zip(whole.names, data["class_is_test"], strict=True) if not test]
    return divide(whole, train=_HALF if split is None else split)
