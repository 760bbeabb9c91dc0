"""Miners: which pairs or triplets of a batch a loss uses.

Every miner is `(distances [b n], pairs, *, ...) -> ops.Pairs` and is passed to a loss as `mine_fn`.
Bind its hyper-parameters with `functools.partial`:

    losses.triplet(x, labels, mine_fn=partial(miners.triplet_margin, kind="semihard"))

* `distances` are Euclidean distances of unit embeddings, not squared, whatever the loss itself
  measures. With s the cosine, d = sqrt(2 - 2 s).
* `pairs` are the masks of positives and negatives. A miner only removes pairs.
* `triplet_margin` and `angular` select triplets and return `ops.Triplets`, which hold a rule
  instead of b n n masks.
* No gradient flows through the selection, and no shape depends on the data.
* Of equal candidates, the first is taken. A pair whose distance is NaN is kept, so that the loss
  becomes NaN.
* Miners that draw take a JAX `key`; the same key gives the same draw. For a new key in every step,
  use `jax.random.fold_in(key, step)`.
* `across_halves` and `next_in_batch` select by a row's position, so the order of the batch matters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from dmljax import ops
from dmljax.ops import Array, Pairs, Triplets

__all__ = [
    "across_halves",
    "angular",
    "batch_easy_hard",
    "batch_hard",
    "distance_weighted",
    "hardest_fraction",
    "multi_similarity",
    "next_in_batch",
    "pair_margin",
    "triplet_margin",
    "uniform_histogram",
]

# Conditions are written as what must not hold, such as `~(d > margin)`, which is True for NaN.


def multi_similarity(
    distances: Float[Array, "b n"], pairs: Pairs, *, epsilon: float = 0.1
) -> Pairs:
    """Pairs that violate the order of an anchor's positives and negatives, up to a margin.

    A positive is kept if s < max_N(s) + epsilon, a negative if s > min_P(s) - epsilon, with cosines
    s, and the anchor's positives P and negatives N.

    Reference: Wang et al., Multi-Similarity Loss with General Pair Weighting for Deep Metric
    Learning, CVPR 2019, arXiv:1904.06627.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        epsilon: Margin on the cosine: the larger, the more pairs are kept.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.multi_similarity(ops.unit_euclidean(x, x), pairs, epsilon=0.1)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [1, 2], [2, 1], [2, 3], [3, 2]]
    """
    distances, (positives, negatives) = _check(distances, pairs)
    cosines = 1 - distances**2 / 2
    highest = jnp.max(cosines, axis=1, keepdims=True, where=negatives, initial=-jnp.inf)
    lowest = jnp.min(cosines, axis=1, keepdims=True, where=positives, initial=jnp.inf)
    return Pairs(
        positives & ~(cosines - epsilon >= highest), negatives & ~(cosines + epsilon <= lowest)
    )


def batch_hard(distances: Float[Array, "b n"], pairs: Pairs) -> Pairs:
    """The farthest positive and the nearest negative of every anchor that has both.

    Reference: Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person
    Re-Identification, 2017, arXiv:1703.07737.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.batch_hard(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    return batch_easy_hard(distances, pairs, pos="hard", neg="hard")


_STRATEGIES = ("easy", "semihard", "hard", "all")


def batch_easy_hard(
    distances: Float[Array, "b n"],
    pairs: Pairs,
    *,
    pos: str = "easy",
    neg: str = "semihard",
    allowed_pos_range: tuple[float, float] | None = None,
    allowed_neg_range: tuple[float, float] | None = None,
) -> Pairs:
    """One positive and one negative of every anchor that has both, by two strategies.

    "hard" is the farthest positive or the nearest negative, "easy" the nearest positive or the
    farthest negative. "semihard" is the hardest one that keeps the order with the pair of the other
    kind: the nearest negative beyond the positive, or the farthest positive nearer than the
    negative. "all" keeps every pair of a kind, also of anchors that have only this kind.

    Reference: Xuan, Stylianou and Pless, Improved Embeddings with Easy Positive Triplet Mining,
    WACV 2020, arXiv:1904.04370.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        pos: Strategy of the positives: "easy", "semihard", "hard" or "all".
        neg: Strategy of the negatives. If one is "semihard", the other is "easy" or "hard".
        allowed_pos_range: Lowest and highest distance of a positive; None allows all.
        allowed_neg_range: Lowest and highest distance of a negative; None allows all.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.batch_easy_hard(ops.unit_euclidean(x, x), pairs, neg="hard")
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    for name, strategy in (("pos", pos), ("neg", neg)):
        if strategy not in _STRATEGIES:
            raise ValueError(
                f"{name}={strategy!r} does not exist; there are {', '.join(_STRATEGIES)}"
            )
    if "semihard" in (pos, neg) and (pos == neg or "all" in (pos, neg)):
        raise ValueError(
            f"pos={pos!r}, neg={neg!r}: semihard is relative to one pair of the other kind, so the "
            "other must be easy or hard"
        )
    distances, (positives, negatives) = _check(distances, pairs)
    positives = _in_range(positives, distances, allowed_pos_range)
    negatives = _in_range(negatives, distances, allowed_neg_range)

    def select(strategy, candidates, hardest, easiest):
        if strategy == "all":
            return candidates
        return _best(distances, candidates, easiest if strategy == "easy" else hardest)

    if pos == "semihard":
        negatives = select(neg, negatives, jnp.argmin, jnp.argmax)
        d_an = jnp.sum(distances, axis=1, where=negatives, keepdims=True)
        positives = _best(distances, positives & ~(distances >= d_an), jnp.argmax)
    else:
        positives = select(pos, positives, jnp.argmax, jnp.argmin)
        if neg == "semihard":
            d_ap = jnp.sum(distances, axis=1, where=positives, keepdims=True)
            negatives = negatives & ~(distances <= d_ap)
        negatives = select(neg, negatives, jnp.argmin, jnp.argmax)
    if "all" in (pos, neg):
        return Pairs(positives, negatives)
    return _with_both_kinds(positives, negatives)


def pair_margin(
    distances: Float[Array, "b n"],
    pairs: Pairs,
    *,
    pos_margin: float = 0.2,
    neg_margin: float = 0.8,
) -> Pairs:
    """Positives farther than one margin, and negatives nearer than another.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        pos_margin: Positives nearer than this are removed.
        neg_margin: Negatives farther than this are removed.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.pair_margin(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    distances, (positives, negatives) = _check(distances, pairs)
    return Pairs(positives & ~(distances <= pos_margin), negatives & ~(distances >= neg_margin))


def hardest_fraction(
    distances: Float[Array, "b n"], pairs: Pairs, *, fraction: float = 0.5
) -> Pairs:
    """The farthest positive pairs and the nearest negative pairs of the batch.

    The number of pairs is a fraction of all positive or negative pairs of the batch, rounded up; an
    anchor may have none.

    Reference: Yuan, Yang and Zhang, Hard-Aware Deeply Cascaded Embedding, ICCV 2017,
    arXiv:1611.05720.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        fraction: The fraction to keep of each kind, from 0 to 1.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.hardest_fraction(ops.unit_euclidean(x, x), pairs, fraction=0.5)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 0], [2, 3], [3, 2]]
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be between 0 and 1, not {fraction}")
    distances, (positives, negatives) = _check(distances, pairs)

    def hardest(scores, mask):
        # The factor keeps a rounding error from raising a whole number to the next one.
        count = jnp.ceil(fraction * (1 - 1e-6) * jnp.sum(mask))
        flat = _top(scores.reshape(1, -1), mask.reshape(1, -1), count.astype(jnp.int32)[None])
        return flat.reshape(mask.shape)

    return Pairs(hardest(distances, positives), hardest(-distances, negatives))


def distance_weighted(
    distances: Float[Array, "b n"],
    pairs: Pairs,
    *,
    key: PRNGKeyArray,
    dim: int,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float = 1.4,
) -> Pairs:
    """As many negatives per anchor as it has positives, drawn evenly over distances.

    Weights are 1 / q(max(d, cutoff)), where q(d) = d^(dim - 2) (1 - d^2 / 4)^((dim - 3) / 2) is the
    density of distances between random points of the unit sphere. Negatives are distinct. All
    positives of an anchor that draws are kept.

    Reference: Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, arXiv:1706.07567.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        key: JAX key of the draw.
        dim: Dimensions of the embeddings.
        cutoff: Distances below this have the weight of this distance.
        nonzero_loss_cutoff: Negatives farther than this are not drawn.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.distance_weighted, key=jax.random.key(0), dim=2)
    >>> print(f"{losses.margin(x, np.array([0, 0, 1, 1]), mine_fn=mine_fn):.3f}")
    0.506
    """
    if dim < 2:
        raise ValueError(f"dim, the dimensions of the embeddings, must be at least 2, not {dim}")
    distances, (positives, negatives) = _check(distances, pairs)
    squares = jnp.maximum(distances, cutoff) ** 2
    negatives = negatives & ~(distances >= nonzero_loss_cutoff) & ~(squares >= 4)
    squares = jnp.where(negatives, squares, 1)
    log_weights = (1 - dim / 2) * jnp.log(squares) + (1.5 - dim / 2) * jnp.log1p(-squares / 4)
    # The k largest of log weight + Gumbel noise are k draws by weight, without replacement.
    scores = log_weights + jax.random.gumbel(key, distances.shape, distances.dtype)
    drawn = _top(scores, negatives, jnp.sum(positives, axis=1, dtype=jnp.int32))
    return Pairs(positives & _any(drawn), drawn)


def uniform_histogram(
    distances: Float[Array, "b n"],
    pairs: Pairs,
    *,
    key: PRNGKeyArray,
    num_bins: int = 100,
    pos_per_bin: int = 10,
    neg_per_bin: int = 10,
) -> Pairs:
    """Distinct pairs drawn from bins of distance, up to the same number from every bin.

    Bins have equal width, from the smallest to the largest distance of the kind.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        key: JAX key of the draw.
        num_bins: Number of bins for each kind.
        pos_per_bin: At most this many positive pairs per bin.
        neg_per_bin: At most this many negative pairs per bin.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.uniform_histogram, key=jax.random.key(0))
    >>> print(f"{losses.contrastive(x, np.array([0, 0, 1, 1]), mine_fn=mine_fn):.3f}")
    0.738
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, not {num_bins}")
    distances, (positives, negatives) = _check(distances, pairs)

    def bins(mask):
        low = jnp.min(distances, where=mask, initial=jnp.inf)
        width = (jnp.max(distances, where=mask, initial=-jnp.inf) - low) / num_bins
        position = (distances - low) / jnp.where(width > 0, width, 1)
        position = jnp.where(mask & (width > 0), position, 0)
        return jnp.clip(position.astype(jnp.int32), 0, num_bins - 1)

    # Bins of the positives, bins of the negatives, and one last bin for all other pairs. Taking the
    # pair with the largest random number from every bin, again and again, is much cheaper than
    # sorting the numbers, and a maximum does not depend on the order in which it is computed.
    ignored = 2 * num_bins
    negative_bins = jnp.where(negatives, num_bins + bins(negatives), ignored)
    bin_of_pair = jnp.where(positives, bins(positives), negative_bins).ravel()
    quota = jnp.where(bin_of_pair < num_bins, pos_per_bin, neg_per_bin)
    numbers = (jax.random.bits(key, bin_of_pair.shape, jnp.uint32) >> 1).astype(jnp.int32)
    index = jnp.arange(bin_of_pair.size, dtype=jnp.int32)

    def draw(i, drawn):
        largest = jax.ops.segment_max(jnp.where(drawn, -1, numbers), bin_of_pair, ignored + 1)
        ties = ~drawn & (numbers == largest[bin_of_pair])
        first = jax.ops.segment_min(jnp.where(ties, index, index.size), bin_of_pair, ignored + 1)
        return drawn | ((index == first[bin_of_pair]) & (i < quota))

    drawn = jnp.zeros(bin_of_pair.shape, bool)
    drawn = jax.lax.fori_loop(0, max(pos_per_bin, neg_per_bin), draw, drawn)
    drawn = drawn.reshape(distances.shape) | jnp.isnan(distances)
    return Pairs(positives & drawn, negatives & drawn)


