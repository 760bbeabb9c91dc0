"""Losses over pairs of one batch, or of a batch and references.

Every loss is `f(embeddings [b d], labels, *, ...) -> scalar`. A row of `embeddings` is an anchor;
rows of `references` with the anchor's class are its positives, the others its negatives.
"""

import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.losses._common import Batch, pair_loss, radians
from dmljax.ops import Array, DistanceFn, Scalar
from dmljax.ops.fold import LogSumExp, Sum, count

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


@pair_loss(ops.mean_of_active, in_tiles=True)
def contrastive(
    batch: Batch,
    *,
    pos_margin: Scalar = 0.0,
    neg_margin: Scalar = 1.0,
    power: float = 1.0,
    pos_weight: Scalar = 1.0,
    neg_weight: Scalar = 1.0,
    distance_fn: DistanceFn = ops.unit_euclidean,
) -> Array:
    """Computes the contrastive loss: pulls positives close, pushes negatives away.

        pos_weight reduce([d - pos_margin]+^power over positive pairs)
        + neg_weight reduce([neg_margin - d]+^power over negative pairs)

    with distance d and [a]+ = max(a, 0). One entry per pair.

    Reference: Hadsell, Chopra and LeCun, Dimensionality Reduction by Learning an Invariant Mapping,
    CVPR 2006.

    Args:
        pos_margin: Positives nearer than this have loss 0.
        neg_margin: Negatives farther than this have loss 0.
        power: Most code uses 1, the paper 2.
        pos_weight, neg_weight: Weights of the two sums.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.contrastive(x, np.array([0, 0, 1, 1])):.3f}")
    0.738
    """
    pull, push = _hinges(batch, distance_fn, pos_margin, neg_margin, power)
    return pos_weight * pull + neg_weight * push


@pair_loss(ops.mean_of_active, in_tiles=True)
def snr_contrastive(batch: Batch, *, pos_margin: Scalar = 0.0, neg_margin: Scalar = 1.0) -> Array:
    """Computes the contrastive loss on the inverse signal-to-noise ratio.

    `contrastive` with d = var(x - y) / var(x), for an anchor x and a reference y of length 1.
    Variances are over dimensions (`ops.snr`). One entry per pair.

    Reference: Yuan et al., Signal-to-Noise Ratio: A Robust Distance Metric for Deep Metric
    Learning, CVPR 2019, arXiv:1904.02616.

    Args:
        pos_margin: Positives nearer than this have loss 0.
        neg_margin: Negatives farther than this have loss 0.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.snr_contrastive(x, np.array([0, 0, 1, 1])):.3f}")
    4.220
    """
    pull, push = _hinges(batch, ops.unit(ops.snr), pos_margin, neg_margin)
    return pull + push


@pair_loss(ops.mean, in_tiles=True)
def multi_similarity(
    batch: Batch, *, alpha: Scalar = 2.0, beta: Scalar = 50.0, base: Scalar = 0.5
) -> Array:
    """Computes the multi-similarity loss: soft maxima of an anchor's positives and negatives.

        log(1 + sum_P exp(-alpha (s - base))) / alpha + log(1 + sum_N exp(beta (s - base))) / beta

    per anchor, with cosines s, positives P and negatives N. A term without pairs is 0. All anchors
    are entries, also those without pairs.

    Reference: Wang et al., Multi-Similarity Loss with General Pair Weighting for Deep Metric
    Learning, CVPR 2019, arXiv:1904.06627. The paper adds `miners.multi_similarity`.

    Args:
        alpha: Sharpness of the positives' soft maximum.
        beta: Sharpness of the negatives' soft maximum.
        base: The cosine that positives should exceed and negatives stay below.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.multi_similarity(x, np.array([0, 0, 1, 1])):.3f}")
    0.269
    """

    def terms(block, alpha, beta, base):
        positives, negatives = block.pairs
        over = block.cosines() - base
        return LogSumExp(-alpha * over, positives), LogSumExp(beta * over, negatives)

    pull, push = batch.fold(terms, alpha, beta, base)
    entries = jax.nn.softplus(pull) / alpha + jax.nn.softplus(push) / beta
    return batch.reduce(entries, batch.where)


