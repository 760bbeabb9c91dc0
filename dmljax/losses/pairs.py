"""Losses over pairs of one batch, or of a batch and references.

Every loss is `f(embeddings [b d], labels, *, ...) -> scalar` and shares these arguments:

* `labels`: int `[b]`, multi-hot bool `[b c]` (sharing a class makes a positive), or `ops.Pairs`.
* `references [n d]`, `reference_labels`: what the anchors are compared with. Without them it is the
  batch itself, and no row is its own positive.
* `where [b]`: rows that count. Masking a row equals dropping it.
* `mine_fn(distances, pairs) -> pairs`: a miner, see `dmljax.miners`; it reads the Euclidean
  distances of the unit embeddings, whatever the loss itself measures.
* `reduce_fn`: see `dmljax.ops`; None returns the entries, 0 where they do not count.
* `distance_fn(x, y)`: what the loss measures; `ops.unit_euclidean` normalises, `ops.euclidean` and
  `ops.squared_euclidean` do not.

Notation: s is the cosine, d the distance; P_i and N_i are the positives and negatives of anchor i.
lse is log-sum-exp, and lse of nothing is 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import Batch, prepare
from dmljax.ops import Array, DistanceFn, Labels, MineFn, ReduceFn, ReferenceLabels

__all__ = [
    "circle",
    "contrastive",
    "generalized_lifted_structure",
    "intra_pair_variance",
    "lifted_structure",
    "multi_similarity",
    "n_pairs",
    "nca",
    "ntxent",
    "ranked_list",
    "snr_contrastive",
    "supcon",
    "threshold_consistent_margin",
    "tuplet_margin",
]

_unit_snr = ops.unit(ops.snr)


def contrastive(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    power: float = 1.0,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean_of_active,
) -> Float[Array, "..."]:
    """Pulls positives inside one margin, pushes negatives past another (Hadsell et al., 2006).

    reduce([d - pos_margin]+^power over P) + reduce([neg_margin - d]+^power over N). The paper has
    `power=2`; 1 is what most code uses.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    distances = distance_fn(batch.x, batch.y)
    pull = jax.nn.relu(distances - pos_margin)
    push = jax.nn.relu(neg_margin - distances)
    if power != 1:
        pull, push = pull**power, push**power
    positives, negatives = batch.pairs
    return ops.reduce(reduce_fn, pull, positives) + ops.reduce(reduce_fn, push, negatives)


def snr_contrastive(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    pos_margin: float = 0.0,
    neg_margin: float = 1.0,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean_of_active,
) -> Float[Array, "..."]:
    """`contrastive` on the inverse signal-to-noise ratio `ops.snr` (Yuan et al., CVPR 2019)."""
    return contrastive(
        embeddings,
        labels,
        pos_margin=pos_margin,
        neg_margin=neg_margin,
        distance_fn=_unit_snr,
        references=references,
        reference_labels=reference_labels,
        where=where,
        mine_fn=mine_fn,
        reduce_fn=reduce_fn,
    )


