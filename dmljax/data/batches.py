"""One host's share of the batch of a step, as a pure function of the step.

The share is a contiguous block of rows of the global batch. Rows of the share beyond the end of the
global batch are padding, and all zeros. All randomness is keyed by the seed and the position of a
row in the sequence of all global batches, so it depends neither on the number of hosts, workers and
threads nor on the first step of a run.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dmljax.data import decode, sampling
from dmljax.data.records import Reader
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
    """What batches of images need: a reader and a transform."""

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

    `sample_fn` plans the global batch. With `skip`, another image replaces an unreadable one
    (`read`), whose index is in `skipped`. If the transform has a form for batches, it sees all
    images of the host together.
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
            return _stack([self.transform(*pair) for pair in zip(originals, rngs, strict=True)])
        images = self.reader.stack(indices)
        if images is None:
            images = _stack([self._read(indices, row, skipped) for row in rows])
        return self.transform.batch(images, rngs)

    @functools.cached_property
    def _image_shape(self) -> tuple[int, ...]:
        return image_shape(self.reader, self.transform, skip=self.skip)

    def _read(self, indices: np.ndarray, row: int, skipped: np.ndarray) -> np.ndarray:
        """Reads the image of a row. If another one replaces it, updates `indices` and `skipped`."""
        i = int(indices[row])
        indices[row], image = read(self.reader, i, skip=self.skip)
        if indices[row] != i:
            skipped[row] = i
        return image


def read(reader: Reader, i: int, *, skip: bool) -> tuple[int, np.ndarray]:
    """Reads image `i`, or with `skip`, if it is unreadable, the next readable one; and its index.

    The substitute is of the same class, so that a batch keeps its structure. If no image of the
    class can be read, it is of another one: a damaged class must not end a run of many hours.
    """
    try:
        return i, reader(i)
    except decode.UnreadableImage:
        if not skip:
            raise
    labels = reader.split.labels
    others = np.roll(np.arange(len(labels)), -i)[1:]
    is_same = labels[others] == labels[i]
    return _first_readable(reader, (*others[is_same].tolist(), *others[~is_same].tolist()))


def _first_readable(reader: Reader, rows: Iterable[int]) -> tuple[int, np.ndarray]:
    for row in rows:
        with contextlib.suppress(decode.UnreadableImage):
            return row, reader(row)
    raise decode.UnreadableImage("not a single image of the split can be read")


@dataclasses.dataclass(kw_only=True)
class PlannedBatch(_Sampled):
    """`planned_batch(step)` returns what devices need to make a batch of images that they hold.

    The result is `dict(rows, labels, numbers, skipped)`: `rows [b]` are rows of the split, -1 for
    padding; `numbers [b k]` are the draws of the transform, as in `TrainBatch`. `shapes` are the
    shapes of all images. `sources[i]` is the row actually read for image i (a substitute if i is
    unreadable).
    """

    transform: Transform
    shapes: Sequence[tuple[int, ...]]
    sources: np.ndarray
    labels: np.ndarray

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        step = int(step)
        indices = self._indices(self.labels, step)
        rows = self.sources[indices].astype(np.int32)
        skipped = np.where(rows != indices, indices, _READABLE)
        numbers = np.zeros((self.size, self._count), np.float32)
        for i, row in enumerate(rows.tolist()):
            draws = self.transform.draws(self.shapes[row], self._rng(step, i))
            numbers[i] = [number for of_operation in draws for number in of_operation]
        missing = (0, self.size - len(rows))
        return {
            "rows": np.pad(rows, missing, constant_values=-1),
            "labels": np.pad(self.labels[rows], missing),
            "numbers": numbers,
            "skipped": np.pad(skipped, missing, constant_values=_READABLE),
        }

    @functools.cached_property
    def _count(self) -> int:
        return sum(map(len, self.transform.draws(self.shapes[0], _generator(0, 0))))


@dataclasses.dataclass(kw_only=True)
class EvaluationBatch(_HostBatch):
    """`evaluation_batch(step)` returns `dict(images, indices, where, skipped)` of one host.

    Batches go through the `rows` of the split in order. Padding is black images, whose `indices`
    are -1. With `skip`, an image that cannot be read is black as well. `where` is False for both.
    """

    rows: range

    def __post_init__(self):
        self._shape = image_shape(self.reader, self.transform, skip=self.skip)

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
                    image = self.transform(self.reader(i), _generator(0, i))
                except decode.UnreadableImage:
                    if not self.skip:
                        raise
                    where[row], skipped[row] = False, i
            images.append(image)
        return {"images": _stack(images), "indices": indices, "where": where, "skipped": skipped}


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """Appends rows of zeros, up to `size` rows."""
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
    """Returns the shape of a transformed image; with `skip`, of the first readable one."""
    rows = range(len(reader.split))
    row, image = (0, reader(0)) if rows and not skip else _first_readable(reader, rows)
    return transform_fn(image, _generator(0, row)).shape
