"""Losses of embeddings against proxies: learned vectors, one or several per class.

Every loss is `f(embeddings [b d], labels [b], proxies [c d] or [c k d], *, ...) -> scalar`. Only
directions of proxies matter, except for `large_margin_softmax`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from dmljax import ops
from dmljax.losses._common import Batch, mask_rows, matrix, proxy_loss
from dmljax.ops import Array, ReduceFn, Scalar
from dmljax.ops.fold import LogSumExp, OfColumns, Sum, count

__all__ = [
    "arcface",
    "cosface",
    "label_smoothed_cross_entropy",
    "large_margin_softmax",
    "normalized_softmax",
    "proxy_anchor",
    "proxy_nca",
    "proxy_nca_pp",
    "soft_triple",
    "sphereface",
    "subcenter_arcface",
]


@proxy_loss("c d")
def normalized_softmax(batch: Batch, *, temperature: Scalar = 0.05) -> Array:
    """Computes the softmax cross-entropy of the cosines between embedding and proxies.

        -log softmax(s / temperature)_y

    per row, with the cosines s of the embedding with all proxies and the row's class y.

    Reference: Zhai and Wu, Classification is a Strong Baseline for Deep Metric Learning, BMVC 2019,
    arXiv:1811.12649.

    Args:
        temperature: The lower, the sharper the softmax.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.normalized_softmax(x, labels, proxies):.3f}")
    3.023
    """
    return _cross_entropy(batch, _no_margin, 1 / temperature)


@proxy_loss("c d")
def cosface(batch: Batch, *, margin: Scalar = 0.35, scale: Scalar = 64.0) -> Array:
    """Computes CosFace: softmax cross-entropy with a margin on the cosine of the row's class.

        -log softmax(scale z)_y with z_y = s_y - margin, z_c = s_c for the other classes

    per row, with the cosines s of the embedding with all proxies and the row's class y.

    Reference: Wang et al., CosFace: Large Margin Cosine Loss for Deep Face Recognition, CVPR 2018,
    arXiv:1801.09414.

    Args:
        margin: Subtracted from the cosine with the proxy of the row's class.
        scale: Scale of the logits.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.cosface(x, labels, proxies):.3f}")
    20.868
    """
    return _cross_entropy(batch, lambda s: s - margin, scale)


@proxy_loss("c d")
def arcface(batch: Batch, *, margin: Scalar = 28.6, scale: Scalar = 64.0) -> Array:
    """Computes ArcFace: softmax cross-entropy with a margin on the angle to the row's class.

        -log softmax(scale z)_y with z_y = cos(t_y + margin), z_c = cos(t_c) for the other classes

    per row, with the angles t of the embedding to all proxies and the row's class y. Where
    t_y + margin exceeds 180 degrees and the cosine would rise again, z_y is
    cos(t_y) - margin sin(margin), with the factor margin in radians.

    Reference: Deng et al., ArcFace: Additive Angular Margin Loss for Deep Face Recognition, CVPR
    2019, arXiv:1801.07698.

    Args:
        margin: Added to the angle to the proxy of the row's class: degrees from 0 to 180.
        scale: Scale of the logits.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.arcface(x, labels, proxies):.3f}")
    24.266
    """
    return _cross_entropy(batch, _add_angle(margin), scale)


@proxy_loss("c k d")
def subcenter_arcface(batch: Batch, *, margin: Scalar = 28.6, scale: Scalar = 64.0) -> Array:
    """Computes sub-center ArcFace: `arcface` on the nearest of k proxies of each class.

        -log softmax(scale z)_y with z_y = cos(t_y + margin), z_c = cos(t_c) for the other classes

    per row, with t_c the angle to the nearest of the proxies of class c and the row's class y.
    Beyond 180 degrees, z_y continues as in `arcface`.

    Reference: Deng et al., Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web
    Faces, ECCV 2020.

    Args:
        margin: Added to the angle to the nearest proxy of the row's class: degrees from 0 to 180.
        scale: Scale of the logits.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[[1, 0.2], [1, -1]], [[0, 1], [-1, 0]]], np.float32)  # [c k d]
    >>> print(f"{losses.subcenter_arcface(x, labels, proxies):.3f}")
    24.266
    """
    return _cross_entropy(batch, _add_angle(margin), scale, _nearest_center)


@proxy_loss("c d")
def sphereface(batch: Batch, *, margin: int = 4, scale: Scalar = 1.0) -> Array:
    """Computes SphereFace: softmax cross-entropy with a multiple of the angle to the class.

        -log softmax(scale |x| z)_y with z_y = psi(t_y), z_c = cos(t_c) for the other classes

    per row, with the angles t of the embedding x to all proxies and the row's class y.
    psi(t) = (-1)^k cos(margin t) - 2k for t in [k, k + 1] pi / margin falls monotonically, from 1
    to 1 - 2 margin. Embeddings keep their length.

    Reference: Liu et al., SphereFace: Deep Hypersphere Embedding for Face Recognition, CVPR 2017,
    arXiv:1704.08063.

    Args:
        margin: Factor of the angle: a whole number from 1. It is neither an array nor follows a
            schedule, because it sets the number of pieces of psi.
        scale: Scale of the logits.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.sphereface(x, labels, proxies):.3f}")
    1.290
    """
    return _cross_entropy(batch, _multiply_angle(margin), scale, _long_embeddings)


@proxy_loss("c d")
def large_margin_softmax(batch: Batch, *, margin: int = 4, scale: Scalar = 1.0) -> Array:
    """Computes large-margin softmax: `sphereface` with proxies of any length.

        -log softmax(scale |x| |w| z)_y with z_y = psi(t_y), z_c = cos(t_c) for the other classes

    per row, with the angles t of the embedding x to all proxies w and the row's class y.
    psi(t) = (-1)^k cos(margin t) - 2k for t in [k, k + 1] pi / margin falls monotonically, from 1
    to 1 - 2 margin. Embeddings and proxies keep their lengths.

    Reference: Liu et al., Large-Margin Softmax Loss for Convolutional Neural Networks, ICML 2016,
    arXiv:1612.02295.

    Args:
        margin: Factor of the angle: a whole number from 1. It is neither an array nor follows a
            schedule, because it sets the number of pieces of psi.
        scale: Scale of the logits.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.large_margin_softmax(x, labels, proxies):.3f}")
    1.296
    """
    return _cross_entropy(batch, _multiply_angle(margin), scale, _long_vectors)


@proxy_loss("c k d")
def soft_triple(
    batch: Batch, *, scale: Scalar = 20.0, gamma: Scalar = 0.1, margin: Scalar = 0.01
) -> Array:
    """Computes SoftTriple: softmax cross-entropy of a soft maximum over k proxies of a class.

        -log softmax(scale z)_y with z_y = s_y - margin, z_c = s_c for the other classes

    per row, with s_c = sum_k softmax_k(s_ck / gamma) s_ck, the cosines s_ck of the embedding with
    the k-th proxy of class c, and the row's class y.

    Reference: Qian et al., SoftTriple Loss: Deep Metric Learning Without Triplet Sampling, ICCV
    2019, arXiv:1909.05235. The paper adds 0.2 times `sparse_centers(proxies)`.

    Args:
        scale: Scale of the logits, lambda in the paper.
        gamma: Temperature of the soft maximum over the proxies of a class.
        margin: Subtracted from the similarity with the row's class.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[[1, 0.2], [1, -1]], [[0, 1], [-1, 0]]], np.float32)  # [c k d]
    >>> print(f"{losses.soft_triple(x, labels, proxies):.3f}")
    3.119
    """
    return _cross_entropy(batch, lambda s: s - margin, scale, _soft_maximum, gamma)


@proxy_loss("c d")
def proxy_anchor(batch: Batch, *, margin: Scalar = 0.1, alpha: Scalar = 32.0) -> Array:
    """Computes Proxy-Anchor: each proxy is an anchor, and rows of the batch are its pairs.

        mean_{c in batch} log(1 + sum_{y = c} exp(-alpha (s - margin)))
        + mean_c log(1 + sum_{y != c} exp(alpha (s + margin)))

    with the cosine s of a proxy of class c and an embedding of class y. The first mean is over the
    classes in the batch, the second over all classes. One entry per class.

    Reference: Kim et al., Proxy Anchor Loss for Deep Metric Learning, CVPR 2020, arXiv:2003.13911.

    Args:
        margin: Cosines should exceed it for the row's class and stay below its negative otherwise.
        alpha: Scale of the logits.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.proxy_anchor(x, labels, proxies):.3f}")
    17.654
    """

    def terms(block, margin, alpha):
        positives, negatives = block.pairs
        cosines = block.cosines()
        pull = LogSumExp(-alpha * (cosines - margin), positives)
        push = LogSumExp(alpha * (cosines + margin), negatives)
        return pull, push, count(positives)

    pull, push, positives = batch.fold(terms, margin, alpha)
    pulled = batch.reduce(jax.nn.softplus(pull), positives > 0)
    return pulled + _reduce_classes(batch, jax.nn.softplus(push))


@proxy_loss("c d")
def proxy_nca(batch: Batch, *, scale: Scalar = 1.0) -> Array:
    """Computes Proxy-NCA: softmax cross-entropy of squared distances to the proxies.

        -log softmax(-scale d^2)_y

    per row, with the Euclidean distances d between unit embedding and unit proxies and the row's
    class y. The denominator contains the proxy of the row's class, as in all published code; the
    paper's formula leaves it out and is unbounded from below.

    Reference: Movshovitz-Attias et al., No Fuss Distance Metric Learning Using Proxies, ICCV 2017,
    arXiv:1703.07464.

    Args:
        scale: Scale of the squared distances.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.proxy_nca(x, labels, proxies):.3f}")
    0.586
    """
    # d^2 = 2 - 2 s, and adding a constant to all logits does not change a softmax.
    return _cross_entropy(batch, _no_margin, 2 * scale)


@proxy_loss("c d")
def proxy_nca_pp(batch: Batch, *, temperature: Scalar = 1 / 9) -> Array:
    """Computes ProxyNCA++: `proxy_nca` with a low temperature.

        -log softmax(-d^2 / temperature)_y

    per row, with the Euclidean distances d between unit embedding and unit proxies and the row's
    class y.

    Reference: Teh, DeVries and Taylor, ProxyNCA++: Revisiting and Revitalizing Proxy Neighborhood
    Component Analysis, ECCV 2020, arXiv:2004.01113.

    Args:
        temperature: The lower, the sharper the softmax.

    >>> x, labels = np.array([[1, 0], [0.8, 0.6]], np.float32), np.array([0, 1])
    >>> proxies = np.array([[1, 0.2], [0, 1]], np.float32)
    >>> print(f"{losses.proxy_nca_pp(x, labels, proxies):.3f}")
    2.721
    """
    return _cross_entropy(batch, _no_margin, 2 / temperature)


def label_smoothed_cross_entropy(
    logits: Float[Array, "b c"],
    labels: Integer[Array, "b"],
    *,
    epsilon: float = 0.1,
    temperature: Scalar = 1.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Computes softmax cross-entropy with a fraction of the target spread over all classes.

        (1 - epsilon) CE_y + epsilon mean_c CE_c with CE_c = -log softmax(logits / temperature)_c

    per row of class y. The mean is over all classes, y included.

    Reference: Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016,
    arXiv:1512.00567.

    Args:
        logits: Outputs of a classifier, one per class.
        epsilon: The share that is spread, from 0 to 1.
        temperature: Divides the logits.

    >>> logits = np.array([[2, 0, -1], [0, 1, 0]], np.float32)
    >>> print(f"{losses.label_smoothed_cross_entropy(logits, np.array([0, 1])):.3f}")
    0.477
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is a share between 0 and 1, not {epsilon}")
    logits = matrix("logits", logits)
    logits, labels, where = mask_rows(logits, labels, logits.shape[1], where)
    target = labels[:, None] == jnp.arange(logits.shape[1])[None, :]
    log_softmax = jax.nn.log_softmax(logits / temperature, axis=1)
    of_target = jnp.sum(log_softmax, axis=1, where=target)
    entries = -(1 - epsilon) * of_target - epsilon * jnp.mean(log_softmax, axis=1)
    return ops.reduce(reduce_fn, entries, where)


def _cosines(embeddings, proxies) -> tuple[Array, float | Array]:
    """Computes the cosine of each row with each proxy, `[b c]`; returns its factor, too."""
    return ops.cosine_similarity(embeddings, proxies), 1.0


def _long_embeddings(embeddings, proxies) -> tuple[Array, float | Array]:
    return ops.cosine_similarity(embeddings, proxies), ops.norm(embeddings)[:, None]


def _long_vectors(embeddings, proxies) -> tuple[Array, float | Array]:
    lengths = ops.norm(embeddings)[:, None] * ops.norm(proxies)[None, :]
    return ops.cosine_similarity(embeddings, proxies), lengths


def _nearest_center(embeddings, proxies) -> tuple[Array, float | Array]:
    return functools.reduce(jnp.maximum, _cosines_by_center(embeddings, proxies)), 1.0


def _soft_maximum(embeddings, proxies, gamma) -> tuple[Array, float | Array]:
    cosines = _cosines_by_center(embeddings, proxies)
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, cosines))
    weights = [jnp.exp((s - peak) / gamma) for s in cosines]
    weighted = [w * s for w, s in zip(weights, cosines, strict=True)]
    return functools.reduce(jnp.add, weighted) / functools.reduce(jnp.add, weights), 1.0


def _cosines_by_center(embeddings, proxies) -> list[jax.Array]:
    """Computes k arrays `[b c]`: cosines of every row with the k-th proxy of all classes."""
    embeddings, proxies = ops.normalize(embeddings), ops.normalize(proxies)
    # Reductions over k arrays are faster than over the short last axis of one array [b c k].
    return [ops.matmul(embeddings, proxies[:, k].T) for k in range(proxies.shape[1])]


def _cross_entropy(
    batch: Batch,
    margin_fn: Callable,
    scale: Scalar,
    similarity_fn: Callable = _cosines,
    *params: Scalar,
) -> Array:
    """Returns -log softmax(scale l z)_y with z_y = margin_fn(s_y), z_c = s_c for other classes.

    `similarity_fn(embeddings, proxies, *params) -> (s [b c], l)`.
    """

    def terms(block, scale, *params):
        vectors = block.columns.vectors, block.rows.vectors
        similarities, lengths = similarity_fn(*vectors, *params)
        scales = jnp.asarray(scale * lengths, similarities.dtype)
        scales = jnp.broadcast_to(scales, similarities.shape)
        logits = scales * similarities
        if isinstance(weights := block.rows.extra, Array):
            logits = logits + jnp.log(weights.astype(logits.dtype))[None, :]
        target, others = (mask.T for mask in block.pairs)  # [b c]
        of_rows = LogSumExp(logits, others), Sum(similarities, target), Sum(scales, target)
        return map(OfColumns, of_rows)

    other_logits, target_similarities, target_scales = batch.fold(terms, scale, *params)
    target_logits = margin_fn(target_similarities) * target_scales
    # As softplus of a difference, so that a loss near 0 keeps its digits.
    entries = jax.nn.softplus(other_logits - target_logits)
    return batch.reduce(entries, batch.columns.where)


def _no_margin(cosines):
    return cosines


def _add_angle(margin) -> Callable:
    """Returns cos(t) -> cos(t + margin), with a falling line where that would rise again."""
    if isinstance(margin, int | float) and not 0 <= margin <= 180:
        raise ValueError(f"margin is an angle from 0 to 180 degrees, not {margin}")
    margin = jnp.deg2rad(margin)

    def margin_fn(cosines):
        # By the angle sum formula, not by acos, whose slope is infinite for an embedding that is
        # parallel to its proxy. `ops.sqrt` has slope 0 there.
        sines = ops.sqrt((1 - cosines) * (1 + cosines))
        shifted = cosines * jnp.cos(margin) - sines * jnp.sin(margin)
        rises = cosines < -jnp.cos(margin)
        return jnp.where(rises, cosines - margin * jnp.sin(margin), shifted).astype(cosines.dtype)

    return margin_fn


def _multiply_angle(margin: int) -> Callable:
    """Returns cos(t) -> psi(t) of `large_margin_softmax`, as a polynomial in cos(t)."""
    if margin != int(margin) or margin < 1:
        raise ValueError(f"margin multiplies the angle: a whole number from 1, not {margin}")
    margin = int(margin)
    edges = np.cos(np.pi * np.arange(1, margin) / margin)

    def margin_fn(cosines):
        previous, multiple = jnp.ones_like(cosines), cosines  # cos(0 t), cos(1 t)
        for _ in range(margin - 1):
            previous, multiple = multiple, 2 * cosines * multiple - previous
        k = sum((cosines <= edge).astype(cosines.dtype) for edge in edges) + jnp.zeros_like(cosines)
        return (1 - 2 * (k % 2)) * multiple - 2 * k

    return margin_fn


def _reduce_classes(batch: Batch, entries: Array) -> Array:
    """Reduces an entry of each class, which counts as often as the sample of classes says."""
    where, weights, reduce_fn = batch.rows.where, batch.rows.extra, batch.reduce_fn
    if reduce_fn is None or not isinstance(weights, Array):
        return batch.reduce(entries, where)
    totals, counts = jax.vmap(lambda x, w: reduce_fn(x[None], w[None]))(entries, where)
    return ops.divide(jnp.sum(weights * totals), jnp.sum(weights * counts))
