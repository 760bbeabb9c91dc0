"""Batches of P classes with K images each."""

import numpy as np

from dmljax.data.sampling import draws
from dmljax.data.sampling.groups import Groups, Labels, check_batch, group


def class_balanced(
    labels: Labels, *, classes: int, per_class: int, seed: int, step: int
) -> np.ndarray:
    """P x K: `classes` distinct classes with `per_class` images each, class after class.

    If there are fewer than `classes` classes, every batch contains all of them.

    The classes are shuffled in rounds. A round deals them into batches and leaves out the
    `C mod P` classes that do not fill a batch. Which classes are left out rotates, so that all
    classes are dealt equally often in the long run. Each class has a shuffled order of its images
    and deals K of them at a time. The last deal of a pass is filled up from the start of the same
    order. So no image occurs twice in a batch (unless its class has fewer than K), and every image
    is used once in `ceil(n / K)` deals of its class. `coverage` returns the number of steps in
    which all images are used.
    """
    groups = group(labels)
    classes = min(classes, len(groups.count))
    check_batch(groups, classes, per_class)
    total = len(groups.count)
    batches, omitted_count, cycle = _round(total, classes)
    turn, batch = divmod(step, batches)
    epoch, turn_in_cycle = divmod(turn, cycle)
    rotation = draws.permutation(total, seed, draws.OMITTED, epoch)
    omitted = rotation[(turn_in_cycle * omitted_count + np.arange(omitted_count)) % total]
    shuffled = draws.permutation(total - omitted_count, seed, draws.ROUND, turn)
    dealt = np.delete(np.arange(total), omitted)[shuffled]
    chosen = dealt[batch * classes : (batch + 1) * classes]
    # How often each chosen class was dealt before: all earlier rounds minus those without it.
    position = np.empty(total, np.int64)
    position[rotation] = np.arange(total)
    missed = -(-(turn_in_cycle * omitted_count - position[chosen]) // total)
    deals_per_cycle = cycle - (cycle * omitted_count) // total
    deals_before = epoch * deals_per_cycle + turn_in_cycle - np.maximum(missed, 0)
    indices = np.empty((classes, per_class), np.int64)
    for row, c, deals in zip(indices, chosen.tolist(), deals_before.tolist(), strict=True):
        n = int(groups.count[c])
        pass_, deal = divmod(deals, -(-n // per_class))
        order = draws.permutation(n, seed, draws.CLASS_ORDER, c, pass_)
        row[:] = groups.images(c)[order[(deal * per_class + np.arange(per_class)) % n]]
    return indices.reshape(-1)


def coverage(labels: Labels, *, classes: int, per_class: int) -> int:
    """Number of steps in which `class_balanced` uses every image at least once, for any seed."""
    groups = group(labels)
    classes = min(classes, len(groups.count))
    check_batch(groups, classes, per_class)
    total = len(groups.count)
    batches, omitted_count, _ = _round(total, classes)
    deals = int(-(-groups.count.max() // per_class))
    rounds = deals
    # In R rounds, a class is left out at most ceil(R * omitted_count / total) times.
    while rounds - -(-rounds * omitted_count // total) < deals:
        rounds += 1
    return rounds * batches


def describe_coverage(groups: Groups, *, classes: int, per_class: int) -> str:
    """When `class_balanced` has used every image, and a note if it has too few classes."""
    steps = coverage(groups, classes=classes, per_class=per_class)
    note = f"every image is used within {steps} steps"
    if classes > (total := len(groups.count)):
        note = f"a batch has all {total} classes instead of {classes}; {note}"
    return note


def _round(total: int, classes: int) -> tuple[int, int, int]:
    """Batches of a round, classes that a round leaves out, and the length of a cycle.

    After a cycle of rounds, all classes have been left out equally often.
    """
    batches, omitted_count = divmod(total, classes)
    cycle = total // np.gcd(total, omitted_count) if omitted_count else 1
    return batches, omitted_count, cycle
