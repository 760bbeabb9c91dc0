"""Batches of classes that the net still confuses."""

import numpy as np

from dmljax.data.sampling import draws
from dmljax.data.sampling.balanced import class_balanced
from dmljax.data.sampling.groups import Labels, check_batch, group


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
    """P x K, where most classes of a batch are near another class of it.

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
    rng = draws.generator(seed, draws.NEAREST, step)
    # Classes whose neighbors are all in the batch leave places for any other class.
    missing = np.setdiff1d(np.arange(total), list(chosen))
    filled = [*chosen, *rng.permutation(missing)[: classes - len(chosen)].tolist()]
    images = [_some(groups.images(c), per_class, rng) for c in filled]
    return np.concatenate(images)


def _some(images: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` of the images in random order; each again only after all others."""
    orders = [rng.permutation(images) for _ in range(-(-count // len(images)))]
    return np.concatenate(orders)[:count]