@pair_loss(ops.mean, in_tiles=True)
def ntxent(batch: Batch, *, temperature: Scalar = 0.07) -> Array:
    """Computes NT-Xent, or InfoNCE: the cross-entropy of each positive against the negatives.

        -log(exp(s_p / temperature) / (exp(s_p / temperature) + sum_N exp(s_n / temperature)))

    per positive pair, with cosines s and the anchor's negatives N. The anchor's other positives are
    not in the denominator. With two views of each image as a class, it is SimCLR's loss.

    Reference: Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NeurIPS
    2016; Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML
    2020, arXiv:2002.05709.

    Args:
        temperature: The lower, the more the nearest negatives dominate.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.ntxent(x, np.array([0, 0, 1, 1])):.3f}")
    0.028
    """

    def terms(block, temperature):
        return (LogSumExp(block.cosines() / temperature, block.pairs.negatives),)

    def entries(block, temperature):
        gaps = block.rows.extra[:, None] - block.cosines() / temperature
        return [(jax.nn.softplus(gaps), block.pairs.positives)]

    (normalizer,) = batch.fold(terms, temperature)
    (loss,) = batch.reduce_pairs(entries, temperature, of_rows=normalizer)
    return loss


@pair_loss(ops.mean_of_active, in_tiles=True)
def supcon(batch: Batch, *, temperature: Scalar = 0.1) -> Array:
    """Computes the supervised contrastive loss: all positives against all other rows.

        -mean_P(s_p / temperature - log sum_{P and N} exp(s_j / temperature))

    per anchor that has positives, with cosines s, positives P and negatives N. It is 0 for a batch
    without positive pairs or without negative pairs.

    Reference: Khosla et al., Supervised Contrastive Learning, NeurIPS 2020, arXiv:2004.11362,
    equation 2.

    Args:
        temperature: The lower, the more the nearest rows dominate.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.supcon(x, np.array([0, 0, 1, 1])):.3f}")
    0.064
    """

    def terms(block, temperature):
        positives, negatives = block.pairs
        logits = block.cosines() / temperature
        normalizer = LogSumExp(logits, positives | negatives)
        return normalizer, Sum(logits, positives), count(positives), count(negatives)

    normalizer, total, positives, negatives = batch.fold(terms, temperature)
    valid = (positives > 0) & jnp.any(negatives > 0)
    entries = jnp.where(valid, normalizer - ops.divide(total, positives), 0)
    return batch.reduce(entries, valid)


@pair_loss(ops.mean_of_active, in_tiles=True)
def circle(batch: Batch, *, margin: Scalar = 0.4, gamma: Scalar = 80.0) -> Array:
    """Computes the circle loss: weighs pairs by how far they are from their optimum.

        softplus(lse_P(-gamma [1 + m - s]+ (s - 1 + m)) + lse_N(gamma [s + m]+ (s - m)))

    per anchor that has positives P and negatives N, with cosines s, the margin m,
    lse = log sum exp and [a]+ = max(a, 0). No gradient flows through the weights [.]+.

    Reference: Sun et al., Circle Loss: A Unified Perspective of Pair Similarity Optimization, CVPR
    2020, arXiv:2002.10857.

    Args:
        margin: Positives should reach a cosine of 1 - margin, negatives stay below margin.
        gamma: Scale of the logits.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.circle(x, np.array([0, 0, 1, 1])):.3f}")
    3.201
    """

    def terms(block, margin, gamma):
        positives, negatives = block.pairs
        cosines = block.cosines()
        constants = jax.lax.stop_gradient(cosines)
        pull = -gamma * jax.nn.relu(1 + margin - constants) * (cosines - 1 + margin)
        push = gamma * jax.nn.relu(constants + margin) * (cosines - margin)
        return LogSumExp(pull, positives), LogSumExp(push, negatives)

    pull, push = batch.fold(terms, margin, gamma)
    has_both_kinds = ~jnp.isneginf(pull) & ~jnp.isneginf(push)
    return batch.reduce(jax.nn.softplus(pull + push), has_both_kinds)


