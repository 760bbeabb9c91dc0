"""Losses over triplets (anchor, positive, negative), in O(b n) memory.

Arguments are as in `dmljax.losses.pairs`. The losses loop over each anchor's positives
(`ops.sum_over_true`): a batch with K images per class takes K - 1 rounds over its distances, and no
array of size b^3 is stored. Only `reduce_fn=None` returns such an array, [b n n].
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.losses._common import Batch, mask_rows, pair_loss, radians
from dmljax.ops import Array, DistanceFn, ReduceFn, Scalar, Triplets
from dmljax.ops.reductions import total_and_count
from dmljax.ops.types import check_function

__all__ = [
    "angular",
    "margin",
    "semihard_triplet",
    "smooth_triplet",
    "swap_triplet",
    "triplet",
]


@pair_loss(ops.mean_of_active)
def triplet(
    batch: Batch, *, margin: Scalar = 0.05, distance_fn: DistanceFn = ops.unit_euclidean
) -> Array:
    """Computes the triplet loss: a positive must be nearer than a negative by a margin.

        [d_ap - d_an + margin]+

    per triplet of an anchor a, a positive p and a negative n, with distance d and
    [x]+ = max(x, 0).

    Reference: Weinberger and Saul, Distance Metric Learning for Large Margin Nearest Neighbor
    Classification, JMLR 2009; Schroff et al., FaceNet: A Unified Embedding for Face Recognition and
    Clustering, CVPR 2015, arXiv:1503.03832.

    Args:
        margin: By how much a negative must be farther than a positive.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.triplet(x, np.array([0, 1, 0, 1])):.3f}")
    0.744
    """
    distances = distance_fn(batch.anchors, batch.references)
    return _over_triplets(batch, [lambda ap, an, pn: jax.nn.relu(ap - an + margin)], distances)


@pair_loss(ops.mean_of_active)
def smooth_triplet(
    batch: Batch, *, margin: Scalar = 0.05, distance_fn: DistanceFn = ops.unit_euclidean
) -> Array:
    """Computes the triplet loss with a soft margin: softplus instead of the hinge.

        log(1 + exp(d_ap - d_an + margin))

    per triplet of an anchor a, a positive p and a negative n, with distance d. It never reaches 0,
    so it keeps pulling solved triplets apart.

    Reference: Hermans, Beyer and Leibe, In Defense of the Triplet Loss for Person
    Re-Identification, 2017, arXiv:1703.07737.

    Args:
        margin: Added to the difference of distances; the paper has 0.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.smooth_triplet(x, np.array([0, 1, 0, 1])):.3f}")
    0.987
    """
    distances = distance_fn(batch.anchors, batch.references)
    return _over_triplets(batch, [lambda ap, an, pn: jax.nn.softplus(ap - an + margin)], distances)


@pair_loss(ops.mean_of_active)
def swap_triplet(
    batch: Batch, *, margin: Scalar = 0.05, distance_fn: DistanceFn = ops.unit_euclidean
) -> Array:
    """Computes the triplet loss with the anchor swap: d_an becomes min(d_an, d_pn).

        [d_ap - min(d_an, d_pn) + margin]+

    per triplet of an anchor a, a positive p and a negative n, with distance d and
    [x]+ = max(x, 0). With `references`, d_pn is a distance between references.

    Reference: Balntas et al., Learning Local Feature Descriptors with Triplets and Shallow
    Convolutional Neural Networks, BMVC 2016.

    Args:
        margin: By how much a negative must be farther than a positive.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.swap_triplet(x, np.array([0, 1, 0, 1])):.3f}")
    0.832
    """
    references = batch.references
    distances = distance_fn(batch.anchors, references)
    between = distances if batch.within_batch else distance_fn(references, references)

    def entries(d_ap, d_an, d_pn):
        return jax.nn.relu(d_ap - jnp.minimum(d_an, d_pn) + margin)

    return _over_triplets(batch, [entries], distances, between)


@pair_loss(ops.mean_of_active)
def margin(
    batch: Batch,
    *,
    margin: Scalar = 0.2,
    beta: Scalar | Float[Array, "c"] = 1.2,
    distance_fn: DistanceFn = ops.unit_euclidean,
) -> Array:
    """Computes the margin loss: positives nearer than a learned boundary, negatives farther.

        [d_ap - beta + margin]+ + [beta - d_an + margin]+

    per triplet of an anchor a, a positive p and a negative n, with distance d and
    [x]+ = max(x, 0). The default is the sum over triplets, divided by the number of terms above 0.

    Reference: Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, arXiv:1706.07567.
    The paper adds `miners.distance_weighted`.

    Args:
        margin: Half the width of the gap around the boundary.
        beta: The boundary: a number, an array to be learned, or an array of one value per class,
            which needs integer labels and takes the value of the anchor's class. A label that is no
            class then raises, or gives NaN inside `jit`, where its value is unknown.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.margin(x, np.array([0, 1, 0, 1])):.3f}")
    0.528
    """
    beta = jnp.asarray(beta, batch.anchors.dtype)
    if beta.ndim:
        labels = batch.labels
        if beta.ndim > 1 or isinstance(labels, ops.Pairs) or np.ndim(labels) != 1:
            raise ValueError(
                "beta must be a number, or one per class [c] with integer labels [b], not "
                f"{list(beta.shape)}"
            )
        if beta.size == 1:
            beta = beta[0]
        else:
            of_rows = beta[jnp.asarray(labels)][:, None]
            beta, _, _ = mask_rows(of_rows, labels, len(beta), batch.where)
    # The terms need only d - beta.
    shifted = distance_fn(batch.anchors, batch.references) - beta

    # 0 * d gives one entry per triplet.
    pull, push = (
        lambda ap, an, pn: jax.nn.relu(ap + margin) + 0 * an,
        lambda ap, an, pn: jax.nn.relu(margin - an) + 0 * ap,
    )
    return _over_triplets(batch, [pull, push], shifted)


@pair_loss(ops.mean)
def semihard_triplet(
    batch: Batch, *, margin: Scalar = 1.0, distance_fn: DistanceFn = ops.squared_euclidean
) -> Array:
    """Computes the triplet loss with the nearest negative beyond the positive of each pair.

        [d_ap - d_an + margin]+

    per positive pair (a, p), with squared distances d of embeddings of any length and
    [x]+ = max(x, 0). The negative n is the nearest one with d_an > d_ap, or the farthest negative
    if there is none.

    Reference: Schroff et al., FaceNet: A Unified Embedding for Face Recognition and Clustering,
    CVPR 2015, arXiv:1503.03832.

    Args:
        margin: By how much a negative must be farther than a positive.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.semihard_triplet(x, np.array([0, 1, 0, 1])):.3f}")
    1.100
    """
    positives, negatives = batch.pairs
    distances = distance_fn(batch.anchors, batch.references)
    farthest = jnp.max(distances, axis=1, where=negatives, initial=-jnp.inf)

    def entries(column, distances, negatives, farthest):
        d_ap = ops.take_column(distances, column)
        beyond = negatives & ~(distances <= d_ap)
        nearest_beyond = jnp.min(distances, axis=1, where=beyond, initial=jnp.inf)
        d_an = jnp.where(nearest_beyond < jnp.inf, nearest_beyond, farthest)
        return jax.nn.relu(d_ap[:, 0] - d_an + margin)

    positives = positives & jnp.any(negatives, axis=1)[:, None]
    farthest = jnp.where(jnp.isneginf(farthest), 0, farthest)
    return _over_positives(entries, batch.reduce_fn, positives, distances, negatives, farthest)


@pair_loss(ops.mean)
def angular(batch: Batch, *, alpha: Scalar = 40.0) -> Array:
    """Computes the angular loss: bounds the angle at the negative of every triplet.

        log(1 + sum_N exp(4 tan^2(alpha) (a + p).n - 2 (1 + tan^2(alpha)) a.p))

    per positive pair (a, p), with unit embeddings and the anchor's negatives N.

    Reference: Wang et al., Deep Metric Learning with Angular Loss, ICCV 2017, arXiv:1708.01682.

    Args:
        alpha: Upper bound of the angle, in degrees.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> print(f"{losses.angular(x, np.array([0, 1, 0, 1])):.3f}")
    3.995
    """
    positives, negatives = batch.pairs
    anchors = ops.normalize(batch.anchors)
    references = anchors if batch.within_batch else ops.normalize(batch.references)
    cosines = ops.matmul(anchors, references.T)
    between = cosines if batch.within_batch else ops.matmul(references, references.T)
    tan = np.tan if isinstance(alpha, int | float) else jnp.tan
    tan_squared = tan(radians(alpha)) ** 2

    def entries(column, cosines, between, negatives):
        logits = 4 * tan_squared * (cosines + between[column])
        logits = logits - 2 * (1 + tan_squared) * ops.take_column(cosines, column)
        return jax.nn.softplus(ops.logsumexp(logits, where=negatives))

    positives = positives & jnp.any(negatives, axis=1)[:, None]
    return _over_positives(entries, batch.reduce_fn, positives, cosines, between, negatives)


def _over_triplets(
    batch: Batch, entry_fns: list[Callable], distances: Array, between: Array | None = None
) -> Array:
    """Reduces the entries `f(d_ap, d_an, d_pn)` of each function over all mined triplets, and adds.

    d_ap and d_an are from `distances [b n]`, d_pn from `between [n n]`, or None without it. Entries
    of each function are counted apart: the count of the result is the sum of their counts.
    """
    unit_distances: Any
    select_fn: Callable | None
    reduce_fn, mined = batch.reduce_fn, batch.mined
    assert mined is not None
    if isinstance(mined, Triplets):
        (positives, negatives), unit_distances, select_fn = mined
        square = unit_distances.shape[0] == unit_distances.shape[1]
    else:
        (positives, negatives), unit_distances, select_fn, square = mined, None, None, False

    if reduce_fn is None:
        d_ap, d_an = distances[:, :, None], distances[:, None, :]
        d_pn = None if between is None else between[None]
        valid = positives[:, :, None] & negatives[:, None, :]
        if select_fn is not None:
            valid &= select_fn(
                unit_distances[:, :, None],
                unit_distances[:, None, :],
                unit_distances[None] if square else None,
            )
        entries = [ops.reduce(None, f(d_ap, d_an, d_pn), valid) for f in entry_fns]
        return functools.reduce(jnp.add, entries)

    def round_result(column, valid, distances, between, negatives, unit_distances):
        d_ap = ops.take_column(distances, column)
        d_pn = None if between is None else between[column]
        keep = negatives & valid[:, None]
        if select_fn is not None:
            unit_d_pn = unit_distances[column] if square else None
            keep &= select_fn(ops.take_column(unit_distances, column), unit_distances, unit_d_pn)
        reduced = [total_and_count(reduce_fn, f(d_ap, distances, d_pn), keep) for f in entry_fns]
        return tuple(sum(terms) for terms in zip(*reduced, strict=True))

    check_function("reduce_fn", reduce_fn, "ops.mean")
    operands = (distances, between, negatives, unit_distances)
    return ops.divide(*ops.sum_over_true(round_result, positives, *operands))


def _over_positives(entry_fn: Callable, reduce_fn: ReduceFn | None, positives, *operands) -> Array:
    """Reduces `entry_fn(column, *operands) -> [b]` over all positive pairs."""
    if reduce_fn is not None:
        check_function("reduce_fn", reduce_fn, "ops.mean")
    shape = positives.shape

    def round_result(column, valid, *operands):
        entries = entry_fn(column, *operands)
        if reduce_fn is not None:
            return total_and_count(reduce_fn, entries, valid)
        zeros = jnp.zeros(shape, entries.dtype)
        places = zeros.at[jnp.arange(len(column)), column]
        return places.add(jnp.where(valid, entries, 0), unique_indices=True)

    result = ops.sum_over_true(round_result, positives, *operands)
    return result if reduce_fn is None else ops.divide(*result)
