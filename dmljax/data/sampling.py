"""Which images make the global batch of a step: pure functions of (labels, seed, step).

Every sampler is `(labels, *, ..., seed, step) -> indices [b]`. Nothing is stored between steps, so
any step is reached at once and every host computes the same global batch, of which it reads its
own rows. `labels` may be passed as `group(labels)`, which saves sorting them at every step.

An epoch is as many batches as hold the set once, unless a sampler knows better: then it has an
attribute `epoch`, a function of labels and the sampler's keywords. `epoch_steps` asks it.

`plan` and `uniform` are the defaults; the others are the published systems' own. The k-reciprocal
neighbourhoods are batches of another kind: they follow from embeddings, at test time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from dmljax.data.neighbours import k_reciprocal, k_reciprocal_queries

__all__ = [
    "abe_pairs",
    "combine",
    "coverage",
    "epoch_steps",
    "group",
    "k_reciprocal",
    "k_reciprocal_queries",
    "n_pairs",
    "number",
    "plan",
    "uniform",
]

# One number per purpose: no two draws of this file share a generator.
_ROUND, _WITHIN, _SHUFFLE, _COMBINE, _COUNT, _N_PAIRS, _ABE, _LEAVE_OUT = range(8)


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Labels sorted by class: images `order[start[c] : start[c] + count[c]]` are of class `c`."""

    labels: np.ndarray
    order: np.ndarray
    start: np.ndarray
    count: np.ndarray

    def images(self, c: int) -> np.ndarray:
        return self.order[self.start[c] : self.start[c] + self.count[c]]


Labels = np.ndarray | Groups


def group(labels: Labels) -> Groups:
    """The images of each class; classes are the distinct labels, in order."""
    if isinstance(labels, Groups):
        return labels
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"labels must be a row of integers, not {labels.dtype} {labels.shape}")
    order = np.argsort(labels, kind="stable")
    _, start, count = np.unique(labels[order], return_index=True, return_counts=True)
    return Groups(labels, order, start, count)