@pair_loss(ops.mean)
def lifted_structure(
    batch: Batch,
    *,
    neg_margin: Scalar = 1.0,
    pos_margin: Scalar = 0.0,
    distance_fn: DistanceFn = ops.unit_euclidean,
) -> Array:
    """Computes the lifted structure loss: each positive pair against negatives of both ends.

        [d_ap - pos_margin + lse_{N_a and N_p}(neg_margin - d)]+^2 / 2

    per ordered positive pair (a, p), with distance d, lse = log sum exp, [a]+ = max(a, 0), and the
    negatives N_a and N_p of the two rows. With `references`, the negatives of a reference are the
    anchors that have it as a negative.

    Reference: Oh Song et al., Deep Metric Learning via Lifted Structured Feature Embedding, CVPR
    2016, arXiv:1511.06452.

    Args:
        neg_margin: Margin of the negatives.
        pos_margin: Subtracted from the distance of the positives.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.lifted_structure(x, np.array([0, 0, 1, 1])):.3f}")
    1.433
    """
    positives, negatives = batch.pairs
    distances = distance_fn(batch.anchors, batch.references)
    of_anchors = of_references = LogSumExp(neg_margin - distances, negatives).at_once()  # [b]
    if not batch.within_batch:
        of_references = LogSumExp((neg_margin - distances).T, negatives.T).at_once()  # [n]
    union = _logaddexp(of_anchors[:, None], of_references[None, :])
    entries = jax.nn.relu(distances - pos_margin + jnp.where(jnp.isneginf(union), 0, union)) ** 2
    return batch.reduce(entries / 2, positives & jnp.any(negatives))


@pair_loss(ops.mean)
def generalized_lifted_structure(
    batch: Batch,
    *,
    neg_margin: Scalar = 1.0,
    pos_margin: Scalar = 0.0,
    distance_fn: DistanceFn = ops.unit_euclidean,
) -> Array:
    """Computes the lifted structure loss with all positives of an anchor at once.

        [lse_P(d - pos_margin) + lse_N(neg_margin - d)]+

    per anchor, with distance d, positives P, negatives N, lse = log sum exp, which is 0 for no
    pairs, and [a]+ = max(a, 0). All anchors are entries, also those without pairs.

    Reference: Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person
    Re-Identification, 2017, arXiv:1703.07737.

    Args:
        neg_margin: Margin of the negatives.
        pos_margin: Subtracted from the distances of the positives.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.generalized_lifted_structure(x, np.array([0, 0, 1, 1])):.3f}")
    0.973
    """
    positives, negatives = batch.pairs
    distances = distance_fn(batch.anchors, batch.references)
    pull = ops.logsumexp(distances - pos_margin, where=positives)
    push = ops.logsumexp(neg_margin - distances, where=negatives)
    return batch.reduce(jax.nn.relu(pull + push), batch.where)


@pair_loss(ops.mean)
def n_pairs(batch: Batch, *, l2_weight: float = 0.0, distance_fn: DistanceFn = ops.cosine) -> Array:
    """Computes the N-pair loss: one (anchor, positive) per class, against all classes' positives.

    -log(exp(-d_ip) / sum_j exp(-d_jp)) per class i, over the classes j of the batch, where d_jp is
    the distance of the anchor of class i and the positive of class j. The anchor is the first row
    of a class that has a positive, and the positive the first one of that anchor. One entry per
    class. A class without positive pairs is left out.

    Reference: Sohn, Improved Deep Metric Learning with Multi-class N-pair Loss Objective, NeurIPS
    2016. The default measures 1 - cosine, as most code does; the paper has `distance_fn=ops.dot`
    and `l2_weight` above 0.

    Args:
        l2_weight: Adds l2_weight / 4 times the squared lengths of anchor and positive.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.n_pairs(x, np.array([0, 0, 1, 1])):.3f}")
    0.409
    """
    positives = batch.pairs.positives
    has_positive = jnp.any(positives, axis=1)
    same_class = _same_class(batch)
    earlier = jnp.tri(len(same_class), k=-1, dtype=bool)
    is_anchor = has_positive & ~jnp.any(same_class & earlier & has_positive[None, :], axis=1)
    first_positive = jnp.argmax(positives, axis=1)
    similarities = -distance_fn(batch.anchors, batch.references)[:, first_positive]  # [b b]
    normalizer = ops.logsumexp(similarities, where=is_anchor[None, :] & is_anchor[:, None])
    entries = normalizer - jnp.diagonal(similarities)
    if l2_weight:
        squares = jnp.sum(batch.anchors**2, axis=1)
        squares = squares + jnp.sum(batch.references[first_positive] ** 2, axis=1)
        entries = entries + l2_weight / 4 * squares
    return batch.reduce(entries, is_anchor)


