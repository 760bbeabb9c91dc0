"""Embeddings and labels from files, for reports on embeddings that dmljax did not train."""

import os
import pathlib

import numpy as np
from absl import logging
from safetensors import SafetensorError, safe_open

from dmljax.data import image_folders, splits
from dmljax.data.prepare import MARKS
from dmljax.data.splits import Split
from dmljax.files import reading
from dmljax.hints import counted


def read(embeddings: str | os.PathLike, labels: str | os.PathLike) -> tuple[np.ndarray, Split]:
    """Reads the embeddings `[n d]` of a .npy file, and a split of their labels.

    Labels are integers or names in a .npy file, one name per line of a .txt file, or the
    items.safetensors of `dmljax embed`, which may also have queries, gallery and groups. The
    records of the split are the indices of the items.
    """
    vectors = _vectors(embeddings)
    codes, names, marks = _labels(pathlib.Path(labels))
    if len(codes) != len(vectors):
        raise ValueError(
            f"{embeddings} has {len(vectors):,} rows, but {labels} has {len(codes):,} labels"
        )
    return vectors, Split(np.arange(len(vectors)), codes, names, **marks)


def read_baseline(
    baseline: str | os.PathLike, embeddings: np.ndarray, *, name: str | os.PathLike
) -> np.ndarray:
    """Reads the embeddings `[n c]` of another model for the same images, in the same order.

    `embeddings`, of the file `name`, are compared with the baseline.
    """
    vectors = _vectors(baseline)
    if len(vectors) != len(embeddings):
        raise ValueError(
            f"{baseline} has {len(vectors):,} rows, but {name} has {len(embeddings):,}: row i of "
            "both must be of image i"
        )
    return vectors


def _vectors(path: str | os.PathLike) -> np.ndarray:
    """Reads the embeddings of a file in float32; warns about rows of NaN and rows of zeros."""
    vectors = _array(path)
    if vectors.ndim != 2 or 0 in vectors.shape or vectors.dtype.kind != "f":
        raise ValueError(
            f"{path} must hold floating-point numbers [items, dimensions], got {vectors.dtype} of "
            f"shape {vectors.shape}"
        )
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.any():
        raise ValueError(f"every row of {path} holds a NaN or an infinity")
    for rows, kind, effect in (
        (~is_finite, "with a NaN or an infinity", "not in any score"),
        (~vectors.any(axis=1), "of zeros", "write NaN into the rows of images that failed"),
    ):
        if count := int(rows.sum()):
            first = int(rows.argmax())
            logging.warning(
                "%s: %s %s (first: row %d): %s", path, counted(count, "row"), kind, first, effect
            )
    return vectors if vectors.dtype == np.float32 else vectors.astype(np.float32)


def image_paths(folder: str | os.PathLike, count: int) -> list[pathlib.Path]:
    """Lists the `count` image files below a folder, in the order of their paths.

    Image i belongs to embedding i.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"the folder {folder} does not exist")
    paths = [pathlib.Path(path) for path in image_folders.image_paths(pathlib.Path(folder))]
    if len(paths) != count:
        raise ValueError(
            f"{folder} holds {len(paths):,} images, but there are {count:,} embeddings: image i, "
            "in the order of the paths, belongs to embedding i"
        )
    return paths


def _array(path: str | os.PathLike) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not an array of numbers or names by numpy.save(FILE, array): {error}"
        ) from error


def _labels(path: pathlib.Path) -> tuple[np.ndarray, tuple[str, ...], dict[str, np.ndarray]]:
    """Reads labels from 0, the names of the classes, and queries, gallery and groups."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "np") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                names = reading.json_value((file.metadata() or {})["classes"])
            marks = {
                name: arrays[name].astype(kind) for name, kind in MARKS.items() if name in arrays
            }
            return arrays["labels"], tuple(names), marks
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} was not written by dmljax embed: {error}") from error
    if path.suffix == ".npy":
        values = _array(path)
        if values.ndim != 1 or values.dtype.kind not in "iubUS":
            raise ValueError(
                f"{path} must hold one integer or name for each item, got {values.dtype} of shape "
                f"{values.shape}"
            )
        if values.dtype.kind == "S":
            values = np.char.decode(values, "utf-8", "backslashreplace")
        strings = [str(value) for value in values]
    else:
        strings = path.read_text(encoding="utf-8", errors="backslashreplace").splitlines()
    codes, names = splits.encode(strings)
    return codes, names, {}
