"""Data sets listed in a CSV or Parquet table, or stored in one NumPy file."""

import collections
import csv
import io
import os
import pathlib
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmljax.data.splits import Split, Splits, divide, encode, subset
from dmljax.hints import counted, hint

_COLUMNS = ("path", "label", "split", "role", "box", "superlabel", "group")


def table(
    *,
    path: str | os.PathLike,
    root: str | os.PathLike | None = None,
    split: float | Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Splits:
    """A CSV or Parquet table with columns `path` and `label`, one row per image (or box of one).

    The cells of a CSV are separated by commas, semicolons or tabs.

    Optional columns: `split` (train or test), `role` (query, gallery or both; used for test rows),
    `box` (left top right bottom, in pixels of the upright image), `superlabel`, and `group` (a
    query and a gallery item of one group are not compared; empty means no group). `columns` maps
    these names to the names in the file. Paths are relative to `root`, by default the folder of the
    table. Without a column `split`, the argument `split` divides the classes as in `folder`.
    """
    file = pathlib.Path(path).expanduser()
    columns = dict(columns or {})
    if unknown := sorted(set(columns) - set(_COLUMNS)):
        known = ", ".join(_COLUMNS)
        raise ValueError(f"table: columns= has the key {unknown[0]!r}; possible are {known}")
    required = {name: columns.get(name, name) for name in ("path", "label", *columns)}
    cells = _select(_read(file, set(required.values())), required, file)
    _check_rows(cells, file)
    folder = pathlib.Path(root).expanduser() if root is not None else file.parent
    paths = [str(folder / cell) for cell in cells["path"]]
    if not os.path.exists(paths[0]):
        raise FileNotFoundError(
            f"table: {paths[0]} of row 1 does not exist; paths are relative to {folder}"
            f"{_advice(cells['path'][0])}"
        )
    labels, names = encode(cells["label"])
    roles = _choices(cells, "role", ("query", "gallery", "both", ""), file)
    all_rows = Split(
        paths,
        labels,
        names,
        query=None if roles is None else np.isin(roles, ("query", "both")),
        gallery=None if roles is None else np.isin(roles, ("gallery", "both")),
        boxes=_boxes(cells["box"], file) if "box" in cells else None,
        superlabels=encode(cells["superlabel"])[0] if "superlabel" in cells else None,
        groups=_groups(cells["group"]) if "group" in cells else None,
    )
    split_of_row = _choices(cells, "split", ("train", "test"), file)
    if split_of_row is None:
        return divide(all_rows, train=0.5 if split is None else split)
    if split is not None:
        raise ValueError(f"table: {file} has a column split, so leave out split={split!r}")
    return Splits(*(subset(all_rows, split_of_row == name) for name in ("train", "test")))


def _select(
    data: dict[str, list[str]], required: dict[str, str], file: pathlib.Path
) -> dict[str, list[str]]:
    """The columns of the file under our names; `required` maps them to the file's names."""
    for name, title in required.items():
        if title not in data:
            raise ValueError(
                f"table: {file} has no column {title!r}{hint(title, data)}. Rename a column, or "
                f"name it by columns={{{name!r}: 'its name in the file'}}"
            )
    titles = {name: name for name in _COLUMNS} | required
    return {name: data[title] for name, title in titles.items() if title in data}


def _advice(path: str) -> str:
    """The end of a message about a path that does not exist."""
    if "://" in path:
        return f"; {path!r} is a URL: give the path of a file"
    if "\\" in path and os.sep == "/":
        return "; write / in place of its backslashes"
    return ""


def _check_rows(cells: dict[str, list[str]], file: pathlib.Path) -> None:
    """Refuses an empty table, empty paths and labels, and repeated images."""
    if not cells["path"]:
        raise ValueError(f"table: {file} has no rows")
    for name in ("path", "label"):
        for i, cell in enumerate(cells[name]):
            if cell == "":
                raise ValueError(f"table: {file} row {i + 1} has an empty {name}")
    boxes = cells.get("box", [""] * len(cells["path"]))
    rows: dict[tuple[str, str], int] = {}
    for i, key in enumerate(zip(cells["path"], boxes, strict=True)):
        if key in rows:
            raise ValueError(
                f"table: {file} has {key[0]!r} twice, in rows {rows[key] + 1} and {i + 1}: remove "
                "one (rows may share an image only with different boxes)"
            )
        rows[key] = i


def _read(file: pathlib.Path, titles: set[str]) -> dict[str, list[str]]:
    """The columns as text without blanks around it. A null or NaN of Parquet is an empty cell.

    A CSV has the delimiter that finds most of the columns `titles`.
    """
    if not file.is_file():
        raise FileNotFoundError(f"table: {file} is not a file; set path= to a .csv or .parquet")
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
    # Spreadsheets write a byte-order mark, which utf-8-sig removes.
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            text = lines.read()
        delimiter = max(",;\t", key=lambda delimiter: _fit(text, delimiter, titles))
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
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


def _fit(text: str, delimiter: str, titles: set[str]) -> tuple[int, int]:
    """How many of `titles`, and how many columns, the delimiter finds in the first line."""
    header = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    return len(titles.intersection(header)), len(header)


def _text(cell: Any) -> str:
    if isinstance(cell, list | tuple):
        return " ".join(map(_text, cell))
    # A column of integers with gaps is a column of floats in pandas, with NaN in the gaps.
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, float | np.floating) and cell.is_integer():
        return str(int(cell))
    return str(cell).strip()


