"""One host's share of the batch of a step, as a pure function of the step.

The share is a contiguous block of rows of the global batch. Rows of the share beyond the end of the
global batch are padding, and all zeros. All randomness is keyed by the seed and the position of a
row in the sequence of all global batches, so it depends neither on the number of hosts, workers and
threads nor on the first step of a run.
"""

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from dmljax.data import decode, sampling
from dmljax.data.reader import Reader
from dmljax.data.transforms.plan import Program
from dmljax.data.transforms.transform import Transform

_READABLE = -1  # in `skipped`, which holds the index of an unreadable image


class _Generators(threading.local):
    """`generators(*key)` returns a Philox generator of that key, valid until the next call.

    Resetting the state is equivalent to creating a new generator, and ten times faster.
    """

    def __init__(self):
        self._bits = np.random.Philox(key=[0, 0])
        self._rng, self._initial = np.random.Generator(self._bits), self._bits.state

    def __call__(self, *key: int) -> np.random.Generator:
        self._initial["state"]["key"][:] = key
        self._bits.state = self._initial
        return self._rng


_generator = _Generators()


@dataclasses.dataclass(kw_only=True)
class _Share:
    """The rows of one host: `size` rows from row `offset` of the global batch."""

    size: int
    offset: int
    global_size: int


@dataclasses.dataclass(kw_only=True)
class _HostBatch(_Share):
    """What batches of images are made of."""

    reader: Reader
    transform: Transform
    skip: bool


@dataclasses.dataclass(kw_only=True)
class _Sampled(_Share):
    """Batches of training, which `sample_fn` plans for all hosts."""

    sample_fn: Callable[..., np.ndarray]
    seed: int
    _groups: sampling.Groups | None = dataclasses.field(default=None, init=False)

    def _indices(self, labels: np.ndarray, step: int) -> np.ndarray:
        if self._groups is None:
            self._groups = sampling.group(labels)
        plan = self.sample_fn(self._groups, seed=self.seed, step=step)
        if len(plan) < self.global_size:
            raise IndexError(
                f"the sampler returned {len(plan)} images at step {step}, not {self.global_size}"
            )
        end = min(self.offset + self.size, self.global_size)
        return np.array(plan[self.offset : end], np.int64)

    def _rng(self, step: int, row: int) -> np.random.Generator:
        return _generator(self.seed, step * self.global_size + self.offset + row)


@dataclasses.dataclass(kw_only=True)
class TrainBatch(_HostBatch, _Sampled):
    """`train_batch(step)` returns `dict(images, labels, skipped)` of one host.

    `sample_fn` plans the global batch. With `skip`, another image (`stand_in`) replaces an image
    that cannot be read, and `skipped` holds the index of the latter. If the transform has a form
    for batches, it sees all images of the host together.
    """

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        step = int(step)
        indices = self._indices(self.reader.split.labels, step)
        skipped = np.full(self.size, _READABLE)
        images = self._images(step, indices, skipped)
        labels = self.reader.split.labels[indices]
        images, labels = (_padded(rows, self.size) for rows in (images, labels))
        return {"images": images, "labels": labels, "skipped": skipped}

    def _images(self, step: int, indices: np.ndarray, skipped: np.ndarray) -> np.ndarray:
        rows = range(len(indices))
        if not rows:
            return np.zeros((0, *self._image_shape), np.uint8)
        rngs = (self._rng(step, row) for row in rows)
        if self.transform.batch is None:
            originals = (self._read(indices, row, skipped) for row in rows)
            return _stack(
                [self.transform.image(*pair) for pair in zip(originals, rngs, strict=True)]
            )
        images = self.reader.stack(indices)
        if images is None:
            images = _stack([self._read(indices, row, skipped) for row in rows])
        return self.transform.batch(images, rngs)

    @functools.cached_property
    def _image_shape(self) -> tuple[int, ...]:
        return image_shape(self.reader, self.transform.image, skip=self.skip)

    def _read(self, indices: np.ndarray, row: int, skipped: np.ndarray) -> np.ndarray:
        """The image of a row. If another one replaces it, `indices` and `skipped` say so."""
        i = int(indices[row])
        try:
            return self.reader(i)
        except decode.UnreadableImage:
            if not self.skip:
                raise
        skipped[row] = i
        indices[row], image = stand_in(self.reader, i)
        return image


