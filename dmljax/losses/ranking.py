"""Losses that smooth a ranking metric, in O(b n) memory.

Arguments are as in `dmljax.losses.pairs`. Every anchor is a query that ranks the references by
their cosine. Only pairs that a miner keeps are ranked.

`smooth_ap`, `recall_at_k` and `pnp` loop over a query's positives (`ops.sum_over_true`). `fast_ap`
and `histogram` loop over bins and compute each bin again in the backward pass. No loop scatters,
so sums are added in the same order on every device.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses import pnp_penalties
from dmljax.losses._arguments import PAIR_ARGUMENTS, describe
from dmljax.losses._common import Batch, prepare
from dmljax.ops import Array, Labels, MineFn, ReduceFn, ReferenceLabels, Scalar

__all__ = ["fast_ap", "histogram", "pnp", "recall_at_k", "smooth_ap"]


@describe(PAIR_ARGUMENTS)
def fast_ap(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    num_bins: int = 10,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """FastAP: one minus average precision over a soft histogram of distances.

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
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    ranked = positives | negatives
    squares = ops.unit(ops.squared_euclidean)(batch.anchors, batch.references)
    positive_counts, counts = _bin_counts(squares, positives, ranked, num_bins)  # [bins b]
    cumulative = jnp.cumsum(counts, axis=0)
    # A NaN count is not 0, so it passes.
    precision = jnp.cumsum(positive_counts, axis=0) / jnp.where(cumulative == 0, 1, cumulative)
    number = jnp.sum(positives, axis=1)
    average_precision = ops.divide(jnp.sum(positive_counts * precision, axis=0), number)
    return ops.reduce(reduce_fn, 1 - average_precision, number > 0)


@describe(PAIR_ARGUMENTS)
def smooth_ap(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    temperature: Scalar = 0.01,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Smooth-AP: one minus average precision, with sigmoids for the comparisons.

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
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = _positives_with_self(batch), batch.pairs.negatives

    def precision(column, valid, logits, positives, ranked):
        ahead, other = _ahead(logits, column)
        rank = 1 + jnp.sum(ahead, axis=1, where=ranked & other)
        rank_in_positives = 1 + jnp.sum(ahead, axis=1, where=positives & other)
        return jnp.where(valid, rank_in_positives / rank, 0)

    logits = batch.cosines() / temperature
    total = ops.sum_over_true(precision, positives, logits, positives, positives | negatives)
    number = jnp.sum(positives, axis=1)
    return ops.reduce(reduce_fn, 1 - ops.divide(total, number), number > 0)


@describe(PAIR_ARGUMENTS)
def recall_at_k(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    ks: tuple[int, ...] = (1, 2, 4, 8, 16),
    rank_temperature: Scalar = 1.0,
    k_temperature: Scalar = 0.01,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """One minus recall at k, with sigmoids for both comparisons, averaged over `ks`.

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
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs

    def is_within_k(column, valid, logits, ranked, k_row):
        ahead, other = _ahead(logits, column)
        rank = 1 + jnp.sum(ahead, axis=1, where=ranked & other)
        within = jax.nn.sigmoid((k_row - rank[:, None]) / rank_temperature)  # [b k]
        return jnp.where(valid[:, None], within, 0)

    logits = batch.cosines() / k_temperature
    k_row = jnp.asarray(ks, logits.dtype)[None, :]
    total = ops.sum_over_true(is_within_k, positives, logits, positives | negatives, k_row)
    number = jnp.sum(positives, axis=1)
    recall = ops.divide(jnp.minimum(total, k_row), jnp.minimum(number[:, None], k_row))
    return ops.reduce(reduce_fn, 1 - jnp.mean(recall, axis=1), number > 0)


@describe(PAIR_ARGUMENTS)
def pnp(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    temperature: Scalar = 0.01,
    penalty_fn: Callable[[Array], Array] = pnp_penalties.o,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """PNP: penalizes the negatives that rank ahead of each positive.

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
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = _positives_with_self(batch), batch.pairs.negatives

    def penalty(column, valid, logits, negatives):
        ahead = jnp.sum(_ahead(logits, column)[0], axis=1, where=negatives)
        return jnp.where(valid, penalty_fn(ahead), 0)

    logits = batch.cosines() / temperature
    total = ops.sum_over_true(penalty, positives, logits, negatives)
    number = jnp.sum(positives, axis=1)
    return ops.reduce(reduce_fn, ops.divide(total, number), number > 0)


@describe(PAIR_ARGUMENTS)
def histogram(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    num_bins: int = 100,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Histogram loss: the probability that a positive pair is less alike than a negative one.

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
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    has_both_kinds = (jnp.any(positives, axis=1) & jnp.any(negatives, axis=1))[:, None]
    positives, negatives = positives & has_both_kinds, negatives & has_both_kinds
    if batch.within_batch:
        # Every unordered pair now counts twice, which does not change shares and means.
        positives, negatives = positives | positives.T, negatives | negatives.T
    cosines = batch.cosines()
    return ops.reduce(reduce_fn, _shares_below(cosines, positives, num_bins), negatives)


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
    """The soft histograms of `fast_ap`, of the positives and of all ranked pairs: [bins b]."""

    @jax.checkpoint
    def bin_counts(center):
        weights = _triangle(squares, center, 4 / num_bins)
        return jnp.sum(weights, axis=1, where=positives), jnp.sum(weights, axis=1, where=ranked)

    return jax.lax.map(bin_counts, jnp.linspace(0, 4, num_bins + 1, dtype=squares.dtype))


@functools.partial(jax.jit, static_argnums=2)
def _shares_below(cosines, positives, num_bins):
    """The share of positive pairs below each cosine, by soft histograms: [b n]."""
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
    """The positives; of a batch that is compared with itself, also the anchors that have any."""
    positives = batch.pairs.positives
    if not batch.within_batch:
        return positives
    has_positive = jnp.any(positives, axis=1, keepdims=True)
    return positives | (jnp.eye(len(positives), dtype=bool) & has_positive)


def _ahead(logits, column):
    """How far each reference ranks ahead of the one in `column`, from 0 to 1; and whether it is
    another reference."""
    ahead = jax.nn.sigmoid(logits - ops.take_column(logits, column))
    return ahead, jnp.arange(logits.shape[1])[None, :] != column[:, None]