def _rng(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(8192)
def _permutation(n: int, *key: int) -> np.ndarray:
    permutation = _rng(*key).permutation(n)
    permutation.setflags(write=False)
    return permutation


def _check(groups: Groups, classes: int, per_class: int) -> None:
    if classes < 1 or per_class < 1:
        raise ValueError(f"a batch of {classes} classes x {per_class} images is empty")
    if classes > len(groups.count):
        raise ValueError(
            f"a batch of {classes} classes is asked for, but the set has {len(groups.count)}: "
            f"set classes={len(groups.count)} or less"
        )
    if classes * per_class > len(groups.order):
        raise ValueError(
            f"a batch of {classes} x {per_class} = {classes * per_class} images is larger than the "
            f"set of {len(groups.order)}: lower classes or per_class"
        )


def _left_out(total: int, classes: int) -> tuple[int, int, int]:
    """Batches of a round, classes it leaves out, rounds until all are left out equally often."""
    batches, left = divmod(total, classes)
    return batches, left, total // np.gcd(total, left) if left else 1


def epoch_steps(sample_fn: Callable[..., np.ndarray], labels: Labels) -> int:
    """Steps in an epoch of a sampler whose keywords, save seed and step, are bound."""
    groups = group(labels)
    function = getattr(sample_fn, "func", sample_fn)
    if hasattr(function, "epoch"):
        return max(1, round(function.epoch(groups, **getattr(sample_fn, "keywords", {}))))
    return max(1, len(groups.labels) // len(sample_fn(groups, seed=0, step=0)))


def plan(labels: Labels, *, classes: int, per_class: int, seed: int, step: int) -> np.ndarray:
    """P x K: `classes` distinct classes with `per_class` images each, class after class.

    A round shuffles the classes and deals them into batches, leaving out the `C mod P` that do not
    fill one; which these are rotates, so that in the long run every class is dealt equally often.
    Each class deals its own images from a shuffle of its own, K at a time, filling up the last
    deal from the start of the same shuffle: no image is in a batch twice (unless its class has
    fewer than K) and every image is dealt in every `ceil(n / K)` deals. `coverage` tells in how
    many steps every image has been used.
    """
    groups = group(labels)
    _check(groups, classes, per_class)
    batches, left, cycle = _left_out(len(groups.count), classes)
    turn, batch = divmod(step, batches)
    epoch, turn_in = divmod(turn, cycle)
    total = len(groups.count)
    rotation = _permutation(total, seed, _LEAVE_OUT, epoch)
    out = rotation[(turn_in * left + np.arange(left)) % total]
    dealt = np.delete(np.arange(total), out)[_permutation(total - left, seed, _ROUND, turn)]
    chosen = dealt[batch * classes : (batch + 1) * classes]
    # How often each chosen class has been dealt before: rounds less those that left it out.
    place = np.empty(total, np.int64)
    place[rotation] = np.arange(total)
    missed = -(-(turn_in * left - place[chosen]) // total)
    before = epoch * (cycle - (cycle * left) // total) + turn_in - np.maximum(missed, 0)
    indices = np.empty((classes, per_class), np.int64)
    for row, c, deals in zip(indices, chosen.tolist(), before.tolist(), strict=True):
        n = int(groups.count[c])
        pass_, deal = divmod(deals, -(-n // per_class))
        shuffled = _permutation(n, seed, _WITHIN, c, pass_)
        row[:] = groups.images(c)[shuffled[(deal * per_class + np.arange(per_class)) % n]]
    return indices.reshape(-1)


def coverage(labels: Labels, *, classes: int, per_class: int) -> int:
    """Steps after which `plan` has used every image at least once, whatever the seed."""
    groups = group(labels)
    _check(groups, classes, per_class)
    total = len(groups.count)
    batches, left, _ = _left_out(total, classes)
    deals = int(-(-groups.count.max() // per_class))
    rounds = deals
    # In R rounds the unluckiest class is left out ceil(R * left / total) times.
    while rounds - -(-rounds * left // total) < deals:
        rounds += 1
    return rounds * batches


def uniform(labels: Labels, *, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Shuffled epochs without regard to class; a batch may hold the end of one and the next's
    beginning, so that no image is skipped.
    """
    n = len(group(labels).labels)
    if not 1 <= batch_size <= n:
        raise ValueError(f"a batch of {batch_size} does not suit a set of {n} images")
    positions = step * batch_size + np.arange(batch_size, dtype=np.int64)
    epochs, places = positions // n, positions % n
    return np.concatenate(
        [_permutation(n, seed, _SHUFFLE, int(e))[places[epochs == e]] for e in np.unique(epochs)]
    )


@functools.lru_cache(4)
def _combined(groups: Groups, classes: int, per_class: int, seed: int, epoch: int) -> np.ndarray:
    rng = _rng(seed, _COMBINE, epoch)
    parts = []
    for c in range(len(groups.count)):
        images = rng.permutation(groups.images(c))
        if len(images) < per_class:
            more = rng.choice(groups.images(c), per_class - len(images), replace=True)
            images = np.concatenate([images, more])
        missing = (len(images) // per_class + 1) * per_class - len(images)
        images = np.concatenate([images, rng.choice(images, missing, replace=False)])
        parts.append(images.reshape(-1, per_class))
    rows = rng.permutation(np.concatenate(parts))
    if missing := -len(rows) % classes:
        rows = np.concatenate([rows, rows[rng.choice(len(rows), missing, replace=False)]])
    return rows.reshape(-1, classes * per_class)


def _combined_steps(groups: Groups, classes: int, per_class: int) -> int:
    dealt = np.maximum(groups.count, per_class) // per_class + 1
    return -(-int(dealt.sum()) // classes)


def combine(labels: Labels, *, classes: int, per_class: int, seed: int, step: int) -> np.ndarray:
    """The graph system's CombineSampler: `classes` groups of `per_class` images of one class.

    Every class is cut into groups once an epoch, the last filled up (or a whole one added) with
    images drawn again; all groups are shuffled. So a batch may hold one class in two groups, and
    one image twice, as published; `plan` does neither.
    """
    groups = group(labels)
    _check(groups, classes, per_class)
    epoch, batch = divmod(step, _combined_steps(groups, classes, per_class))
    return _combined(groups, classes, per_class, seed, epoch)[batch]


combine.epoch = _combined_steps


def _shapes(groups: Groups, batch_size: int) -> list[tuple[int, int]]:
    shapes = [
        (p, batch_size // p)
        for p in range(2, batch_size // 2 + 1)
        if batch_size % p == 0 and p <= len(groups.count)
    ]
    if not shapes or batch_size > len(groups.order):
        raise ValueError(
            f"number: a batch of {batch_size} cannot be shared by 2 or more of "
            f"{len(groups.count)} classes with {len(groups.order)} images"
        )
    return shapes


def number(labels: Labels, *, batch_size: int = 54, seed: int, step: int) -> np.ndarray:
    """The graph system's NumberSampler (CUB): each epoch draws how many classes share the batch.

    The candidates are the divisors of `batch_size` from 2 to its half, equally likely; the epoch
    is then CombineSampler's. Divisors that ask for more classes than there are, are left out.
    """
    groups = group(labels)
    shapes = _shapes(groups, batch_size)
    steps = np.array([_combined_steps(groups, *shape) for shape in shapes])
    # Epochs differ in length, so the epoch of a step is found by adding up the lengths drawn.
    draws = _rng(seed, _COUNT).random(step // int(steps.min()) + 1)
    drawn = (draws * len(shapes)).astype(np.int64)
    ends = np.cumsum(steps[drawn])
    epoch = int(np.searchsorted(ends, step, side="right"))
    begin = int(ends[epoch - 1]) if epoch else 0
    return _combined(groups, *shapes[drawn[epoch]], seed, epoch)[step - begin]


def _number_steps(groups: Groups, batch_size: int = 54) -> float:
    """The mean over the shapes, of which each epoch draws one."""
    shapes = _shapes(groups, batch_size)
    return float(np.mean([_combined_steps(groups, *shape) for shape in shapes]))


number.epoch = _number_steps


def n_pairs(labels: Labels, *, classes: int = 64, seed: int, step: int) -> np.ndarray:
    """DVML's batch for the N-pair loss: two images of each class, all anchors, then all positives.

    Classes are drawn anew at every step, as published; those with one image are never drawn.
    """
    groups = group(labels)
    pairs = np.flatnonzero(groups.count > 1)
    if not 1 <= classes <= len(pairs):
        raise ValueError(
            f"n_pairs: {classes} classes with two images are asked for, the set has {len(pairs)}"
        )
    rng = _rng(seed, _N_PAIRS, step)
    chosen = rng.choice(pairs, classes, replace=False)
    rows = [rng.choice(groups.images(int(c)), 2, replace=False) for c in chosen]
    return np.stack(rows, axis=1).reshape(-1)


def abe_pairs(labels: Labels, *, batch_size: int = 64, seed: int, step: int) -> np.ndarray:
    """ABE's batch: `batch_size / 2` random images, then a partner for each.

    The first half of the partners is of the same class, the second of another. (The paper's
    sentence has two readings; in both, positive and negative pairs are equally many.)
    """
    groups = group(labels)
    n, half = len(groups.order), batch_size // 2
    single = len(groups.count) < 2 or groups.count.max() < 2
    if batch_size < 4 or batch_size % 4 or half > n or single:
        raise ValueError(
            f"abe_pairs: batch_size={batch_size} must be a multiple of 4, at most {2 * n}, and the "
            "set must have two classes, one of them with two images"
        )
    rng = _rng(seed, _ABE, step)
    # Sorted positions make both partners a draw from a range with one gap.
    owner = np.repeat(np.arange(len(groups.count)), groups.count)
    paired = np.flatnonzero(groups.count[owner] > 1)
    if len(paired) < half // 2:
        raise ValueError(f"abe_pairs: {half // 2} images must have a partner, {len(paired)} have")
    same = rng.choice(paired, half // 2, replace=False)
    other = rng.choice(np.setdiff1d(np.arange(n), same), half - half // 2, replace=False)
    start, count = groups.start[owner[same]], groups.count[owner[same]]
    draw = start + rng.integers(count - 1)
    mates = draw + (draw >= same)
    start, count = groups.start[owner[other]], groups.count[owner[other]]
    draw = rng.integers(n - count)
    strangers = np.where(draw >= start, draw + count, draw)
    return groups.order[np.concatenate([same, other, mates, strangers])]
