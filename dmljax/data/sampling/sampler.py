"""A sampler with its options bound, and the conversion of its epochs to steps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from dmljax.data.sampling.class_balanced import describe_plan, plan
from dmljax.data.sampling.graph import combine, combine_epoch_length, number, number_epoch_ends
from dmljax.data.sampling.groups import Groups, Labels, group

__all__ = ["Epochs", "Sampler", "bind"]

# Samplers with an epoch that is not as many batches as the images fill.
_EPOCH_LENGTHS = {combine: combine_epoch_length}
# Samplers with epochs of different lengths.
_EPOCH_ENDS = {number: number_epoch_ends}
_DESCRIPTIONS = {plan: describe_plan}


def _no_description(groups: Groups) -> str:
    return ""


class Sampler(NamedTuple):
    """Pure functions that plan batches. A sampler can be called like its `batch`.

    `batch(groups, *, seed, step)` returns the indices of a global batch, `[b]`.
    `epoch_length(groups)` returns the number of steps in an epoch. If epochs differ in length,
    `epoch_ends(groups, *, seed, epochs)` returns the steps after which the first ones end.
    `describe(groups)` returns a note for the reader.
    """

    batch: Callable[..., np.ndarray]
    epoch_length: Callable[[Groups], int]
    epoch_ends: Callable[..., np.ndarray] | None = None
    describe: Callable[[Groups], str] = _no_description

    def __call__(self, groups: Labels, *, seed: int, step: int) -> np.ndarray:
        return self.batch(groups, seed=seed, step=step)


def bind(sample_fn: Callable[..., np.ndarray], **options) -> Sampler:
    """The sampler `sample_fn`, a function of `sampling` or any other, with `options` bound.

    >>> sampler = bind(plan, classes=2, per_class=3)
    >>> len(sampler(np.arange(20) % 4, seed=0, step=0))
    6
    """
    batch = functools.partial(sample_fn, **options)

    def bound(table: dict[Callable, Callable], default: Callable | None) -> Callable | None:
        function = table.get(sample_fn)
        return default if function is None else functools.partial(function, **options)

    return Sampler(
        batch,
        bound(_EPOCH_LENGTHS, functools.partial(_batches_in_the_images, batch)),
        bound(_EPOCH_ENDS, None),
        bound(_DESCRIPTIONS, _no_description),
    )


def _batches_in_the_images(batch_fn: Callable[..., np.ndarray], groups: Groups) -> int:
    return max(1, len(groups.labels) // len(batch_fn(groups, seed=0, step=0)))


class Epochs:
    """Converts epochs of a sampler to steps."""

    def __init__(self, sampler: Sampler, labels: Labels, *, seed: int):
        self._sampler, self._groups, self._seed = sampler, group(labels), seed

    def steps(self, epochs: float) -> int:
        """The step after which `epochs` epochs have ended, at least 1."""
        if self._sampler.epoch_ends is None:
            return max(1, round(epochs * self._sampler.epoch_length(self._groups)))
        count = math.floor(epochs)
        ends = self._sampler.epoch_ends(self._groups, seed=self._seed, epochs=count + 1)
        start, end = [0, *ends.tolist()][-2:]
        return max(1, round(start + (epochs - count) * (end - start)))

    def every(self, epochs: float, *, total: int) -> Collection[int]:
        """The steps up to `total` after which `epochs`, 2 `epochs`, 3 `epochs`, ... have ended."""
        if self._sampler.epoch_ends is None or not epochs:
            step = self.steps(epochs)
            return range(step, total + 1, step)
        steps: set[int] = set()
        for multiple in itertools.count(1):
            if (step := self.steps(multiple * epochs)) > total:
                break
            steps.add(step)
        return frozenset(steps)
