"""Losses that smooth a ranking metric, in O(b n) memory.

Every anchor is a query that ranks its references by cosine. `smooth_ap`, `recall_at_k` and `pnp`
loop over a query's positives (`ops.sum_over_true`), `fast_ap` and `histogram` over bins, computing
each bin again in the backward pass; nothing is scattered, so sums do not depend on the device's
order. Arguments are those of `dmljax.losses.pairs`; entries, for `reduce_fn`, are queries, and
negative pairs in `histogram`.

A miner that drops pairs drops them from the ranking: only what it keeps is ranked.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import Batch, prepare
from dmljax.ops import Array, Labels, MineFn, ReduceFn

__all__ = ["fast_ap", "histogram", "pnp", "recall_at_k", "smooth_ap"]

_cosine_distance = ops.unit(ops.dot)  # the negated cosine


def fast_ap(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    num_bins: int = 10,
    references: Float[Array, "n d"] | None = None,
    reference_labels: Labels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Average precision over a soft histogram of distances (Cakir et al., CVPR 2019).

    1 - (1 / |P_i|) sum_l h+_l H+_l / H_l per anchor with positives. h+ is the histogram of d^2 of
    the positives, on triangles around num_bins + 1 centres in [0, 4]; H+ and H are the cumulative
    ones of the positives and of all.
    """
    _check_bins(num_bins)
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    everyone = positives | negatives
    squares = ops.unit(ops.squared_euclidean)(batch.x, batch.y)

    @jax.checkpoint
    def count(centre):
        pulse = _triangle(squares, centre, 4 / num_bins)
        return jnp.sum(pulse, axis=1, where=positives), jnp.sum(pulse, axis=1, where=everyone)

    centres = jnp.linspace(0, 4, num_bins + 1, dtype=squares.dtype)
    of_positives, of_all = jax.lax.map(count, centres)  # [bins b]
    up_to = jnp.cumsum(of_all, axis=0)
    precision = jnp.cumsum(of_positives, axis=0) / jnp.where(up_to == 0, 1, up_to)  # NaN passes
    number = jnp.sum(positives, axis=1)
    average = ops.divide(jnp.sum(of_positives * precision, axis=0), number)
    return ops.reduce(reduce_fn, 1 - average, number > 0)