def across_halves(distances: Float[Array, "b b"], pairs: Pairs) -> Pairs:
    """The pair of row i of the first half of the batch and row i of the second, for every i.

    Each pair is kept once, with its first row as anchor. With an odd number of rows, the last one
    is left out. Many tutorials pair shuffled batches like this.

    Args:
        distances: Euclidean distances of unit embeddings, of a batch that is compared with itself.
        pairs: The positives and negatives to select from.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.across_halves(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.positives).tolist()
    [[0, 2], [1, 3]]
    """
    distances, (positives, negatives) = _check(distances, pairs)
    half = _batch_size("across_halves", distances) // 2
    rows = jnp.arange(len(distances))
    partner = (rows[None, :] == rows[:, None] + half) & (rows < half)[:, None]
    return Pairs(positives & partner, negatives & partner)


def next_in_batch(distances: Float[Array, "b b"], pairs: Pairs) -> Pairs:
    """The first positive and the first negative that follow the anchor in the batch.

    Only anchors that have both are kept: one triplet per row, except for the last rows.

    Args:
        distances: Euclidean distances of unit embeddings, of a batch that is compared with itself.
        pairs: The positives and negatives to select from.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> pairs = ops.pairs(np.array([0, 1, 0, 1]))
    >>> mined = miners.next_in_batch(ops.unit_euclidean(x, x), pairs)
    >>> np.argwhere(mined.negatives).tolist()
    [[0, 1], [1, 2]]
    """
    distances, pairs = _check(distances, pairs)
    rows = jnp.arange(_batch_size("next_in_batch", distances))
    later = rows[None, :] > rows[:, None]
    # Of equal distances, the first is the nearest.
    zeros = jnp.zeros_like(distances)
    positives, negatives = (_best(zeros, mask & later, jnp.argmin) for mask in pairs)
    return _with_both_kinds(positives, negatives)