def stand_in(reader: Reader, i: int) -> tuple[int, np.ndarray]:
    """The next readable image after image `i`, and its index.

    It is of the same class, so that a batch keeps its structure. If no image of the class can be
    read, it is of another one: a single damaged class must not end a run of many hours.
    """
    labels = reader.split.labels
    others = np.roll(np.arange(len(labels)), -i)[1:]
    is_same = labels[others] == labels[i]
    for other in map(int, itertools.chain(others[is_same], others[~is_same])):
        try:
            return other, reader(other)
        except decode.UnreadableImage:
            continue
    raise decode.UnreadableImage("not a single image of the split can be read")


@dataclasses.dataclass(kw_only=True)
class PlannedBatch(_Sampled):
    """`planned_batch(step)` returns what devices need to make a batch of images that they hold.

    `dict(rows, labels, scalars, array0, ..., skipped)`: `rows [b]` are rows of the split, -1 for
    padding; `scalars [b k]` and the arrays are the draws of the program, as in `TrainBatch`.
    `shapes` are the shapes of all images, and `sources [n]` are the rows of the images that stand
    for them: their own ones, or those of `stand_in` for images that cannot be read.
    """

    program: Program
    shapes: Sequence[tuple[int, ...]]
    sources: np.ndarray
    labels: np.ndarray

    def __post_init__(self):
        self._first = self.program.draw(self.shapes[0], _generator(0, 0))

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        step = int(step)
        indices = self._indices(self.labels, step)
        count = len(indices)
        rows, labels = np.full(self.size, -1, np.int32), np.zeros(self.size, np.int32)
        rows[:count] = self.sources[indices]
        labels[:count] = self.labels[rows[:count]]
        skipped = np.full(self.size, _READABLE)
        skipped[:count] = np.where(rows[:count] != indices, indices, _READABLE)
        scalars, *arrays = (
            np.zeros((self.size, *x.shape), x.dtype)
            for x in (self._first.scalars, *self._first.arrays)
        )
        for i in range(count):
            draws = self.program.draw(self.shapes[rows[i]], self._rng(step, i))
            scalars[i] = draws.scalars
            for array, values in zip(arrays, draws.arrays, strict=True):
                array[i] = values
        batch = {f"array{i}": array for i, array in enumerate(arrays)}
        return batch | {"rows": rows, "labels": labels, "scalars": scalars, "skipped": skipped}


@dataclasses.dataclass(kw_only=True)
class EvaluationBatch(_HostBatch):
    """`evaluation_batch(step)` returns `dict(images, indices, where, skipped)` of one host.

    Batches go through the `rows` of the split in order. Padding is black images, whose `indices`
    are -1. With `skip`, an image that cannot be read is black as well. `where` is False for both.
    """

    rows: range

    def __post_init__(self):
        self._shape = image_shape(self.reader, self.transform.image, skip=self.skip)

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        rows = self.offset + np.arange(self.size)
        indices = self.rows.start + int(step) * self.global_size + rows
        is_padding = (rows >= self.global_size) | (indices >= self.rows.stop)
        indices[is_padding] = -1
        where, skipped = indices >= 0, np.full(self.size, _READABLE)
        images = []
        for row, i in enumerate(indices.tolist()):
            image = np.zeros(self._shape, np.uint8)
            if i >= 0:
                try:
                    image = self.transform.image(self.reader(i), _generator(0, i))
                except decode.UnreadableImage:
                    if not self.skip:
                        raise
                    where[row], skipped[row] = False, i
            images.append(image)
        return {"images": _stack(images), "indices": indices, "where": where, "skipped": skipped}


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """With zeros after the last row, up to `size` rows."""
    missing = size - len(rows)
    return np.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)]) if missing else rows


def _stack(images: list[np.ndarray]) -> np.ndarray:
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise ValueError(
            f"images of one batch have the shapes {sorted(shapes)[:3]}: choose a transform that "
            "returns images of one size, such as --config.transform=standard_train"
        )
    return np.stack(images)


def image_shape(
    reader: Reader,
    transform_fn: Transform | Callable[[np.ndarray, np.random.Generator], np.ndarray],
    *,
    skip: bool,
) -> tuple[int, ...]:
    """The shape of a transformed image of the split; with `skip`, of the first readable one."""
    for i in range(len(reader.split)):
        try:
            image = reader(i)
        except decode.UnreadableImage:
            if skip:
                continue
            raise
        return transform_fn(image, _generator(0, i)).shape
    raise decode.UnreadableImage("not a single image of the split can be read")
