"""A data set listed in a CSV or Parquet table."""

import csv
import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmljax.data.splits import Split, Splits, divide, encode, subset
from dmljax.hints import hint

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