_KINDS = ("all", "hard", "semihard", "easy")


def triplet_margin(
    distances: Float[Array, "b n"], pairs: Pairs, *, margin: float = 0.2, kind: str = "all"
) -> Triplets:
    """Triplets by their gap g = d_an - d_ap between negative and positive.

    "hard": g <= 0; "semihard": 0 < g <= margin; "all": g <= margin; "easy": g > margin.

    Reference: Schroff et al., FaceNet: A Unified Embedding for Face Recognition and Clustering,
    CVPR 2015, arXiv:1503.03832.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        margin: Margin of the gap.
        kind: "all", "hard", "semihard" or "easy".

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.triplet_margin, kind="hard")
    >>> print(f"{losses.triplet(x, np.array([0, 1, 0, 1]), mine_fn=mine_fn):.3f}")
    0.744
    """
    if kind not in _KINDS:
        raise ValueError(f"kind={kind!r} does not exist; there are {', '.join(_KINDS)}")
    distances, pairs = _check(distances, pairs)

    def select(d_ap, d_an, d_pn):
        gap = d_an - d_ap
        if kind == "easy":
            return ~(gap <= margin)
        violating = ~(gap > margin)
        if kind == "hard":
            return violating & ~(gap > 0)
        return violating & ~(gap <= 0) if kind == "semihard" else violating

    return Triplets(pairs, distances, select)


