"""Losses that smooth a ranking metric, in O(b n) memory.

Arguments are as in `dmljax.losses.pairs`. Every anchor is a query that ranks the references by
their cosine. Only pairs that a miner keeps are ranked.

`smooth_ap`, `recall_at_k` and `pnp` loop over a query's positives (`ops.sum_over_true`). `fast_ap`
and `histogram` loop over bins and compute each bin again in the backward pass. No loop scatters,
so sums are added in the same order on every device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.losses import pnp_penalties
from dmljax.losses._common import Batch, pair_loss
from dmljax.ops import Array, Scalar
from dmljax.ops.fold import Sum, count

__all__ = ["fast_ap", "histogram", "pnp", "recall_at_k", "smooth_ap"]

# Positives of each row that are ranked at a time in tiles. A tile of `smooth_ap` has this number of
# sigmoids for each pair.
_RANKED_AT_ONCE = 4


@pair_loss(ops.mean)
def fast_ap(batch: Batch, *, num_bins: int = 10) -> Array:
    """Computes FastAP: one minus average precision over a soft histogram of distances.

        1 - (1 / |P|) sum_l h+_l H+_l / H_l

    per anchor that has positives P. h+ is the histogram of the squared distances of the positives,
    with triangular weights on num_bins + 1 centers from 0 to 4; H+ and H are the cumulative
    histograms of the positives and of all pairs.

    Reference: Cakir et al., Deep Metric Learning to Rank, CVPR 2019.

    Args:
        num_bins: Number of bins.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.fast_ap(x, np.array([0, 1, 0, 1])):.3f}")
    0.583
    """
    _check_bins(num_bins)
    positives, negatives = batch.pairs
    ranked = positives | negatives
    squares = ops.unit(ops.squared_euclidean)(batch.anchors, batch.references)
    positive_counts, counts = _bin_counts(squares, positives, ranked, num_bins)  # [bins b]
    cumulative = jnp.cumsum(counts, axis=0)
    # A NaN count is not 0, so it passes.
    precision = jnp.cumsum(positive_counts, axis=0) / jnp.where(cumulative == 0, 1, cumulative)
    number = jnp.sum(positives, axis=1)
    average_precision = ops.divide(jnp.sum(positive_counts * precision, axis=0), number)
    return batch.reduce(1 - average_precision, number > 0)


@pair_loss(ops.mean, in_tiles=True)
def smooth_ap(batch: Batch, *, temperature: Scalar = 0.01) -> Array:
    """Computes Smooth-AP: one minus average precision, with sigmoids for the comparisons.

        1 - mean_p (1 + sum_P sigmoid_pj) / (1 + sum_{P and N} sigmoid_pj)

    per anchor that has positives P, with negatives N, sigmoid_pj = sigmoid((s_j - s_p) /
    temperature) and cosines s; sums leave out p. As in the published code, a batch that is
    compared with itself also ranks the anchor, as one more positive. Classes may have any size.

    Reference: Brown et al., Smooth-AP: Smoothing the Path Towards Large-Scale Image Retrieval, ECCV
    2020, arXiv:2007.12163.

    Args:
        temperature: The lower, the closer to the true ranks, and the fewer pairs get a gradient.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.smooth_ap(x, np.array([0, 1, 0, 1])):.3f}")
    0.208
    """

    def precision(ranks, valid):
        rank_in_positives, rank = ranks
        return jnp.sum(jnp.where(valid, rank_in_positives / rank, 0), axis=1)

    total, number = _sum_over_positives(precision, batch, temperature, with_self=True, kinds=2)
    return batch.reduce(1 - ops.divide(total, number), number > 0)


@pair_loss(ops.mean, in_tiles=True)
def recall_at_k(
    batch: Batch,
    *,
    ks: tuple[int, ...] = (1, 2, 4, 8, 16),
    rank_temperature: Scalar = 1.0,
    k_temperature: Scalar = 0.01,
) -> Array:
    """Computes one minus recall at k, with sigmoids for both comparisons, averaged over `ks`.

        1 - mean_k min(k, sum_P sigmoid((k - r_p) / rank_temperature)) / min(k, |P|)

    per anchor that has positives P, with the soft rank r_p = 1 + sum_{j != p} sigmoid((s_j - s_p) /
    k_temperature) and cosines s. As in the published code, the divisor is min(k, |P|), the most
    that k places can hold. Unlike there, the query itself is not ranked.

    Reference: Patel, Tolias and Matas, Recall@k Surrogate Loss with Large Batches and Similarity
    Mixup, CVPR 2022, arXiv:2108.11179.

    Args:
        ks: The values of k.
        rank_temperature: Temperature of the comparison of rank and k.
        k_temperature: Temperature of the comparison of similarities.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.recall_at_k(x, np.array([0, 1, 0, 1])):.3f}")
    0.324
    """
    check_ks(ks)
    k_row = jnp.asarray(ks, batch.anchors.dtype)[None, :]

    def within_k(ranks, valid, k_row, rank_temperature):
        gaps = k_row[:, None, :] - ranks[-1][:, :, None]  # [b m k]
        within = jax.nn.sigmoid(gaps / rank_temperature)
        return jnp.sum(jnp.where(valid[:, :, None], within, 0), axis=1)

    total, number = _sum_over_positives(within_k, batch, k_temperature, k_row, rank_temperature)
    recall = ops.divide(jnp.minimum(total, k_row), jnp.minimum(number[:, None], k_row))
    return batch.reduce(1 - jnp.mean(recall, axis=1), number > 0)


@pair_loss(ops.mean)
def pnp(
    batch: Batch,
    *,
    temperature: Scalar = 0.01,
    penalty_fn: Callable[[Array], Array] = pnp_penalties.o,
) -> Array:
    """Computes PNP: penalizes the negatives that rank ahead of each positive.

        mean_p f(R_p) with R_p = sum_N sigmoid((s_n - s_p) / temperature)

    per anchor that has positives, with negatives N and cosines s. As in the published code, a batch
    that is compared with itself also ranks the anchor, as one more positive.

    Reference: Li et al., Rethinking the Optimization of Average Precision: Only Penalizing Negative
    Instances before Positive Ones is Enough, AAAI 2022, arXiv:2102.04640.

    Args:
        temperature: The lower, the closer R_p to the number of negatives ahead.
        penalty_fn: The function f, one of `losses.pnp_penalties`. In a config its name.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.pnp(x, np.array([0, 1, 0, 1])):.3f}")
    0.750
    """
    positives, negatives = _positives_with_self(batch), batch.pairs.negatives

    def penalty(column, valid, logits, negatives):
        ahead = jnp.sum(_ahead(logits, column)[0], axis=1, where=negatives)
        return jnp.where(valid, penalty_fn(ahead), 0)

    logits = batch.cosines() / temperature
    total = ops.sum_over_true(penalty, positives, logits, negatives)
    number = jnp.sum(positives, axis=1)
    return batch.reduce(ops.divide(total, number), number > 0)


@pair_loss(ops.mean)
def histogram(batch: Batch, *, num_bins: int = 100) -> Array:
    """Computes the histogram loss: the probability that a positive is less alike than a negative.

        sum_r h-_r sum_{q <= r} h+_q

    with soft histograms h+ and h- of the cosines of all positive and all negative pairs: triangular
    weights on num_bins + 1 nodes from -1 to 1. Unordered pairs count once. Only anchors that have
    both kinds of pairs count. Entries are negative pairs: the share of positive pairs below each.

    Reference: Ustinova and Lempitsky, Learning Deep Embeddings with Histogram Loss, NeurIPS 2016,
    arXiv:1611.00822.

    Args:
        num_bins: Number of bins.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.histogram(x, np.array([0, 1, 0, 1])):.3f}")
    0.750
    """
    _check_bins(num_bins)
    positives, negatives = batch.pairs
    has_both_kinds = (jnp.any(positives, axis=1) & jnp.any(negatives, axis=1))[:, None]
    positives, negatives = positives & has_both_kinds, negatives & has_both_kinds
    if batch.within_batch:
        # Every unordered pair now counts twice, which does not change shares and means.
        positives, negatives = positives | positives.T, negatives | negatives.T
    cosines = batch.cosines()
    return batch.reduce(_shares_below(cosines, positives, num_bins), negatives)


def check_ks(ks: Sequence[int]) -> None:
    """Raises unless the values of k are numbers from 1."""
    if len(ks) == 0 or min(ks) < 1:
        raise ValueError(f"ks must be one or more numbers from 1, not {ks}")


def _check_bins(num_bins: int) -> None:
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, not {num_bins}")


# Functions of their own, so that calls outside of `jax.jit` compile their loops once.
@functools.partial(jax.jit, static_argnums=3)
def _bin_counts(squares, positives, ranked, num_bins):
    """Computes the soft histograms of `fast_ap`, of positives and of all ranked pairs: [bins b]."""

    @jax.checkpoint
    def bin_counts(center):
        weights = _triangle(squares, center, 4 / num_bins)
        return jnp.sum(weights, axis=1, where=positives), jnp.sum(weights, axis=1, where=ranked)

    return jax.lax.map(bin_counts, jnp.linspace(0, 4, num_bins + 1, dtype=squares.dtype))


@functools.partial(jax.jit, static_argnums=2)
def _shares_below(cosines, positives, num_bins):
    """Computes the fraction of positive pairs below each cosine, by soft histograms: [b n]."""
    weights = jax.checkpoint(functools.partial(_triangle, width=2 / num_bins))
    nodes = jnp.linspace(-1, 1, num_bins + 1, dtype=cosines.dtype)

    counts = jax.lax.map(lambda node: jnp.sum(weights(cosines, node), where=positives), nodes)
    share_below_node = jnp.cumsum(ops.divide(counts, jnp.sum(positives)))  # [bins]

    @jax.checkpoint
    def term(node, share):
        return weights(cosines, node) * share

    # The checkpoint does not contain the running total, or every bin would store a copy of it.
    return jax.lax.scan(
        lambda total, bin: (total + term(*bin), None),
        jnp.zeros_like(cosines),
        (nodes, share_below_node),
    )[0]


def _triangle(values, center, width):
    return jax.nn.relu(1 - jnp.abs(values - center) / width)


def _positives_with_self(batch: Batch) -> Array:
    """Returns the positives, and within a batch also the anchors that have any."""
    positives = batch.pairs.positives
    if not batch.within_batch:
        return positives
    has_positive = jnp.any(positives, axis=1, keepdims=True)
    return positives | (jnp.eye(len(positives), dtype=bool) & has_positive)


def _ahead(logits, column):
    """Returns how far each reference ranks ahead of the one in `column`, from 0 to 1.

    Also marks the references other than that one.
    """
    ahead = jax.nn.sigmoid(logits - ops.take_column(logits, column))
    return ahead, jnp.arange(logits.shape[1])[None, :] != column[:, None]


def _sum_over_positives(
    fn: Callable, batch: Batch, temperature: Scalar, *params: Any, with_self=False, kinds: int = 1
) -> tuple[Array, Array]:
    """Returns for each row the sum over its positives of `fn` of their soft ranks, and their count.

    `fn(ranks, valid, *params)` gets the ranks of m positives `[b m]` among all pairs (`kinds=2`:
    after those among the positives), and which of them exist. `with_self` counts a row of a batch
    that is compared with itself as one more of its positives, if it has any.
    """
    with_self = with_self and batch.within_batch
    if batch.tile is not None:
        return _sum_in_tiles(fn, batch, temperature, params, with_self, kinds)
    positives = _positives_with_self(batch) if with_self else batch.pairs.positives

    def of_round(column, valid, logits, masks, params):
        ahead, other = _ahead(logits, column)
        ranks = [1 + jnp.sum(ahead, axis=1, where=mask & other)[:, None] for mask in masks]
        return fn(ranks, valid[:, None], *params)

    logits = batch.cosines() / temperature
    masks = (positives, positives | batch.pairs.negatives)[-kinds:]
    total = ops.sum_over_true(of_round, positives, logits, masks, params)
    return total, jnp.sum(positives, axis=1)


def _sum_in_tiles(fn, batch, temperature, params, with_self, kinds):
    """Numbers the positives within their class, and ranks the next few of all rows in each round.

    A round takes the logits of these positives from the tiles, then compares them with all columns.
    """
    if batch.rows.labels.ndim != 1:
        raise ValueError(
            f"labels {list(batch.rows.labels.shape)} are multi-hot: in tiles, this loss takes one "
            "label for each row. Leave out tile"
        )

    within_batch, tile = batch.within_batch, batch.tile

    def numbers(block):
        earlier = block.columns.positions[None, :] < block.rows.positions[:, None]
        return (count(block.pairs.positives & earlier),)

    def positives_of(block):
        positives, negatives = block.pairs
        if with_self:
            is_itself = block.rows.where[:, None] & block.columns.where[None, :]
            is_itself &= block.same_positions()
            positives = positives | (is_itself & block.rows.extra[0][:, None])
        return positives, positives | negatives

    def of_round(i, valid, rows, columns, temperature, has_positive, number_in_class, params):
        batch = Batch(rows, rows if within_batch else columns, tile=tile)
        of_round = i[0] * _RANKED_AT_ONCE + jnp.arange(_RANKED_AT_ONCE)

        def logits_of(block, temperature, of_round):
            logits, (positives, _) = block.cosines() / temperature, positives_of(block)
            selected = [positives & (block.columns.extra == k)[None, :] for k in of_round]
            return *(Sum(logits, s) for s in selected), *map(count, selected)

        def ahead(block, temperature):
            logits, masks = block.cosines() / temperature, positives_of(block)[-kinds:]
            ahead = [jax.nn.sigmoid(logits - ranked[:, None]) for ranked in block.rows.extra[1]]
            return [Sum(a, mask) for mask in masks for a in ahead]

        sides = {"of_rows": (has_positive,), "of_columns": number_in_class}
        results = batch.fold(logits_of, temperature, of_round, **sides)
        logits, exists = jnp.array_split(jnp.stack(results), 2)  # [m b]
        sums = batch.fold(ahead, temperature, of_rows=(has_positive, tuple(logits)))
        # A positive is half ahead of itself, which does not count.
        ranks = [0.5 + rank.T for rank in jnp.array_split(jnp.stack(sums), kinds)]
        return fn(ranks, exists.T > 0, *params)

    rows, columns = batch.rows, batch.columns
    (number,) = batch.fold(lambda block: (count(block.pairs.positives),))
    (number_in_class,) = Batch(columns, columns, tile=tile).fold(numbers)
    number_in_class = number_in_class.astype(jnp.int32)
    last = jnp.max(jnp.where(columns.where, number_in_class, 0))
    firsts = jnp.arange(0, len(columns.where), _RANKED_AT_ONCE)
    operands = (None if within_batch else columns), temperature, number > 0, number_in_class, params
    total = ops.sum_over_true(of_round, (firsts <= last)[None, :], rows, *operands)
    return total, number + (number > 0) if with_self else number
