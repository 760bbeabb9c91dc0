"""Batches made of pairs of images: DVML's and ABE's."""

import numpy as np

from dmljax.data.sampling import draws
from dmljax.data.sampling.groups import Labels, group


def n_pairs(labels: Labels, *, classes: int = 64, seed: int, step: int) -> np.ndarray:
    """DVML's batch for the N-pair loss: two images of each class, all anchors, then all positives.

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
    rng = draws.generator(seed, draws.N_PAIRS, step)
    chosen = rng.choice(candidates, classes, replace=False)
    pairs = [rng.choice(groups.images(int(c)), 2, replace=False) for c in chosen]
    return np.stack(pairs, axis=1).reshape(-1)


def abe_pairs(labels: Labels, *, batch_size: int = 64, seed: int, step: int) -> np.ndarray:
    """ABE's batch: `batch_size / 2` random images, then a partner for each of them, in order.

    The first `batch_size / 4` partners have the class of their image, the others have another
    class. (The sentence in the paper can be read in two ways; both have as many positive as
    negative pairs.)
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
    rng = draws.generator(seed, draws.ABE_PAIRS, step)
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