def angular(distances: Float[Array, "b n"], pairs: Pairs, *, angle: float = 20.0) -> Triplets:
    """Triplets whose angle at the negative exceeds an angle.

    atan(d_ap / (2 |n - c|)) > angle, with c the middle of anchor and positive, and
    4 |n - c|^2 = 2 d_an^2 + 2 d_pn^2 - d_ap^2. This needs distances between references, so the
    batch must be compared with itself.

    Reference: Wang et al., Deep Metric Learning with Angular Loss, ICCV 2017, arXiv:1708.01682.

    Args:
        distances: Euclidean distances of unit embeddings.
        pairs: The positives and negatives to select from.
        angle: In degrees, between 0 and 90.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.angular, angle=20)
    >>> print(f"{losses.triplet(x, np.array([0, 1, 0, 1]), mine_fn=mine_fn):.3f}")
    0.744
    """
    if not 0 < angle < 90:
        raise ValueError(f"angle is in degrees between 0 and 90, not {angle}")
    distances, pairs = _check(distances, pairs)
    _batch_size("angular", distances)
    tan_squared = float(np.tan(np.deg2rad(angle)) ** 2)
    # Three points that are equal, up to rounding, have no angle.
    rounding = float((4 * jnp.finfo(distances.dtype).eps) ** 2)

    def select(d_ap, d_an, d_pn):
        medians = 2 * d_an**2 + 2 * d_pn**2 - d_ap**2
        return ~(d_ap**2 <= tan_squared * jnp.maximum(medians, 0) + rounding)

    return Triplets(pairs, distances, select)


