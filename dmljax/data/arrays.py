"""A data set in one NumPy file."""

from __future__ import annotations

import os
import pathlib
import zipfile
from collections.abc import Sequence

import numpy as np

from dmljax.data.splits import Split, Splits, divide, encode


def npz(*, path: str | os.PathLike, split: float | Sequence[str] | None = None) -> Splits:
    """One NumPy file with `images` (`uint8 [n h w]` or `[n h w c]`) and `labels` (integers).

    The file may also contain `class_names` and `class_is_test`, with one entry per class. `split`,
    the fraction of the classes for training or their names, overrides the latter. By default the
    first half of the classes is for training. Pickled objects are refused.
    """
    file = pathlib.Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"npz: {file} does not exist; set path= to an .npz file")
    if not zipfile.is_zipfile(file):
        raise ValueError(f"npz: {file} cannot be read: it was not written by numpy.savez")
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
        all_images = Split(images, labels, tuple(map(str, data["class_names"])))
    else:
        all_images = Split(images, *encode(labels))
    if split is None and "class_is_test" in data:
        is_test = data["class_is_test"]
        if len(is_test) != len(all_images.names):
            raise ValueError(
                f"npz: class_is_test has {len(is_test)} entries for {len(all_images.names)} classes"
            )
        split = [n for n, test in zip(all_images.names, is_test, strict=True) if not test]
    return divide(all_images, train=0.5 if split is None else split)