@pair_loss(ops.mean)
def nca(batch: Batch, *, scale: Scalar = 1.0) -> Array:
    """Computes neighborhood components analysis: the probability of picking a positive neighbor.

        -log sum_P softmax_j(-scale d_j^2)

    per anchor that has positives P, with Euclidean distances d of unit embeddings; the softmax is
    over all positives and negatives. Computed from logarithms, so that an anchor whose positives
    are far away keeps its gradient.

    Reference: Goldberger et al., Neighbourhood Components Analysis, NeurIPS 2004.

    Args:
        scale: Scale of the squared distances: the higher, the fewer neighbors matter.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.nca(x, np.array([0, 0, 1, 1])):.3f}")
    0.430
    """
    positives, negatives = batch.pairs
    logits = -scale * ops.unit(ops.squared_euclidean)(batch.anchors, batch.references)
    entries = ops.logsumexp(logits, where=positives | negatives)
    entries = entries - ops.logsumexp(logits, where=positives)
    return batch.reduce(entries, jnp.any(positives, axis=1))


@pair_loss(ops.mean)
def tuplet_margin(batch: Batch, *, margin: Scalar = 5.73, scale: Scalar = 64.0) -> Array:
    """Computes the tuplet margin loss: each positive, eased by an angle, against all negatives.

        log(1 + sum_N exp(scale (cos t_an - cos(t_ap - margin))))

    per positive pair (a, p), with angles t between embeddings and the anchor's negatives N.

    Reference: Yu and Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019. The paper adds
    `intra_pair_variance`.

    Args:
        margin: Angle in degrees by which a positive counts as nearer than it is.
        scale: Scale of the logits.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.tuplet_margin(x, np.array([0, 1, 0, 1])):.3f}")
    44.810
    """
    positives, negatives = batch.pairs
    cosines = batch.cosines()
    # Only positives go through acos, whose slope is steep for nearly parallel vectors.
    eased = jnp.cos(ops.acos(jnp.where(positives, cosines, 0)) - radians(margin))
    normalizer = LogSumExp(scale * cosines, negatives).at_once()[:, None]
    entries = jax.nn.softplus(normalizer - scale * eased)
    return batch.reduce(entries, positives)


@pair_loss(ops.mean)
def intra_pair_variance(batch: Batch, *, pos_eps: Scalar = 0.01, neg_eps: Scalar = 0.01) -> Array:
    """Computes the intra-pair variance loss: pulls pairs to the mean cosine of their kind.

        mean_P([(1 - pos_eps) mean_P(s) - s]+^2) + mean_N([s - (1 + neg_eps) mean_N(s)]+^2)

    over all positive pairs P and all negative pairs N of the batch, with cosines s and
    [a]+ = max(a, 0). Gradients flow through the inner means too. One entry per pair.

    Reference: Yu and Tao, Deep Metric Learning with Tuplet Margin Loss, ICCV 2019.

    Args:
        pos_eps: Positives are pulled if they are this share below their mean.
        neg_eps: Negatives are pushed if they are this share above their mean.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.intra_pair_variance(x, np.array([0, 0, 1, 1])):.3f}")
    0.090
    """
    positives, negatives = batch.pairs
    cosines = batch.cosines()
    pos_mean = ops.divide(*ops.mean(cosines, positives))
    neg_mean = ops.divide(*ops.mean(cosines, negatives))
    pull = jax.nn.relu((1 - pos_eps) * pos_mean - cosines) ** 2
    push = jax.nn.relu(cosines - (1 + neg_eps) * neg_mean) ** 2
    return batch.reduce(pull, positives) + batch.reduce(push, negatives)


@pair_loss(ops.mean)
def threshold_consistent_margin(
    batch: Batch,
    *,
    pos_weight: Scalar = 1.0,
    neg_weight: Scalar = 1.0,
    pos_margin: Scalar = 0.9,
    neg_margin: Scalar = 0.5,
) -> Array:
    """Computes threshold-consistent margin, a regularizer that makes one threshold fit all.

        pos_weight mean(pos_margin - s over positives with s <= pos_margin)
        + neg_weight mean(s - neg_margin over negatives with s >= neg_margin)

    with cosines s. One entry per pair. To be added to a loss.

    Reference: Zhang et al., Threshold-Consistent Margin Loss for Open-World Deep Metric Learning,
    ICLR 2024, arXiv:2307.04047.

    Args:
        pos_weight: Weight of the term of the positives.
        neg_weight: Weight of the term of the negatives.
        pos_margin: Cosine that positives should exceed.
        neg_margin: Cosine that negatives should stay below.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.threshold_consistent_margin(x, np.array([0, 0, 1, 1])):.3f}")
    0.200
    """
    positives, negatives = batch.pairs
    cosines = batch.cosines()
    low = positives & ~(cosines > pos_margin)
    high = negatives & ~(cosines < neg_margin)
    pull = batch.reduce(pos_margin - cosines, low)
    push = batch.reduce(cosines - neg_margin, high)
    return pos_weight * pull + neg_weight * push