def _choices(
    cells: dict[str, list[str]], name: str, allowed: Sequence[str], file: pathlib.Path
) -> np.ndarray | None:
    """The column `name`, whose values must be among `allowed`, or None if it does not exist."""
    if name not in cells:
        return None
    for i, cell in enumerate(cells[name]):
        if cell not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ValueError(f"table: {file} row {i + 1}: {name} {cell!r} is none of {choices}")
    return np.array(cells[name])


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


def npz(*, path: str | os.PathLike, split: float | Sequence[str] | None = None) -> Splits:
    """One NumPy file with `images` (`uint8 [n h w]` or `[n h w c]`) and `labels` (0 or more).

    Images have 1 or 3 channels. The file may also contain `class_names` and `class_is_test`, with
    one entry per class. `split`, the fraction of the classes for training or their names, overrides
    the latter. By default the first half of the classes is for training. Pickled objects are
    refused.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"npz: {file} does not exist; set path= to an .npz file")
    if not zipfile.is_zipfile(file):
        raise ValueError(f"npz: {file} cannot be read: it is damaged, or not a file of numpy.savez")
    fields = ("images", "labels", "class_names", "class_is_test")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            available = list(arrays)
            data = {name: arrays[name] for name in fields if name in available}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"npz: {file} cannot be read: {error}") from error
    if missing := [name for name in ("images", "labels") if name not in data]:
        raise ValueError(
            f"npz: {file} has no {missing[0]!r}; it has {', '.join(available) or 'none'}"
        )
    images, labels = data["images"], data["labels"]
    names = tuple(map(str, data["class_names"].ravel())) if "class_names" in data else None
    if problem := _problem(images, labels, names):
        raise ValueError(f"npz: {file}: {problem}")
    images = images[..., None] if images.ndim == 3 else images
    all_images = Split(images, *(encode(labels) if names is None else (labels, names)))
    if split is None and "class_is_test" in data:
        is_test, count = data["class_is_test"], len(all_images.names)
        if is_test.shape != (count,):
            raise ValueError(
                f"npz: {file}: class_is_test has {is_test.size} entries for {count} classes"
            )
        if is_test.dtype.kind not in "biuf" or not np.isin(is_test, (0, 1)).all():
            raise ValueError(
                f"npz: {file}: class_is_test has values such as {np.unique(is_test)[-1]}: write "
                "True for each class of the test split and False for each other class"
            )
        split = [n for n, test in zip(all_images.names, is_test, strict=True) if not test]
    return divide(all_images, train=0.5 if split is None else split)


def _problem(images: np.ndarray, labels: np.ndarray, names: Sequence[str] | None) -> str:
    """What is wrong with images, labels or names of classes; "" if nothing is."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        return f"images must be uint8 [n h w] or [n h w c], not {images.dtype} {images.shape}"
    if images.ndim == 4 and images.shape[3] not in (1, 3):
        text = f"images {images.shape} have {images.shape[3]} channels, and 1 or 3 are needed"
        if images.shape[1] in (1, 3):
            text += "; move the channels last: np.moveaxis(images, 1, -1)"
        return text
    if len(images) and not images.size:
        return f"images {images.shape} have no pixels"
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        text = f"labels must be {len(images)} integers, not {labels.dtype} {labels.shape}"
        if labels.dtype.kind in "US":
            text += "; for text: class_names, labels = np.unique(labels, return_inverse=True)"
        return text
    if (labels < 0).any():
        count = counted(int((labels < 0).sum()), "label")
        return f"{count} below 0, such as {labels.min()}: leave these images out"
    if names is None:
        return ""
    if len(labels) and labels.max() >= len(names):
        return (
            f"labels run from {labels.min()} to {labels.max()}, but class_names has "
            f"{counted(len(names), 'name')}: add the missing ones"
        )
    if repeated := [name for name, count in collections.Counter(names).items() if count > 1]:
        return f"class_names has {repeated[0]!r} more than once: give each class a name of its own"
    return ""