def _check(distances, pairs) -> tuple[jax.Array, Pairs]:
    distances = jax.lax.stop_gradient(ops.widen(distances))
    pairs = Pairs(*map(jnp.asarray, pairs))
    for name, mask in zip(Pairs._fields, pairs, strict=True):
        if mask.shape != distances.shape or mask.dtype != jnp.bool_:
            raise ValueError(
                f"{name} must be bool {list(distances.shape)} as the distances are, not "
                f"{mask.dtype} {list(mask.shape)}"
            )
    return distances, pairs


def _batch_size(miner: str, distances) -> int:
    """The number of rows of a batch that is compared with itself. Raises for another batch."""
    b, n = distances.shape
    if b != n:
        raise ValueError(
            f"{miner} works without references only: distances must be [b b], not {[b, n]}"
        )
    return b


def _any(mask):
    return jnp.any(mask, axis=1, keepdims=True)


def _with_both_kinds(positives, negatives) -> Pairs:
    """The pairs of the anchors that have positives and negatives."""
    has_both_kinds = _any(positives) & _any(negatives)
    return Pairs(positives & has_both_kinds, negatives & has_both_kinds)


def _in_range(mask, distances, limits):
    if limits is None:
        return mask
    low, high = limits
    return mask & ~(distances < low) & ~(distances > high)


def _best(distances, candidates, best_fn):
    """The one of each row's candidates that `best_fn`, `jnp.argmin` or `jnp.argmax`, selects."""
    worst = -jnp.inf if best_fn is jnp.argmax else jnp.inf
    column = best_fn(jnp.where(candidates, distances, worst), axis=1)
    return candidates & (jnp.arange(distances.shape[1])[None, :] == column[:, None])


def _top(scores, where, count):
    """Mask of the `count [r]` largest of the `scores [r m]` in each row of `where`.

    NaN is larger than all numbers; of equal scores, the first are taken. The threshold is found bit
    by bit, in as many passes as a float has bits. On all devices that is much faster than sorting.
    """
    bits = 8 * scores.dtype.itemsize
    unsigned = jnp.dtype(f"uint{bits}")
    sign, largest = unsigned.type(1 << (bits - 1)), np.iinfo(unsigned).max
    scores_without_minus_0 = jnp.where(scores == 0, 0, scores)
    keys = jax.lax.bitcast_convert_type(scores_without_minus_0, unsigned)
    keys = jnp.where(keys >= sign, ~keys, keys | sign)  # the order of the floats
    keys = jnp.where(jnp.isnan(scores), unsigned.type(largest), keys)
    keys = jnp.where(where, keys, 0)  # less than the key of -inf
    count = count[:, None]

    def refine(i, threshold):
        trial = threshold | (sign >> i.astype(unsigned))
        return jnp.where(jnp.sum(keys >= trial, axis=1, keepdims=True) >= count, trial, threshold)

    threshold = jax.lax.fori_loop(0, bits, refine, jnp.zeros(count.shape, unsigned))
    above, ties = where & (keys > threshold), where & (keys == threshold)
    missing = count - jnp.sum(above, axis=1, keepdims=True)
    return above | (ties & (jnp.cumsum(ties, axis=1) <= missing))
