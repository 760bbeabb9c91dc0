"""Miners: which pairs or triplets of a batch a loss should see.

Every miner is `(distances [b n], pairs, *, ...) -> ops.Pairs`, masks in and masks out, and goes to
a loss as `mine_fn`. Hyper-parameters are bound with `functools.partial`:

    losses.triplet(x, labels, mine_fn=partial(miners.triplet_margin, kind="semihard"))

* `distances` are Euclidean distances between unit embeddings, not squared. That is what every loss
  hands to its miner, whatever it measures itself; the cosine is then s = 1 - d^2 / 2.
* `pairs` are the positives and negatives to choose from. A miner only ever takes some away.
* No gradient flows through the choice, and no shape depends on the data.
* Of equals, the first counts. A row without a choice has no pairs left.
* A pair whose distance is NaN is kept, so that the loss shows it.
* `triplet_margin` and `angular` choose triplets: they return `ops.Triplets`, a rule rather than
  b n n masks.
* `halves` and `following` choose by a row's place in the batch alone, so its order matters there.
* Miners that draw take a `key`, the same key the same draw: a fresh one every step is
  `jax.random.fold_in(key, step)`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from dmljax import ops
from dmljax.ops import Array, Pairs, Triplets

__all__ = [
    "angular",
    "batch_easy_hard",
    "batch_hard",
    "distance_weighted",
    "following",
    "halves",
    "hardest_fraction",
    "multi_similarity",
    "pair_margin",
    "triplet_margin",
    "uniform_histogram",
]

# Conditions are written as what must not hold, `~(d > margin)`: a NaN then passes.


def multi_similarity(
    distances: Float[Array, "b n"], pairs: Pairs, *, epsilon: float = 0.1
) -> Pairs:
    """Pairs that overlap the anchor's other kind, up to `epsilon` (Wang et al., CVPR 2019).

    On cosines: positives below the highest negative + epsilon, negatives above the lowest positive
    - epsilon.
    """
    distances, (positives, negatives) = _check(distances, pairs)
    cosines = 1 - distances**2 / 2
    highest = jnp.max(cosines, axis=1, keepdims=True, where=negatives, initial=-jnp.inf)
    lowest = jnp.min(cosines, axis=1, keepdims=True, where=positives, initial=jnp.inf)
    return Pairs(
        positives & ~(cosines - epsilon >= highest), negatives & ~(cosines + epsilon <= lowest)
    )


def batch_hard(distances: Float[Array, "b n"], pairs: Pairs) -> Pairs:
    """The farthest positive and the nearest negative of every anchor (Hermans et al., 2017)."""
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
    """One positive and one negative per anchor (Xuan et al., WACV 2020).

    A positive is easy if nearest, hard if farthest; a negative the other way round. Semihard is the
    hardest that does not break the order of the one chosen from the other kind: a negative beyond
    the positive, a positive nearer than the negative. An anchor counts if it has one of each;
    "all", which takes every pair of a kind, lifts that. Ranges (low, high) limit the distances.
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
    positives = _within(positives, distances, allowed_pos_range)
    negatives = _within(negatives, distances, allowed_neg_range)

    def choose(strategy, candidates, hardest, easiest):
        if strategy == "all":
            return candidates
        return _one(distances, candidates, easiest if strategy == "easy" else hardest)

    if pos == "semihard":
        negatives = choose(neg, negatives, jnp.argmin, jnp.argmax)
        d_an = jnp.sum(distances, axis=1, where=negatives, keepdims=True)
        positives = _one(distances, positives & ~(distances >= d_an), jnp.argmax)
    else:
        positives = choose(pos, positives, jnp.argmax, jnp.argmin)
        if neg == "semihard":
            d_ap = jnp.sum(distances, axis=1, where=positives, keepdims=True)
            negatives = negatives & ~(distances <= d_ap)
        negatives = choose(neg, negatives, jnp.argmin, jnp.argmax)
    if "all" in (pos, neg):
        return Pairs(positives, negatives)
    both = _any(positives) & _any(negatives)
    return Pairs(positives & both, negatives & both)


def pair_margin(
    distances: Float[Array, "b n"],
    pairs: Pairs,
    *,
    pos_margin: float = 0.2,
    neg_margin: float = 0.8,
) -> Pairs:
    """Positives farther than one margin, negatives nearer than another."""
    distances, (positives, negatives) = _check(distances, pairs)
    return Pairs(positives & ~(distances <= pos_margin), negatives & ~(distances >= neg_margin))


