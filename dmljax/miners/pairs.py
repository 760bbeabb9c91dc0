"""Miners that select pairs by their distances or by their position in the batch."""

from collections.abc import Callable

import jax.numpy as jnp

from dmljax.miners._common import Distances, batch_size, best, check, top, with_both_kinds
from dmljax.miners.selections import easiest, every, hardest, semihardest
from dmljax.ops import Array, Pairs, Scalar
from dmljax.ops.types import check_function

__all__ = [
    "across_halves",
    "batch_easy_hard",
    "batch_hard",
    "hardest_fraction",
    "multi_similarity",
    "next_in_batch",
    "pair_margin",
]

SelectFn = Callable[[Array, Array, Array], Array]


def multi_similarity(distances: Distances, pairs: Pairs, *, epsilon: Scalar = 0.1) -> Pairs:
    """Selects pairs that violate the order of an anchor's positives and negatives, up to a margin.

    A positive is kept if s < max_N(s) + epsilon, a negative if s > min_P(s) - epsilon, with cosines
    s, and the anchor's positives P and negatives N.

    Reference: Wang et al., Multi-Similarity Loss with General Pair Weighting for Deep Metric
    Learning, CVPR 2019, arXiv:1904.06627.

    Args:
        epsilon: Margin on the cosine: the larger, the more pairs are kept.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.multi_similarity(ops.unit_euclidean(x, x), pairs, epsilon=0.1)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [1, 2], [2, 1], [2, 3], [3, 2]]
    """
    distances, (positives, negatives) = check(distances, pairs)
    cosines = 1 - distances**2 / 2
    highest = jnp.max(cosines, axis=1, keepdims=True, where=negatives, initial=-jnp.inf)
    lowest = jnp.min(cosines, axis=1, keepdims=True, where=positives, initial=jnp.inf)
    return Pairs(
        positives & ~(cosines - epsilon >= highest), negatives & ~(cosines + epsilon <= lowest)
    )


def batch_hard(distances: Distances, pairs: Pairs) -> Pairs:
    """Selects the farthest positive and the nearest negative of every anchor that has both.

    Reference: Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person
    Re-Identification, 2017, arXiv:1703.07737.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.batch_hard(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    return batch_easy_hard(distances, pairs, pos_fn=hardest, neg_fn=hardest)


def batch_easy_hard(
    distances: Distances,
    pairs: Pairs,
    *,
    pos_fn: SelectFn = easiest,
    neg_fn: SelectFn = semihardest,
    allowed_pos_range: tuple[float, float] | None = None,
    allowed_neg_range: tuple[float, float] | None = None,
) -> Pairs:
    """Selects one positive and one negative of every anchor that has both.

    `selections.hardest` is the farthest positive or the nearest negative, `easiest` the nearest
    positive or the farthest negative. `semihardest` is the hardest one that keeps the order with
    the pair of the other kind: the nearest negative beyond the positive, or the farthest positive
    nearer than the negative. `every` keeps all pairs of a kind, also of anchors that have only this
    kind.

    Reference: Xuan, Stylianou and Pless, Improved Embeddings with Easy Positive Triplet Mining,
    WACV 2020, arXiv:1904.04370.

    Args:
        pos_fn: Selects the positives, a function of `miners.selections`. In a config its name.
        neg_fn: Selects the negatives. Beside `semihardest`, take `easiest` or `hardest`.
        allowed_pos_range: Lowest and highest distance of a positive; None allows all.
        allowed_neg_range: Lowest and highest distance of a negative; None allows all.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs, hardest = ops.pairs(np.array([0, 1, 0, 1])), miners.selections.hardest
    >>> mined = miners.batch_easy_hard(ops.unit_euclidean(x, x), pairs, neg_fn=hardest)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    select_fns = (pos_fn, neg_fn)
    for name, select_fn in zip(("pos_fn", "neg_fn"), select_fns, strict=True):
        check_function(name, select_fn, "miners.selections.hardest")
    if semihardest in select_fns and (pos_fn is neg_fn or every in select_fns):
        raise ValueError(
            "semihardest is relative to one pair of the other kind: the other of pos_fn and neg_fn "
            "must be easiest or hardest"
        )
    distances, (positives, negatives) = check(distances, pairs)
    positives = _in_range(positives, distances, allowed_pos_range)
    negatives = _in_range(negatives, distances, allowed_neg_range)

    def select_positives(limit):
        return pos_fn(distances, positives, limit)

    def select_negatives(limit):
        return neg_fn(-distances, negatives, limit)

    def distance_of_one(mask):
        return jnp.sum(distances, axis=1, where=mask, keepdims=True)

    no_limit = jnp.full((len(distances), 1), jnp.inf, distances.dtype)
    if pos_fn is semihardest:
        negatives = select_negatives(no_limit)
        positives = select_positives(distance_of_one(negatives))
    else:
        positives = select_positives(no_limit)
        negatives = select_negatives(-distance_of_one(positives))
    if every in select_fns:
        return Pairs(positives, negatives)
    return with_both_kinds(positives, negatives)