def smooth_ap(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    temperature: float = 0.01,
    references: Float[Array, "n d"] | None = None,
    reference_labels: Labels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Average precision with sigmoids for the comparisons (Brown et al., ECCV 2020).

    1 - mean_p (1 + sum_P sig) / (1 + sum_{P and N} sig) per anchor with positives, where sig =
    sigmoid((s_aj - s_ap) / temperature) and sums leave out p. As in the published code, an anchor
    in a batch that is its own reference is ranked too, as its own first positive. Classes may be of
    any size and order.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = _with_self(batch), batch.pairs.negatives

    def precision(column, valid, logits, positives, everyone):
        ahead, other = _ahead(logits, column)
        rank = 1 + jnp.sum(ahead, axis=1, where=everyone & other)
        rank_in_positives = 1 + jnp.sum(ahead, axis=1, where=positives & other)
        return jnp.where(valid, rank_in_positives / rank, 0)

    logits = -_cosine_distance(batch.x, batch.y) / temperature
    total = ops.sum_over_true(precision, positives, logits, positives, positives | negatives)
    number = jnp.sum(positives, axis=1)
    return ops.reduce(reduce_fn, 1 - ops.divide(total, number), number > 0)


def recall_at_k(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    ks: tuple[int, ...] = (1, 2, 4, 8, 16),
    rank_temperature: float = 1.0,
    k_temperature: float = 0.01,
    references: Float[Array, "n d"] | None = None,
    reference_labels: Labels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Recall@k with sigmoids for both its comparisons (Patel et al., CVPR 2022).

    1 - mean_k min(k, sum_P sigmoid((k - r_p) / rank_temperature)) / min(k, |P|) per anchor with
    positives, where r_p = 1 + sum_{z != p} sigmoid((s_qz - s_qp) / k_temperature). min(k, |P|), the
    most that can be found among k, is the published code's divisor: dividing by |P| would leave a
    loss, though no better ranking, where |P| > k. Unlike there, the query itself is not ranked.
    """
    if len(ks) == 0 or min(ks) < 1:
        raise ValueError(f"ks must be one or more numbers from 1, not {ks}")
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs

    def found(column, valid, logits, everyone, ks):
        ahead, other = _ahead(logits, column)
        rank = 1 + jnp.sum(ahead, axis=1, where=everyone & other)
        inside = jax.nn.sigmoid((ks - rank[:, None]) / rank_temperature)  # [b k]
        return jnp.where(valid[:, None], inside, 0)

    logits = -_cosine_distance(batch.x, batch.y) / k_temperature
    ks = jnp.asarray(ks, logits.dtype)[None, :]
    total = ops.sum_over_true(found, positives, logits, positives | negatives, ks)
    number = jnp.sum(positives, axis=1)
    recall = ops.divide(jnp.minimum(total, ks), jnp.minimum(number[:, None], ks))
    return ops.reduce(reduce_fn, 1 - jnp.mean(recall, axis=1), number > 0)


def pnp(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    b: float = 2.0,
    alpha: float = 1.0,
    temperature: float = 0.01,
    variant: str = "O",
    references: Float[Array, "n d"] | None = None,
    reference_labels: Labels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Penalises the negatives ranked before each positive (Li et al., AAAI 2022).

    mean_p f(R_p) per anchor with positives, R_p = sum_N sigmoid((s_an - s_ap) / temperature).
    `variant` names f: O: R; Ds: log(1 + R); Dq: 1 - (1 + R)^-alpha; Iu: (1 + R) log(1 + R); Ib:
    (b R - log(1 + b R)) / b^2. As in the published code, an anchor in a batch that is its own
    reference is one more positive of itself.
    """
    penalties = {
        "O": lambda ahead: ahead,
        "Ds": jnp.log1p,
        "Dq": lambda ahead: -jnp.expm1(-alpha * jnp.log1p(ahead)),
        "Iu": lambda ahead: (1 + ahead) * jnp.log1p(ahead),
        "Ib": lambda ahead: (b * ahead - jnp.log1p(b * ahead)) / b**2,
    }
    if variant not in penalties:
        raise ValueError(f"variant {variant!r} does not exist; there are {', '.join(penalties)}")
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = _with_self(batch), batch.pairs.negatives

    def penalty(column, valid, logits, negatives):
        ahead = jnp.sum(_ahead(logits, column)[0], axis=1, where=negatives)
        return jnp.where(valid, penalties[variant](ahead), 0)

    logits = -_cosine_distance(batch.x, batch.y) / temperature
    total = ops.sum_over_true(penalty, positives, logits, negatives)
    number = jnp.sum(positives, axis=1)
    return ops.reduce(reduce_fn, ops.divide(total, number), number > 0)


def histogram(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    num_bins: int = 100,
    references: Float[Array, "n d"] | None = None,
    reference_labels: Labels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """P(a positive pair is less alike than a negative one) (Ustinova & Lempitsky, NeurIPS 2016).

    sum_r h-_r cumsum(h+)_r, soft histograms of the cosines of unordered pairs on num_bins + 1 nodes
    in [-1, 1]. That is the mean over negative pairs of the share of positives below them, which are
    the entries. A pair counts if one of its ends has both kinds of pairs.
    """
    _check_bins(num_bins)
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    both = jnp.any(positives, axis=1) & jnp.any(negatives, axis=1)
    positives, negatives = positives & both[:, None], negatives & both[:, None]
    if batch.own:  # every unordered pair twice, which leaves shares and means as they are
        positives, negatives = positives | positives.T, negatives | negatives.T
    cosines = -_cosine_distance(batch.x, batch.y)
    pulse = jax.checkpoint(functools.partial(_triangle, width=2 / num_bins))
    nodes = jnp.linspace(-1, 1, num_bins + 1, dtype=cosines.dtype)

    mass = jax.lax.map(lambda node: jnp.sum(pulse(cosines, node), where=positives), nodes)
    below = jnp.cumsum(ops.divide(mass, jnp.sum(positives)))  # [bins]

    @jax.checkpoint
    def term(node, share):
        return pulse(cosines, node) * share

    # The checkpoint leaves out the running total, or every bin would keep a copy of it.
    shares, _ = jax.lax.scan(
        lambda total, bin: (total + term(*bin), None), jnp.zeros_like(cosines), (nodes, below)
    )
    return ops.reduce(reduce_fn, shares, negatives)


# --- pieces -------------------------------------------------------------------------------------


def _check_bins(num_bins: int) -> None:
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, not {num_bins}")


def _triangle(values, centre, width):
    return jax.nn.relu(1 - jnp.abs(values - centre) / width)


def _with_self(batch: Batch) -> jax.Array:
    """The positives and, where the batch is its own reference, every anchor that has some."""
    positives = batch.pairs.positives
    if not batch.own:
        return positives
    some = jnp.any(positives, axis=1, keepdims=True)
    return positives | (jnp.eye(len(positives), dtype=bool) & some)


def _ahead(logits, column):
    """How far each reference stands before the one in `column`, 0 to 1; and which are others."""
    own = jnp.take_along_axis(logits, column[:, None], axis=1)
    return jax.nn.sigmoid(logits - own), jnp.arange(logits.shape[1])[None, :] != column[:, None]