def hardest_fraction(
    distances: Float[Array, "b n"], pairs: Pairs, *, fraction: float = 0.5
) -> Pairs:
    """The hardest share of all positive and of all negative pairs (HDC, Yuan et al., ICCV 2017).

    Shares are of the batch, not of an anchor, and rounded up.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction is a share between 0 and 1, not {fraction}")
    distances, (positives, negatives) = _check(distances, pairs)

    def hardest(scores, mask):
        # A rounding error must not turn a whole number into the next one.
        share = jnp.ceil(fraction * (1 - 1e-6) * jnp.sum(mask))
        flat = _top(scores.reshape(1, -1), mask.reshape(1, -1), share.astype(jnp.int32)[None])
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
    """Negatives drawn evenly over distances (Wu et al., ICCV 2017).

    Weights are 1 / q(max(d, cutoff)), with q(d) = d^(dim - 2) (1 - d^2 / 4)^((dim - 3) / 2) the
    density of distances on the sphere in `dim` dimensions, the width of the embeddings. Every
    anchor draws as many distinct negatives nearer than `nonzero_loss_cutoff` as it has positives.
    """
    if dim < 2:
        raise ValueError(f"dim is the width of the embeddings and at least 2, not {dim}")
    distances, (positives, negatives) = _check(distances, pairs)
    squares = jnp.maximum(distances, cutoff) ** 2
    negatives = negatives & ~(distances >= nonzero_loss_cutoff) & ~(squares >= 4)
    squares = jnp.where(negatives, squares, 1)
    log_weights = (1 - dim / 2) * jnp.log(squares) + (1.5 - dim / 2) * jnp.log1p(-squares / 4)
    # The largest of log weight + Gumbel noise is a draw by weight, the largest k are k of them
    # without putting back.
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
    """As many pairs of every distance: up to so many distinct ones drawn from each bin.

    Bins are of equal width between the smallest and the largest distance of the kind.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, not {num_bins}")
    distances, (positives, negatives) = _check(distances, pairs)

    def bins(mask):
        low = jnp.min(distances, where=mask, initial=jnp.inf)
        width = (jnp.max(distances, where=mask, initial=-jnp.inf) - low) / num_bins
        place = (distances - low) / jnp.where(width > 0, width, 1)
        place = jnp.where(mask & (width > 0), place, 0)
        return jnp.clip(place.astype(jnp.int32), 0, num_bins - 1)

    # Both kinds at once; pairs of neither are a last bin. The largest of each bin's random numbers,
    # again and again, is much cheaper than to sort them, and a maximum does not depend on order.
    neither = 2 * num_bins
    other = jnp.where(negatives, num_bins + bins(negatives), neither)
    bucket = jnp.where(positives, bins(positives), other).ravel()
    quota = jnp.where(bucket < num_bins, pos_per_bin, neg_per_bin)
    chance = (jax.random.bits(key, bucket.shape, jnp.uint32) >> 1).astype(jnp.int32)
    index = jnp.arange(bucket.size, dtype=jnp.int32)

    def draw(i, drawn):
        best = jax.ops.segment_max(jnp.where(drawn, -1, chance), bucket, neither + 1)
        hits = ~drawn & (chance == best[bucket])
        first = jax.ops.segment_min(jnp.where(hits, index, index.size), bucket, neither + 1)
        return drawn | ((index == first[bucket]) & (i < quota))

    drawn = jnp.zeros(bucket.shape, bool)
    drawn = jax.lax.fori_loop(0, max(pos_per_bin, neg_per_bin), draw, drawn)
    drawn = drawn.reshape(distances.shape) | jnp.isnan(distances)
    return Pairs(positives & drawn, negatives & drawn)


def halves(distances: Float[Array, "b b"], pairs: Pairs) -> Pairs:
    """Row i of the first half of the batch with row i of the second, each pair once.

    What tutorials do with shuffled batches; of an odd batch, the last row is left out.
    """
    distances, (positives, negatives) = _check(distances, pairs)
    half = _own("halves", distances) // 2
    rows = jnp.arange(len(distances))
    partner = (rows[None, :] == rows[:, None] + half) & (rows < half)[:, None]
    return Pairs(positives & partner, negatives & partner)


