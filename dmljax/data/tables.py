"""Data sets listed in a CSV or Parquet table, or stored in one NumPy file."""

import collections
import csv
import io
import os
import pathlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dmljax.data.splits import Split, Splits, divide, encode, subset
from dmljax.hints import check_known, counted, hint

_COLUMNS = ("path", "label", "split", "role", "box", "superlabel", "group")
_CHOICES = {"role": ("query", "gallery", "both", ""), "split": ("train", "test")}
_ARRAYS = ("images", "labels", "class_names", "class_is_test")
_Cells = dict[str, list[str]]


def table(
    *,
    path: str | os.PathLike,
    root: str | os.PathLike | None = None,
    split: float | Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> Splits:
    """Reads a CSV or Parquet table with columns `path` and `label`, a row per image or box.

    The cells of a CSV are separated by commas, semicolons or tabs.

    Optional columns: `split` (train or test), `role` (query, gallery or both; used for test rows),
    `box` (left top right bottom, in pixels of the upright image), `superlabel`, and `group` (a
    query and a gallery item of one group are not compared; empty means no group). `columns` maps
    these names to the names in the file. Paths are relative to `root`, by default the folder of the
    table. Without a column `split`, the argument `split` divides the classes as in `folder`.
    """
    file = pathlib.Path(path).expanduser()
    columns = dict(columns or {})
    check_known("table: columns= has no key", columns, _COLUMNS)
    needed = {"path": "path", "label": "label"} | columns
    titles = {name: name for name in _COLUMNS} | columns
    data = _read(file, set(needed.values()))
    cells = {name: data[title] for name, title in titles.items() if title in data}
    folder = pathlib.Path(root).expanduser() if root is not None else file.parent
    for problem in _problems(cells, data, needed, split, folder):
        raise ValueError(f"table: {file}{problem}")
    paths = [str(folder / cell) for cell in cells["path"]]
    labels, names = encode(cells["label"])
    roles = np.array(cells["role"]) if "role" in cells else None
    all_rows = Split(
        paths,
        labels,
        names,
        query=None if roles is None else np.isin(roles, ("query", "both")),
        gallery=None if roles is None else np.isin(roles, ("gallery", "both")),
        boxes=np.array([_box(x) for x in cells["box"]], np.int32) if "box" in cells else None,
        superlabels=encode(cells["superlabel"])[0] if "superlabel" in cells else None,
        groups=_groups(cells["group"]) if "group" in cells else None,
    )
    if "split" not in cells:
        return divide(all_rows, train=0.5 if split is None else split)
    split_of_row = np.array(cells["split"])
    return Splits(*(subset(all_rows, split_of_row == name) for name in ("train", "test")))


def _problems(
    cells: _Cells,
    data: _Cells,
    titles: Mapping[str, str],
    split: float | Sequence[str] | None,
    folder: pathlib.Path,
) -> Iterator[str]:
    """Yields what is wrong with the cells of a table; `data` are all columns of the file."""
    for name, title in titles.items():
        if title not in data:
            yield (
                f" has no column {title!r}{hint(title, data)}. Rename a column, or "
                f"name it by columns={{{name!r}: 'its name in the file'}}"
            )
    if not cells["path"]:
        yield " has no rows"
    for name in ("path", "label"):
        if "" in cells[name]:
            yield f" row {cells[name].index('') + 1} has an empty {name}"
    if not (folder / cells["path"][0]).exists():
        yield f" row 1: {cells['path'][0]!r} is not a file in {folder}, which root= may change"
    rows: dict[tuple[str, str], int] = {}
    for i, key in enumerate(zip(cells["path"], cells.get("box", cells["path"]), strict=True)):
        if (first := rows.setdefault(key, i)) != i:
            yield (
                f" has {key[0]!r} twice, in rows {first + 1} and {i + 1}: remove one (rows may "
                "share an image only with different boxes)"
            )
    for name, allowed in _CHOICES.items():
        for i, cell in enumerate(cells.get(name, ())):
            if cell not in allowed:
                yield f" row {i + 1}: {name} {cell!r} is none of {', '.join(map(repr, allowed))}"
    for i, cell in enumerate(cells.get("box", ())):
        if _box(cell) is None:
            yield f" row {i + 1}: box {cell!r} is not 'left top right bottom'"
    if "split" in cells and split is not None:
        yield f" has a column split, so leave out split={split!r}"


def _read(file: pathlib.Path, titles: set[str]) -> _Cells:
    """Reads the columns as text without blanks around it. Null and NaN are empty cells.

    A CSV has the delimiter that finds most of the columns `titles`.
    """
    if not file.is_file():
        raise FileNotFoundError(f"table: {file} is not a file; set path= to a .csv or .parquet")
    if file.suffix.lower() != ".parquet":
        return _read_csv(file, titles)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        text = f"table: reading {file} needs pyarrow: pip install 'dmljax[parquet]'"
        raise ImportError(text) from error
    try:
        columns = parquet.read_table(file).to_pydict()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"table: {file} is not Parquet: {error}") from error
    return {name: [_text(cell) for cell in cells] for name, cells in columns.items()}


