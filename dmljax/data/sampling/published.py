"""The samplers of published systems: graph attention, DVML and ABE."""

import functools

import numpy as np

from dmljax.data.sampling import base
from dmljax.data.sampling.base import Groups, Labels, check_batch, group

__all__ = ["abe_pairs", "class_chunks", "n_pairs", "random_class_count"]


def class_chunks(
    labels: Labels, *, classes: int, per_class: int, seed: int, step: int
) -> np.ndarray:
    """Draws `classes` chunks of `per_class` images of one class (CombineSampler).

    Once per epoch, the images of every class are cut into chunks. The last chunk is filled up (or a
    full chunk is added) with images drawn again. Then all chunks are shuffled. So a batch may
    contain two chunks of one class, or an image twice; `class_balanced` does neither.
    """
    groups = group(labels)
    check_batch(groups, classes, per_class)
    epoch, batch = divmod(step, chunks_epoch_length(groups, classes=classes, per_class=per_class))
    return _epoch(groups, classes, per_class, seed, epoch)[batch]


def chunks_epoch_length(groups: Groups, *, classes: int, per_class: int) -> int:
    """Returns the number of batches in an epoch of `class_chunks`."""
    chunks = np.maximum(groups.count, per_class) // per_class + 1
    return -(-int(chunks.sum()) // classes)


def random_class_count(labels: Labels, *, batch_size: int = 54, seed: int, step: int) -> np.ndarray:
    """Draws how many classes share a batch in each epoch (NumberSampler, used for CUB).

    The candidates are the divisors of `batch_size` from 2 to `batch_size / 2` that the number of
    classes allows, all equally likely. The epoch is then one of `class_chunks`.
    """
    groups = group(labels)
    shapes = _shapes(groups, batch_size)
    epochs = step // int(_lengths(groups, shapes).min()) + 1
    # Epochs differ in length, so the epoch of a step follows from the ends of all earlier epochs.
    ends = class_count_epoch_ends(groups, batch_size=batch_size, seed=seed, epochs=epochs)
    epoch = int(np.searchsorted(ends, step, side="right"))
    start_step = int(ends[epoch - 1]) if epoch else 0
    shape = shapes[_drawn_shapes(len(shapes), seed, epochs)[epoch]]
    return _epoch(groups, *shape, seed, epoch)[step - start_step]


def class_count_epoch_ends(
    groups: Groups, *, batch_size: int = 54, seed: int, epochs: int
) -> np.ndarray:
    """Returns the steps after which the first epochs of `random_class_count` end, `[epochs]`."""
    shapes = _shapes(groups, batch_size)
    lengths = _lengths(groups, shapes)
    return np.cumsum(lengths[_drawn_shapes(len(shapes), seed, epochs)])


def _shapes(groups: Groups, batch_size: int) -> list[tuple[int, int]]:
    """Lists the possible (classes, images per class) of a batch of `random_class_count`."""
    shapes = [
        (classes, batch_size // classes)
        for classes in range(2, batch_size // 2 + 1)
        if batch_size % classes == 0 and classes <= len(groups.count)
    ]
    if not shapes or batch_size > len(groups.order):
        raise ValueError(
            f"random_class_count: a batch of {batch_size} images cannot be divided among 2 or more "
            f"of the {len(groups.count)} classes with {len(groups.order)} images of the training "
            "split: "
            "set another --config.sampler.batch_size, or --config.sampler=class_balanced"
        )
    return shapes


def _lengths(groups: Groups, shapes: list[tuple[int, int]]) -> np.ndarray:
    """Returns the number of batches in an epoch of each shape."""
    return np.array([chunks_epoch_length(groups, classes=p, per_class=k) for p, k in shapes])


def _drawn_shapes(shapes: int, seed: int, epochs: int) -> np.ndarray:
    """Draws the index of the shape of each of the first `epochs` epochs, `[epochs]`."""
    return (base.generator(seed, base.CLASS_COUNT).random(epochs) * shapes).astype(np.int64)


@functools.lru_cache(4)
def _epoch(groups: Groups, classes: int, per_class: int, seed: int, epoch: int) -> np.ndarray:
    """Draws all batches of an epoch of `class_chunks`, `[steps classes * per_class]`."""
    rng = base.generator(seed, base.CHUNKS, epoch)
    chunks_by_class = []
    for c in range(len(groups.count)):
        images = rng.permutation(groups.images(c))
        if len(images) < per_class:
            repeated_images = rng.choice(groups.images(c), per_class - len(images), replace=True)
            images = np.concatenate([images, repeated_images])
        missing = (len(images) // per_class + 1) * per_class - len(images)
        images = np.concatenate([images, rng.choice(images, missing, replace=False)])
        chunks_by_class.append(images.reshape(-1, per_class))
    chunks = rng.permutation(np.concatenate(chunks_by_class))
    if missing := -len(chunks) % classes:
        repeated = chunks[rng.choice(len(chunks), missing, replace=False)]
        chunks = np.concatenate([chunks, repeated])
    return chunks.reshape(-1, classes * per_class)


def n_pairs(labels: Labels, *, classes: int = 64, seed: int, step: int) -> np.ndarray:
    """Draws DVML's batch for the N-pair loss: one image of each class, then a second of each.

    As published, every step draws its classes independently. Classes with one image are never
    drawn.
    """
    groups = group(labels)
    candidates = np.flatnonzero(groups.count > 1)
    if not 1 <= classes <= len(candidates):
        raise ValueError(
            f"n_pairs: the sampler needs {classes} classes with two images, but the training split "
            f"has {len(candidates)}: set --config.sampler.classes={len(candidates)}"
        )
    rng = base.generator(seed, base.N_PAIRS, step)
    chosen = rng.choice(candidates, classes, replace=False)
    pairs = [rng.choice(groups.images(int(c)), 2, replace=False) for c in chosen]
    return np.stack(pairs, axis=1).reshape(-1)


def abe_pairs(labels: Labels, *, batch_size: int = 64, seed: int, step: int) -> np.ndarray:
    """Draws ABE's batch: `batch_size / 2` random images, then a partner of each, in order.

    The first `batch_size / 4` partners have the class of their image, the others have another
    class. (The sentence in the paper can be read in two ways; both give equal counts of positive
    and negative pairs.)
    """
    groups = group(labels)
    n, pair_count = len(groups.order), batch_size // 2
    no_pairs = len(groups.count) < 2 or groups.count.max() < 2
    if batch_size < 4 or batch_size % 4 or pair_count > n or no_pairs:
        raise ValueError(
            f"abe_pairs: --config.sampler.batch_size={batch_size} must be a multiple of 4 and at "
            f"most {2 * n}, and the training split must have two classes, one of them with two "
            "images"
        )
    rng = base.generator(seed, base.ABE_PAIRS, step)
    # Positions are sorted by class, so that a partner is a draw from a range with one gap.
    class_of_position = np.repeat(np.arange(len(groups.count)), groups.count)
    candidates = np.flatnonzero(groups.count[class_of_position] > 1)
    positive_count = pair_count // 2
    if len(candidates) < positive_count:
        raise ValueError(
            f"abe_pairs: {positive_count} images need a partner of their class, but only "
            f"{len(candidates)} have one: set --config.sampler.batch_size="
            f"{4 * len(candidates)} or less"
        )
    anchors = rng.choice(candidates, positive_count, replace=False)
    remaining = np.setdiff1d(np.arange(n), anchors)
    other_anchors = rng.choice(remaining, pair_count - positive_count, replace=False)
    start, count = (a[class_of_position[anchors]] for a in (groups.start, groups.count))
    draw = start + rng.integers(count - 1)
    positives = draw + (draw >= anchors)
    start, count = (a[class_of_position[other_anchors]] for a in (groups.start, groups.count))
    draw = rng.integers(n - count)
    negatives = np.where(draw >= start, draw + count, draw)
    return groups.order[np.concatenate([anchors, other_anchors, positives, negatives])]
