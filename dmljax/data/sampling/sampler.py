"""A sampler with its options bound, and the steps at which its epochs end."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dmljax.data.sampling.base import Groups, Labels, group
from dmljax.data.sampling.published import (
    chunks_epoch_length,
    class_chunks,
    class_count_epoch_ends,
    random_class_count,
)

# Samplers whose epoch is not one pass over the images.
_EPOCH_LENGTHS = {class_chunks: chunks_epoch_length}
# Samplers with epochs of different lengths.
_EPOCH_ENDS = {random_class_count: class_count_epoch_ends}


class Sampler(NamedTuple):
    """Pure functions that plan batches. A sampler can be called like its `batch`.

    `batch(groups, *, seed, step)` returns the indices of a global batch, `[b]`.
    `epoch_length(groups)` returns the number of steps in an epoch. If epochs differ in length,
    `epoch_ends(groups, *, seed, epochs)` returns the steps after which the first ones end.
    """

    batch: Callable[..., np.ndarray]
    epoch_length: Callable[[Groups], int]
    epoch_ends: Callable[..., np.ndarray] | None = None

    def __call__(self, groups: Labels, *, seed: int, step: int) -> np.ndarray:
        return self.batch(groups, seed=seed, step=step)


def bind(sample_fn: Callable[..., np.ndarray], **options) -> Sampler:
    """Binds `options` to the sampler `sample_fn`, a function of `sampling` or any other.

    >>> from dmljax.data import sampling
    >>> sampler = bind(sampling.class_balanced, classes=2, per_class=3)
    >>> len(sampler(np.arange(20) % 4, seed=0, step=0))
    6
    """
    batch = functools.partial(sample_fn, **options)

    def bound(table: dict[Callable, Callable], default: Any) -> Any:
        function = table.get(sample_fn)
        return default if function is None else functools.partial(function, **options)

    return Sampler(
        batch,
        bound(_EPOCH_LENGTHS, functools.partial(_batches_in_the_images, batch)),
        bound(_EPOCH_ENDS, None),
    )


def _batches_in_the_images(batch_fn: Callable[..., np.ndarray], groups: Groups) -> int:
    return max(1, len(groups.labels) // len(batch_fn(groups, seed=0, step=0)))


def epoch_end_fn(sampler: Sampler, labels: Labels, *, seed: int) -> Callable[[float], float]:
    """Returns `epoch_end(epochs)`: the step after which that many epochs of a run have ended.

    A fraction of an epoch ends at that fraction of its steps.

    >>> from dmljax.data import sampling
    >>> sampler = bind(sampling.class_balanced, classes=2, per_class=3)
    >>> epoch_end = epoch_end_fn(sampler, np.arange(20) % 4, seed=0)
    >>> epoch_end(10)
    30
    """
    groups, epoch_ends = group(labels), sampler.epoch_ends
    if epoch_ends is None:
        length = sampler.epoch_length(groups)
        return lambda epochs: epochs * length

    def epoch_end(epochs: float) -> float:
        count = math.floor(epochs)
        ends = epoch_ends(groups, seed=seed, epochs=count + 1)
        start, end = [0, *ends.tolist()][-2:]
        return start + (epochs - count) * (end - start)

    return epoch_end