def _read_csv(file: pathlib.Path, titles: set[str]) -> _Cells:
    try:
        # Spreadsheets write a byte-order mark, which utf-8-sig removes.
        with file.open(newline="", encoding="utf-8-sig") as lines:
            text = lines.read()
        delimiter = max(",;\t", key=lambda delimiter: _fit(text, delimiter, titles))
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = next(reader, None) or []
        rows = [(reader.line_num, row) for row in reader if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"table: {file} is not a CSV in UTF-8: {error}") from error
    problem = "" if header else " is empty; its first line must name the columns"
    if len(set(header)) < len(header):
        problem = f" names a column twice: {', '.join(header)}"
    for number, row in rows:
        if len(row) != len(header) and not problem:
            problem = f":{number} has {len(row)} cells, not {len(header)}"
    if problem:
        raise ValueError(f"table: {file}{problem}")
    return {name: [row[i].strip() for _, row in rows] for i, name in enumerate(header)}


def _fit(text: str, delimiter: str, titles: set[str]) -> tuple[int, int]:
    """Counts `titles` and columns that the delimiter finds in the first line."""
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


def _box(cell: str) -> tuple[int, int, int, int] | None:
    """Parses left, top, right and bottom; returns None if they are not a box."""
    try:
        left, top, right, bottom = (round(float(n)) for n in cell.replace(",", " ").split())
    except (ValueError, OverflowError):
        return None
    is_box = 0 <= left < right and 0 <= top < bottom
    return (left, top, right, bottom) if is_box else None


def _groups(cells: Sequence[str]) -> np.ndarray:
    index = {cell: i for i, cell in enumerate(sorted(set(cells) - {""}))}
    return np.array([index.get(cell, -1) for cell in cells], np.int32)


def npz(*, path: str | os.PathLike, split: float | Sequence[str] | None = None) -> Splits:
    """Reads a NumPy file with `images` (`uint8 [n h w]` or `[n h w c]`) and `labels` from 0.

    Images have 1 or 3 channels. The file may also contain `class_names` and `class_is_test`, with
    one entry per class. `split`, the fraction of the classes for training or their names, overrides
    the latter. By default the first half of the classes is for training. Pickled objects are
    refused.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"npz: {file} does not exist; set path= to an .npz file")
    try:
        with file.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            data = {name: arrays[name] for name in _ARRAYS if name in arrays}
        if problem := _array_problem(data):
            raise ValueError(problem)
    # NumPy returns an array, and no context, for a .npy file.
    except (ValueError, OSError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"npz: {file} is not a correct file of numpy.savez: {error}") from error
    images, labels, is_test = data["images"], data["labels"], data.get("class_is_test")
    images = images[..., None] if images.ndim == 3 else images
    if "class_names" in data:
        names = tuple(map(str, data["class_names"].ravel()))
    else:
        labels, names = encode(labels)
    if split is None and is_test is not None:
        split = [name for name, test in zip(names, is_test, strict=True) if not test]
    return divide(Split(images, labels, names), train=0.5 if split is None else split)


def _array_problem(data: Mapping[str, np.ndarray]) -> str:
    """Returns what is wrong with the arrays of a file; "" if nothing is."""
    if missing := [name for name in ("images", "labels") if name not in data]:
        return f"it has no array {missing[0]!r}"
    images, labels = data["images"], data["labels"]
    is_image = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
    if images.dtype != np.uint8 or not is_image or (len(images) and not images.size):
        return (
            "images must be uint8 [n h w], [n h w 1] or [n h w 3] with pixels, got "
            f"{images.dtype} {images.shape}; for channels first: np.moveaxis(images, 1, -1)"
        )
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        return (
            f"labels must be {len(images)} integers, got {labels.dtype} {labels.shape}; for text: "
            "class_names, labels = np.unique(labels, return_inverse=True)"
        )
    low, high = (labels.min(), labels.max()) if len(labels) else (0, -1)
    names = list(map(str, data.get("class_names", np.unique(labels)).ravel()))
    if low < 0 or ("class_names" in data and high >= len(names)):
        return (
            f"labels run from {low} to {high}, but must be 0 or more and index "
            f"{counted(len(names), 'name')}: leave out images without a class"
        )
    if len(set(names)) < len(names):
        name, _ = collections.Counter(names).most_common(1)[0]
        return f"class_names has {name!r} more than once: give each class a name of its own"
    is_test = data.get("class_is_test", np.zeros(len(names), bool))
    is_mark = is_test.shape == (len(names),) and is_test.dtype.kind in "biuf"
    if not is_mark or not np.isin(is_test, (0, 1)).all():
        return f"class_is_test must be True or False for each of {len(names)} classes"
    return ""