def following(distances: Float[Array, "b b"], pairs: Pairs) -> Pairs:
    """The first positive and the first negative that come after the anchor in the batch.

    An anchor counts if it has both: one triplet for each row, save the last few.
    """
    distances, pairs = _check(distances, pairs)
    rows = jnp.arange(_own("following", distances))
    later, zeros = rows[None, :] > rows[:, None], jnp.zeros_like(distances)
    positives, negatives = (_one(zeros, mask & later, jnp.argmin) for mask in pairs)
    both = _any(positives) & _any(negatives)
    return Pairs(positives & both, negatives & both)


_KINDS = ("all", "hard", "semihard", "easy")


def triplet_margin(
    distances: Float[Array, "b n"], pairs: Pairs, *, margin: float = 0.2, kind: str = "all"
) -> Triplets:
    """Triplets by their gap g = d_an - d_ap (Schroff et al., CVPR 2015, and what became of it).

    hard: g <= 0; semihard: 0 < g <= margin; all: g <= margin; easy: g > margin.
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
    """Triplets whose angle at the negative exceeds `angle` degrees (Wang et al., ICCV 2017).

    tan(angle) = d_ap / (2 |n - c|), with c the middle of anchor and positive. By the median formula
    4 |n - c|^2 = 2 d_an^2 + 2 d_pn^2 - d_ap^2, so this needs distances between references too: the
    batch must be its own reference.
    """
    if not 0 < angle < 90:
        raise ValueError(f"angle is in degrees between 0 and 90, not {angle}")
    distances, pairs = _check(distances, pairs)
    _own("angular", distances)
    slope = float(np.tan(np.deg2rad(angle)) ** 2)
    # Three points that are one, up to rounding, have no angle.
    noise = float((4 * jnp.finfo(distances.dtype).eps) ** 2)

    def select(d_ap, d_an, d_pn):
        medians = 2 * d_an**2 + 2 * d_pn**2 - d_ap**2
        return ~(d_ap**2 <= slope * jnp.maximum(medians, 0) + noise)

    return Triplets(pairs, distances, select)


# --- pieces -------------------------------------------------------------------------------------


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


def _own(name, distances) -> int:
    """The size of a batch that is its own reference."""
    b, n = distances.shape
    if b != n:
        raise ValueError(
            f"{name} needs a batch that is its own reference: distances must be [b b], not {[b, n]}"
        )
    return b


def _any(mask):
    return jnp.any(mask, axis=1, keepdims=True)


def _within(mask, distances, limits):
    if limits is None:
        return mask
    low, high = limits
    return mask & ~(distances < low) & ~(distances > high)


def _one(distances, candidates, best_fn):
    """Of each row's candidates, the one that `best_fn`, an argmin or argmax, picks."""
    worst = -jnp.inf if best_fn is jnp.argmax else jnp.inf
    column = best_fn(jnp.where(candidates, distances, worst), axis=1)
    return candidates & (jnp.arange(distances.shape[1])[None, :] == column[:, None])


def _top(scores, where, count):
    """The `count [r]` largest `scores [r m]` of each row that count, NaN before all, first of ties.

    The threshold is found bit by bit, in as many passes as a float has bits: on all devices that
    is far quicker than to sort.
    """
    bits = 8 * scores.dtype.itemsize
    unsigned = jnp.dtype(f"uint{bits}")
    sign, largest = unsigned.type(1 << (bits - 1)), np.iinfo(unsigned).max
    keys = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0, scores), unsigned)  # no -0
    keys = jnp.where(keys >= sign, ~keys, keys | sign)  # unsigned integers in the floats' order
    keys = jnp.where(jnp.isnan(scores), unsigned.type(largest), keys)
    keys = jnp.where(where, keys, 0)  # below -inf
    count = count[:, None]

    def refine(i, threshold):
        trial = threshold | (sign >> i.astype(unsigned))
        return jnp.where(jnp.sum(keys >= trial, axis=1, keepdims=True) >= count, trial, threshold)

    threshold = jax.lax.fori_loop(0, bits, refine, jnp.zeros(count.shape, unsigned))
    above, ties = where & (keys > threshold), where & (keys == threshold)
    left = count - jnp.sum(above, axis=1, keepdims=True)
    return above | (ties & (jnp.cumsum(ties, axis=1) <= left))