def multi_similarity(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Soft maxima of both kinds of pairs around one threshold (Wang et al., CVPR 2019).

    log(1 + sum_P exp(-alpha (s - base))) / alpha + log(1 + sum_N exp(beta (s - base))) / beta,
    averaged over all anchors; a half without pairs is 0.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    over = _cosines(batch) - base
    pull = _log_1_plus_sum_exp(-alpha * over, positives) / alpha
    push = _log_1_plus_sum_exp(beta * over, negatives) / beta
    return ops.reduce(reduce_fn, pull + push, batch.where)


def ntxent(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    temperature: float = 0.07,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Cross-entropy of each positive against the anchor's negatives (Sohn 2016; Chen et al. 2020).

    -log(exp(s_ip / t) / (exp(s_ip / t) + sum_N exp(s_in / t))) per positive pair: the anchor's
    other positives are not in the denominator.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    logits = _cosines(batch) / temperature
    return ops.reduce(reduce_fn, _against_negatives(logits, logits, negatives), positives)


def supcon(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    temperature: float = 0.1,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean_of_active,
) -> Float[Array, "..."]:
    """Supervised contrastive loss, the mean outside the log (Khosla et al., NeurIPS 2020, eq. 2).

    -mean_P(s_ip / t - lse_{P and N} s_ij / t) per anchor with positives; 0 for a batch that lacks
    either kind of pair.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    logits = _cosines(batch) / temperature
    normaliser = ops.logsumexp(logits, where=positives | negatives)
    count = jnp.sum(positives, axis=1)
    mean = ops.divide(jnp.sum(logits, axis=1, where=positives), count)
    valid = (count > 0) & jnp.any(negatives)
    return ops.reduce(reduce_fn, jnp.where(valid, normaliser - mean, 0), valid)


def circle(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    m: float = 0.4,
    gamma: float = 80.0,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean_of_active,
) -> Float[Array, "..."]:
    """Pairs weighted by their distance from the optimum (Sun et al., CVPR 2020).

    softplus(lse_P(-gamma [1 + m - s]+ (s - 1 + m)) + lse_N(gamma [s + m]+ (s - m))) per anchor that
    has both; no gradient flows through the [.]+ weights.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    cosines = _cosines(batch)
    fixed = jax.lax.stop_gradient(cosines)
    pull = -gamma * jax.nn.relu(1 + m - fixed) * (cosines - 1 + m)
    push = gamma * jax.nn.relu(fixed + m) * (cosines - m)
    both = jnp.any(positives, axis=1) & jnp.any(negatives, axis=1)
    entries = jax.nn.softplus(
        ops.logsumexp(pull, where=positives) + ops.logsumexp(push, where=negatives)
    )
    return ops.reduce(reduce_fn, entries, both)


def lifted_structure(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    neg_margin: float = 1.0,
    pos_margin: float = 0.0,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Each positive pair against all negatives of both its ends (Oh Song et al., CVPR 2016).

    [d_ip - pos_margin + lse_{N_i and N_p}(neg_margin - d)]+^2 / 2 per ordered positive pair. With
    references, the negatives of a reference are the anchors it is a negative of.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    distances = distance_fn(batch.x, batch.y)
    of_anchor = _lse_or_nothing(neg_margin - distances, negatives, axis=1)  # [b]
    of_other = (
        of_anchor if batch.own else _lse_or_nothing(neg_margin - distances, negatives, axis=0)
    )  # [n]
    union = _logaddexp(of_anchor[:, None], of_other[None, :])
    entries = jax.nn.relu(distances - pos_margin + jnp.where(jnp.isneginf(union), 0, union)) ** 2
    return ops.reduce(reduce_fn, entries / 2, positives & jnp.any(negatives))


def generalized_lifted_structure(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    neg_margin: float = 1.0,
    pos_margin: float = 0.0,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """[lse_P(d - pos_margin) + lse_N(neg_margin - d)]+ over all anchors (Hermans et al., 2017)."""
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    distances = distance_fn(batch.x, batch.y)
    pull = ops.logsumexp(distances - pos_margin, where=positives)
    push = ops.logsumexp(neg_margin - distances, where=negatives)
    return ops.reduce(reduce_fn, jax.nn.relu(pull + push), batch.where)


def n_pairs(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    l2_weight: float = 0.0,
    distance_fn: DistanceFn = ops.cosine,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """One (anchor, positive) per label, each told from the others' positives (Sohn, NeurIPS 2016).

    Softmax cross-entropy of the anchors x positives similarities, entries per anchor. The default
    normalises as common code does; the paper takes `distance_fn=ops.dot` and adds
    `l2_weight / 4` times the mean squared norms of anchors and positives.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives = batch.pairs.positives
    has_one = jnp.any(positives, axis=1)
    # The first row of every label that has a positive is its anchor.
    alike = _share_a_label(batch, labels)
    earlier = jnp.tri(len(alike), k=-1, dtype=bool)
    anchors = has_one & ~jnp.any(alike & earlier & has_one[None, :], axis=1)
    chosen = jnp.argmax(positives, axis=1)
    similarities = -distance_fn(batch.x, batch.y)[:, chosen]  # [b b]
    own = jnp.diagonal(similarities)
    others = ops.logsumexp(similarities, where=anchors[None, :] & anchors[:, None])
    entries = others - own
    if l2_weight:
        norms = jnp.sum(batch.x**2, axis=1) + jnp.sum(batch.y[chosen] ** 2, axis=1)
        entries = entries + l2_weight / 4 * norms
    return ops.reduce(reduce_fn, entries, anchors)


def nca(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    softmax_scale: float = 1.0,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Neighbourhood components analysis (Goldberger et al., NeurIPS 2004).

    -log sum_P softmax(-softmax_scale d^2) per anchor with positives. In logarithms throughout, so
    an anchor whose positives are far away keeps its gradient.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    logits = -softmax_scale * ops.unit(ops.squared_euclidean)(batch.x, batch.y)
    entries = ops.logsumexp(logits, where=positives | negatives)
    entries = entries - ops.logsumexp(logits, where=positives)
    return ops.reduce(reduce_fn, entries, jnp.any(positives, axis=1))


def tuplet_margin(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float = 5.73,
    scale: float = 64.0,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """log(1 + sum_N exp(scale (cos t_an - cos(t_ap - margin)))) (Yu & Tao, ICCV 2019).

    Per positive pair, `margin` in degrees.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    cosines = _cosines(batch)
    # Only positives go through acos, whose slope is steep for what is nearly parallel.
    eased = jnp.cos(ops.acos(jnp.where(positives, cosines, 0)) - np.deg2rad(margin))
    entries = _against_negatives(scale * eased, scale * cosines, negatives)
    return ops.reduce(reduce_fn, entries, positives)


def intra_pair_variance(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    pos_eps: float = 0.01,
    neg_eps: float = 0.01,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Pairs pulled to their kind's mean cosine, from the bad side (Yu & Tao, ICCV 2019).

    mean_P [(1 - pos_eps) mean_P(s) - s]+^2 + mean_N [s - (1 + neg_eps) mean_N(s)]+^2; the means are
    differentiated too.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    cosines = _cosines(batch)
    pos_mean = ops.divide(*ops.mean(cosines, positives))
    neg_mean = ops.divide(*ops.mean(cosines, negatives))
    pull = jax.nn.relu((1 - pos_eps) * pos_mean - cosines) ** 2
    push = jax.nn.relu(cosines - (1 + neg_eps) * neg_mean) ** 2
    return ops.reduce(reduce_fn, pull, positives) + ops.reduce(reduce_fn, push, negatives)


def threshold_consistent_margin(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    pos_weight: float = 1.0,
    neg_weight: float = 1.0,
    pos_margin: float = 0.9,
    neg_margin: float = 0.5,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """A regulariser towards one threshold for all classes (Zhang et al., ICLR 2024).

    pos_weight mean(pos_margin - s over positives with s <= pos_margin) + neg_weight mean(s -
    neg_margin over negatives with s >= neg_margin).
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    cosines = _cosines(batch)
    low = positives & ~(cosines > pos_margin)
    high = negatives & ~(cosines < neg_margin)
    pull = ops.reduce(reduce_fn, pos_margin - cosines, low)
    push = ops.reduce(reduce_fn, cosines - neg_margin, high)
    return pos_weight * pull + neg_weight * push


def ranked_list(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float,
    negative_temperature: float,
    imbalance: float = 0.5,
    alpha: float | None = None,
    positive_temperature: float = 0.0,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Positives into a ball of radius alpha - margin, negatives out of alpha (Wang et al., 2019).

    Per anchor (1 - imbalance) times the weighted mean of [d - (alpha - margin)]+ over P plus
    imbalance times that of [alpha - d]+ over N, with weights exp(temperature * violation). `alpha`
    is 1 + margin / 2 unless given.
    """
    if not 0 <= imbalance <= 1:
        raise ValueError(f"imbalance is a share between 0 and 1, not {imbalance}")
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    alpha = 1 + margin / 2 if alpha is None else alpha
    distances = ops.unit_euclidean(batch.x, batch.y)
    columns = jnp.sum(batch.where) if batch.own else len(batch.y)

    def weighted_mean(violations, chosen, temperature):
        chosen = chosen & ~(violations <= 0)
        violations = jnp.where(chosen, violations, 0)
        weights = jnp.where(chosen, jnp.exp(temperature * violations), 0)
        # 1e-5 for every reference, violating or not, as in the published code.
        return jnp.sum(weights * violations, axis=1) / (jnp.sum(weights, axis=1) + 1e-5 * columns)

    pull = weighted_mean(distances - (alpha - margin), positives, positive_temperature)
    push = weighted_mean(alpha - distances, negatives, negative_temperature)
    return ops.reduce(reduce_fn, (1 - imbalance) * pull + imbalance * push, batch.where)


# --- pieces -------------------------------------------------------------------------------------


def _cosines(batch: Batch) -> jax.Array:
    x = ops.normalize(batch.x)
    return ops.matmul(x, (x if batch.own else ops.normalize(batch.y)).T)


def _log_1_plus_sum_exp(x, where):
    some = jnp.any(where, axis=1)
    return jnp.where(some, jax.nn.softplus(ops.logsumexp(x, where=where)), 0)


def _against_negatives(positive_logits, logits, negatives):
    """-log(e^p / (e^p + sum_N e^n)) for every entry p of `positive_logits`, in O(b n)."""
    some = jnp.any(negatives, axis=1, keepdims=True)
    rivals = ops.logsumexp(logits, where=negatives, keepdims=True)
    return jnp.where(some, jax.nn.softplus(rivals - positive_logits), 0)


def _lse_or_nothing(x, where, *, axis):
    """log-sum-exp that is -inf, not 0, where nothing counts: a union may still have the rest."""
    some = jnp.any(where, axis=axis)
    return jnp.where(some, ops.logsumexp(x, where=where, axis=axis), -jnp.inf)


def _logaddexp(x, y):
    """`jnp.logaddexp` whose gradient is finite where both are -inf."""
    nothing = jnp.isneginf(x) & jnp.isneginf(y)
    return jnp.where(
        nothing, -jnp.inf, jnp.logaddexp(jnp.where(nothing, 0, x), jnp.where(nothing, 0, y))
    )


def _share_a_label(batch: Batch, labels) -> jax.Array:
    """[b b]: which anchors are of one label; known of ready Pairs only by what they imply."""
    if not isinstance(labels, ops.Pairs):
        return ops.pairs(labels).positives
    positives = jnp.asarray(labels.positives)
    if batch.own:
        return positives | positives.T
    shared = positives.astype(jnp.float32)
    return ops.matmul(shared, shared.T) > 0
