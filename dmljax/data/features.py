"""Records that are features: what a frozen backbone gives for each image, read from a cache.

The cache of an array of features is a folder of parts (`files.parts`). A part has `.npy` files of
consecutive rows; their names are the first rows. A row of NaN is an image that cannot be read. The
name of the folder is a digest of the net with its weights, the preprocessing, and the paths, sizes
and times of the image files, so that features are only used for what they were computed from.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dmljax.data.decode import UnreadableImage
from dmljax.data.digest import digest_of_images
from dmljax.data.splits import Split, record_name, repeated
from dmljax.data.transforms.operations import Operation
from dmljax.data.transforms.transform import Transform
from dmljax.files import parts

_FORMAT = 1
# Arguments of a net that change nothing in inference.
_NO_MATTER = ("drop_path", "impl", "norm", "remat", "weights")


class Rows:
    """The rows of an array of features in a folder of parts; files are opened when needed."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    @functools.cached_property
    def _files(self) -> tuple[np.ndarray, list[np.ndarray]]:
        paths = sorted(self.folder.glob("part-*/*.npy"), key=lambda path: path.name)
        if not paths:
            raise FileNotFoundError(f"{self.folder} has no features: run the same command again")
        starts = np.array([int(path.stem) for path in paths])
        return starts, [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]

    def __getitem__(self, row: int) -> np.ndarray:
        starts, arrays = self._files
        file = int(np.searchsorted(starts, row, side="right")) - 1
        return np.asarray(arrays[file][row - starts[file]])

    def __getstate__(self):  # A worker process opens the files itself.
        return {"folder": self.folder}


class Features:
    """Records of the features of `images`: float32 `[1 + views d]`.

    The first row is of the image as for evaluation. The `views` that follow are of augmented forms.
    """

    def __init__(self, images: Split, rows: Rows, augmented: Rows | None = None, views: int = 0):
        self.images, self.rows, self._augmented, self._views = images, rows, augmented, views

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> np.ndarray:
        features = [self.rows[i]]
        if self._augmented is not None:
            features += [self._augmented[i * self._views + view] for view in range(self._views)]
        result = np.stack(features)
        if not np.isfinite(result).all():
            raise UnreadableImage("it could not be read when its features were computed")
        return result

    def describe(self, i: int) -> str:
        """Returns the name of record `i` in messages."""
        return record_name(self.images.records, i)


class cached_view(Operation):
    """Takes the features of one view: as for evaluation or, with `is_drawn`, of a random one."""

    is_drawn: bool = False
    is_random = True  # a bundle cannot hold it

    def shape(self, shape):
        return shape[1:]

    def draw(self, shape, rng):
        return (int(rng.integers(1, shape[0])) if self.is_drawn and shape[0] > 1 else 0,)

    def apply(self, image, rng, view):
        return image[view]


def transforms_of(
    training: Transform, evaluation: Transform, views: int
) -> tuple[Transform, Transform]:
    """Returns the transforms for training and evaluation on `Features` made by these transforms."""
    note = f"cached features of {evaluation.title}"
    of_training = f"cached features of {views} times {training.title}" if views else note
    return (
        Transform((cached_view(is_drawn=True),), of_training),
        Transform((cached_view(),), note, evaluation.least_side),  # for pictures of the images
    )


class Entry(NamedTuple):
    """The features of some images by one transform, and the folder where they lie."""

    folder: pathlib.Path
    images: Split
    transform_fn: Transform

    @property
    def is_complete(self) -> bool:
        """Returns whether all parts are written."""
        return self._state["missing"] == []

    @property
    def seconds(self) -> float | None:
        """Returns the mean time per image when the features were computed; None if unknown."""
        times = [part["seconds"] for part in self._state["folders"]]
        known = [seconds for seconds in times if seconds is not None]
        return sum(known) / len(known) if known else None

    @property
    def _state(self) -> dict[str, Any]:
        try:
            return parts.state(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return {"folders": [], "missing": None}


class Cache:
    """The features that a run needs. `split` replaces the records of a split by its features.

    * `about`: JSON that identifies net, weights and normalization; `output` of the net is kept.
    * `evaluation`, `training`: the two transforms.
    * `views`: augmented features of each training image; 0 for none.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        about: Mapping[str, Any],
        *,
        output: str = "pooled",
        evaluation: Transform,
        training: Transform | None = None,
        views: int = 0,
    ):
        self._folder = pathlib.Path(folder).expanduser()
        net = about["net"]
        if isinstance(net, Mapping):
            net = {name: value for name, value in net.items() if name not in _NO_MATTER}
        self._about = {**about, "net": net, "output": output}
        self._evaluation, self._training = evaluation, training
        self.output, self.views = output, views
        self.entries: list[Entry] = []

    @property
    def is_complete(self) -> bool:
        """Returns whether all features are computed."""
        return all(entry.is_complete for entry in self.entries)

    @property
    def seconds(self) -> float | None:
        """Returns the mean time per image of the first array of features."""
        return self.entries[0].seconds

    def split(self, images: Split, *, is_training: bool = False) -> Split:
        """Returns the split with features as records, which `compute` makes readable."""
        if not len(images):
            return images
        rows, augmented = self._rows(images, self._evaluation), None
        if is_training and self.views and self._training is not None:
            augmented = self._rows(images, self._training, times=self.views)
        records = Features(images, rows, augmented, self.views)
        return dataclasses.replace(images, records=records, boxes=None)

    def _rows(self, images: Split, transform: Transform, *, times: int = 1) -> Rows:
        key = {"format": _FORMAT, **self._about, "transform": transform.to_json(), "times": times}
        key["images"] = digest_of_images(images)
        images = images if times == 1 else repeated(images, times)
        entry = Entry(self._folder / _digest(key)[:32], images, transform)
        self.entries.append(entry)
        return Rows(entry.folder)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