def pair_margin(
    distances: Distances, pairs: Pairs, *, pos_margin: Scalar = 0.2, neg_margin: Scalar = 0.8
) -> Pairs:
    """Selects positives farther than one margin, and negatives nearer than another.

    Args:
        pos_margin: Positives nearer than this are removed.
        neg_margin: Negatives farther than this are removed.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.pair_margin(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    distances, (positives, negatives) = check(distances, pairs)
    return Pairs(positives & ~(distances <= pos_margin), negatives & ~(distances >= neg_margin))


def hardest_fraction(distances: Distances, pairs: Pairs, *, fraction: float = 0.5) -> Pairs:
    """Selects the farthest positive pairs and the nearest negative pairs of the batch.

    The number of pairs is a fraction of all positive or negative pairs of the batch, rounded up; an
    anchor may have none.

    Reference: Yuan, Yang and Zhang, Hard-Aware Deeply Cascaded Embedding, ICCV 2017,
    arXiv:1611.05720.

    Args:
        fraction: The fraction to keep of each kind, from 0 to 1.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.hardest_fraction(ops.unit_euclidean(x, x), pairs, fraction=0.5)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be between 0 and 1, not {fraction}")
    distances, (positives, negatives) = check(distances, pairs)

    def hardest(scores, mask):
        # The factor keeps a rounding error from raising a whole number to the next one.
        count = jnp.ceil(fraction * (1 - 1e-6) * jnp.sum(mask))
        flat = top(scores.reshape(1, -1), mask.reshape(1, -1), count.astype(jnp.int32)[None])
        return flat.reshape(mask.shape)

    return Pairs(hardest(distances, positives), hardest(-distances, negatives))


def across_halves(distances: Distances, pairs: Pairs) -> Pairs:
    """Selects the pair of row i of the first half of the batch and row i of the second.

    Each pair is kept once, with its first row as anchor. With an odd number of rows, the last one
    is left out. Many tutorials pair shuffled batches like this. It takes no references.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.across_halves(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.positives).tolist()
    [[0, 2], [1, 3]]
    """
    distances, (positives, negatives) = check(distances, pairs)
    half = batch_size("across_halves", distances) // 2
    rows = jnp.arange(len(distances))
    partner = (rows[None, :] == rows[:, None] + half) & (rows < half)[:, None]
    return Pairs(positives & partner, negatives & partner)


def next_in_batch(distances: Distances, pairs: Pairs) -> Pairs:
    """Selects the first positive and the first negative that follow the anchor in the batch.

    Only anchors that have both are kept: one triplet per row, except for the last rows.
    It takes no references.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.next_in_batch(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 2]]
    """
    distances, pairs = check(distances, pairs)
    rows = jnp.arange(batch_size("next_in_batch", distances))
    later = rows[None, :] > rows[:, None]
    # Of equal distances, the first is the nearest.
    zeros = jnp.zeros_like(distances)
    positives, negatives = (best(zeros, mask & later, jnp.argmin) for mask in pairs)
    return with_both_kinds(positives, negatives)


def _in_range(mask, distances, limits):
    if limits is None:
        return mask
    low, high = limits
    return mask & ~(distances < low) & ~(distances > high)
