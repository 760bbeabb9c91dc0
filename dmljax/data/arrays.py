"""A data set in one NumPy file."""

import collections
import os
import pathlib
import zipfile
from collections.abc import Sequence

import numpy as np

from dmljax.data.splits import Split, Splits, divide, encode
from dmljax.hints import counted


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
