"""Batches of some classes with several images each, and batches without regard to class."""

import numpy as np

from dmljax.data.sampling import base
from dmljax.data.sampling.base import Labels, check_batch, group

__all__ = ["class_balanced", "nearest_classes", "uniform"]


def class_balanced(
    labels: Labels, *, classes: int, per_class: int, seed: int, step: int
) -> np.ndarray:
    """Draws P x K: `classes` distinct classes with `per_class` images each, in order of class.

    If there are fewer than `classes` classes, every batch contains all of them.

    The classes are shuffled in rounds. A round deals them into batches and leaves out the
    `C mod P` classes that do not fill a batch. Which classes are left out rotates, so that all
    classes are dealt equally often in the long run. Each class has a shuffled order of its images
    and deals K of them at a time. The last deal of a pass is filled up from the start of the same
    order. So no image occurs twice in a batch (unless its class has fewer than K), and every image
    is used once in `ceil(n / K)` deals of its class.
    """
    groups = group(labels)
    classes = min(classes, len(groups.count))
    check_batch(groups, classes, per_class)
    total = len(groups.count)
    batches, omitted_count, cycle = _round(total, classes)
    turn, batch = divmod(step, batches)
    epoch, turn_in_cycle = divmod(turn, cycle)
    rotation = base.permutation(total, seed, base.OMITTED, epoch)
    omitted = rotation[(turn_in_cycle * omitted_count + np.arange(omitted_count)) % total]
    shuffled = base.permutation(total - omitted_count, seed, base.ROUND, turn)
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
        order = base.permutation(n, seed, base.CLASS_ORDER, c, pass_)
        row[:] = groups.images(c)[order[(deal * per_class + np.arange(per_class)) % n]]
    return indices.reshape(-1)


def _round(total: int, classes: int) -> tuple[int, int, int]:
    """Returns batches per round, classes that a round leaves out, and the cycle length.

    After a cycle of rounds, all classes have been left out equally often.
    """
    batches, omitted_count = divmod(total, classes)
    cycle = total // np.gcd(total, omitted_count) if omitted_count else 1
    return batches, omitted_count, cycle


def nearest_classes(
    labels: Labels,
    *,
    classes: int,
    per_class: int,
    near: int = 3,
    neighbors: np.ndarray | None = None,
    seed: int,
    step: int,
) -> np.ndarray:
    """Draws P x K, where most classes of a batch are near another class of it.

    Every `near + 1` classes of a batch are one that `class_balanced` deals and the `near` classes
    nearest to it that the batch does not have yet. `neighbors [C n]` are the classes nearest to
    each class, nearest first, as positions in the sorted labels. The train loop searches them with
    the embeddings of the training images; before its first search (`neighbors=None`) a batch is
    one of `class_balanced`. K images of each class are drawn without repetition, unless the class
    has fewer.

    Classes that look alike in one batch: Smirnov et al., Doppelganger Mining for Face
    Representation Learning, ICCV Workshops 2017.
    """
    groups = group(labels)
    total = len(groups.count)
    classes = min(classes, total)
    check_batch(groups, classes, per_class)
    if near < 1:
        raise ValueError(f"near={near}: a class needs 1 or more classes near it")
    if neighbors is None:
        return class_balanced(groups, classes=classes, per_class=per_class, seed=seed, step=step)
    if np.ndim(neighbors) != 2 or len(neighbors) != total:
        raise ValueError(f"neighbors must be [{total} n], not {list(np.shape(neighbors))}")
    dealt = class_balanced(
        groups, classes=-(-classes // (near + 1)), per_class=1, seed=seed, step=step
    )
    names = groups.labels[groups.order[groups.start]]
    chosen = dict.fromkeys(np.searchsorted(names, groups.labels[dealt]).tolist())
    for c in list(chosen):
        others = [n for n in neighbors[c].tolist() if n not in chosen]
        chosen |= dict.fromkeys(others[: min(near, classes - len(chosen))])
    rng = base.generator(seed, base.NEAREST, step)
    # Classes whose neighbors are all in the batch leave places for any other class.
    missing = np.setdiff1d(np.arange(total), list(chosen))
    filled = [*chosen, *rng.permutation(missing)[: classes - len(chosen)].tolist()]
    images = [_some(groups.images(c), per_class, rng) for c in filled]
    return np.concatenate(images)


def _some(images: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `count` images in random order; each again only after all others."""
    orders = [rng.permutation(images) for _ in range(-(-count // len(images)))]
    return np.concatenate(orders)[:count]


def uniform(labels: Labels, *, batch_size: int, seed: int, step: int) -> np.ndarray:
    """Draws `batch_size` images of a shuffled epoch.

    A batch may contain the end of one epoch and the start of the next, so that no image is skipped.
    """
    n = len(group(labels).labels)
    if not 1 <= batch_size <= n:
        raise ValueError(
            f"uniform: batch_size is {batch_size}, but the training split has {n} images: set "
            f"--config.sampler.batch_size={n} or less"
        )
    positions = step * batch_size + np.arange(batch_size, dtype=np.int64)
    epochs, offsets = positions // n, positions % n
    return np.concatenate(
        [
            base.permutation(n, seed, base.UNIFORM, int(epoch))[offsets[epochs == epoch]]
            for epoch in np.unique(epochs)
        ]
    )