@pair_loss(ops.mean)
def ranked_list(
    batch: Batch,
    *,
    margin: Scalar,
    negative_temperature: Scalar,
    imbalance: float = 0.5,
    alpha: Scalar | None = None,
    positive_temperature: Scalar = 0.0,
) -> Array:
    """Computes the ranked list loss: positives into a ball, negatives out of a larger one.

        (1 - imbalance) wmean_P([d - (alpha - margin)]+) + imbalance wmean_N([alpha - d]+)

    per anchor with positives P and negatives N, Euclidean distance d of unit embeddings and
    [a]+ = max(a, 0). wmean is a mean over the terms above 0 with weights exp(temperature * term);
    as in the published code, 1e-5 per reference is added to the sum of weights. All anchors are
    entries, also those without pairs.

    Reference: Wang et al., Ranked List Loss for Deep Metric Learning, CVPR 2019, arXiv:1903.03238.

    Args:
        margin: Width of the gap between the two balls.
        negative_temperature: Temperature of the weights of the negatives; 0 is a plain mean.
        imbalance: Share of the negatives' term, from 0 to 1.
        alpha: Radius of the larger ball. None is 1 + margin / 2.
        positive_temperature: Temperature of the weights of the positives.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> loss_fn = functools.partial(losses.ranked_list, margin=0.4, negative_temperature=3.0)
    >>> print(f"{loss_fn(x, np.array([0, 0, 1, 1])):.3f}")
    0.076
    """
    if not 0 <= imbalance <= 1:
        raise ValueError(f"imbalance is a share between 0 and 1, not {imbalance}")
    positives, negatives = batch.pairs
    alpha = 1 + margin / 2 if alpha is None else alpha
    distances = ops.unit_euclidean(batch.anchors, batch.references)
    count = jnp.sum(batch.where) if batch.within_batch else len(batch.references)

    def weighted_mean(violations, pairs, temperature):
        violating = pairs & ~(violations <= 0)
        violations = jnp.where(violating, violations, 0)
        weights = jnp.where(violating, jnp.exp(temperature * violations), 0)
        # 1e-5 for every reference, violating or not, as in the published code.
        return jnp.sum(weights * violations, axis=1) / (jnp.sum(weights, axis=1) + 1e-5 * count)

    pull = weighted_mean(distances - (alpha - margin), positives, positive_temperature)
    push = weighted_mean(alpha - distances, negatives, negative_temperature)
    return batch.reduce((1 - imbalance) * pull + imbalance * push, batch.where)


def _hinges(batch: Batch, distance_fn, pos_margin, neg_margin, power=1) -> tuple[Array, ...]:
    """Reduces [d - pos_margin]+^power of positives, and [neg_margin - d]+^power of negatives."""

    def entries(block, pos_margin, neg_margin):
        distances = distance_fn(block.rows.vectors, block.columns.vectors)
        pull = ops.power(jax.nn.relu(distances - pos_margin), power)
        push = ops.power(jax.nn.relu(neg_margin - distances), power)
        return zip((pull, push), block.pairs, strict=True)

    return batch.reduce_pairs(entries, pos_margin, neg_margin)


def _logaddexp(x, y):
    """Computes `jnp.logaddexp`, with a finite gradient where both arguments are -inf."""
    empty = jnp.isneginf(x) & jnp.isneginf(y)
    return jnp.where(empty, -jnp.inf, jnp.logaddexp(jnp.where(empty, 0, x), jnp.where(empty, 0, y)))


def _same_class(batch: Batch) -> Array:
    """Returns which anchors share a class, as far as `labels` that are `ops.Pairs` imply it."""
    if not isinstance(batch.labels, ops.Pairs):
        return ops.pairs(batch.labels).positives
    positives = jnp.asarray(batch.labels.positives)
    if batch.within_batch:
        return positives | positives.T
    shared = positives.astype(jnp.float32)
    return ops.matmul(shared, shared.T) > 0
