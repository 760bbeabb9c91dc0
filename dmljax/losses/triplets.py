"""Losses over triplets (anchor, positive, negative), in O(b n) memory.

They loop over each anchor's positives while running (`ops.sum_over_true`), so a batch of K images
per class costs K - 1 rounds over its distances, and nothing of size b^3 is stored. Arguments are
those of `dmljax.losses.pairs`. Without `reduce_fn` the entries come back, which for `triplet` and
`margin` really are [b n n].
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.losses._common import prepare
from dmljax.ops import Array, DistanceFn, Labels, MineFn, ReduceFn, ReferenceLabels, Triplets

__all__ = ["angular", "margin", "semihard_triplet", "triplet"]


def triplet(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float = 0.05,
    swap: bool = False,
    smooth: bool = False,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean_of_active,
) -> Float[Array, "..."]:
    """[d_ap - d_an + margin]+ over all triplets (Weinberger & Saul 2009; Schroff et al., 2015).

    `smooth` takes softplus instead of [.]+ (Hermans et al., 2017); `swap` takes the smaller of d_an
    and d_pn (Balntas et al., BMVC 2016). `mine_fn` may return `ops.Triplets`.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    distances = distance_fn(batch.x, batch.y)
    between = None
    if swap:
        between = distances if batch.own else distance_fn(batch.y, batch.y)
    hinge = jax.nn.softplus if smooth else jax.nn.relu

    def entries(d_ap, d_an, d_pn):
        return hinge(d_ap - (jnp.minimum(d_an, d_pn) if swap else d_an) + margin)

    return _over_triplets([entries], reduce_fn, batch.chosen, distances, between)


def margin(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float = 0.2,
    beta: float | Float[Array, ""] | Float[Array, "c"] = 1.2,
    distance_fn: DistanceFn = ops.unit_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean_of_active,
) -> Float[Array, "..."]:
    """[d_ap - beta + margin]+ + [beta - d_an + margin]+ per triplet (Wu et al., ICCV 2017).

    The sum over triplets divided by the number of terms above 0. `beta` may be learned: a scalar,
    or one value per class, looked up by the anchor's label.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    beta = jnp.asarray(beta, batch.x.dtype)
    if beta.ndim:
        if isinstance(labels, ops.Pairs) or jnp.ndim(labels) != 1:
            raise ValueError("beta per class needs integer labels [b]")
        beta = beta[jnp.asarray(labels)][:, None]
    # Subtracting beta from all distances leaves every d - beta as it was.
    shifted = distance_fn(batch.x, batch.y) - beta

    def pull(d_ap, d_an, d_pn):
        return jax.nn.relu(d_ap + margin) + 0 * d_an  # one entry per triplet

    def push(d_ap, d_an, d_pn):
        return jax.nn.relu(margin - d_an) + 0 * d_ap

    return _over_triplets([pull, push], reduce_fn, batch.chosen, shifted, None)


def semihard_triplet(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float = 1.0,
    distance_fn: DistanceFn = ops.squared_euclidean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """One negative per positive pair, the nearest beyond it (FaceNet, Schroff et al., CVPR 2015).

    [d_ap - d_an + margin]+ on squared distances of embeddings as they are, where n is the nearest
    negative with d_an > d_ap, or else the farthest negative. Entries per positive pair.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    distances = distance_fn(batch.x, batch.y)
    farthest = jnp.max(distances, axis=1, where=negatives, initial=-jnp.inf)

    def entries(column, distances, negatives, farthest):
        d_ap = _pick(distances, column)
        beyond = jnp.min(distances, axis=1, where=negatives & ~(distances <= d_ap), initial=jnp.inf)
        d_an = jnp.where(beyond < jnp.inf, beyond, farthest)
        return jax.nn.relu(d_ap[:, 0] - d_an + margin)

    positives = positives & jnp.any(negatives, axis=1)[:, None]
    farthest = jnp.where(jnp.isneginf(farthest), 0, farthest)
    return _over_positives(entries, reduce_fn, positives, distances, negatives, farthest)


def angular(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    alpha: float = 40.0,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Bounds the angle at the negative of every triplet (Wang et al., ICCV 2017).

    log(1 + sum_N exp(4 tan^2(alpha) (a + p).n - 2 (1 + tan^2(alpha)) a.p)) on unit vectors, per
    positive pair; `alpha` in degrees.
    """
    batch = prepare(embeddings, labels, references, reference_labels, where, mine_fn)
    positives, negatives = batch.pairs
    x = ops.normalize(batch.x)
    y = x if batch.own else ops.normalize(batch.y)
    cosines = ops.matmul(x, y.T)
    between = cosines if batch.own else ops.matmul(y, y.T)
    slope = np.tan(np.deg2rad(alpha)) ** 2

    def entries(column, cosines, between, negatives):
        forms = 4 * slope * (cosines + between[column])
        forms = forms - 2 * (1 + slope) * _pick(cosines, column)
        return jax.nn.softplus(ops.logsumexp(forms, where=negatives))

    positives = positives & jnp.any(negatives, axis=1)[:, None]
    return _over_positives(entries, reduce_fn, positives, cosines, between, negatives)


# --- pieces -------------------------------------------------------------------------------------


def _pick(matrix: Array, column: Array) -> Array:
    """[b 1]: the entry of every row that stands in its `column`."""
    return jnp.take_along_axis(matrix, column[:, None], axis=1)


def _over_triplets(
    entry_fns: list[Callable], reduce_fn: ReduceFn | None, chosen, distances, between
) -> Array:
    """Reduces the summed entries `f(d_ap, d_an, d_pn)` over all chosen triplets.

    `between [n n]` holds d_pn where a formula wants it. Each of `entry_fns` counts by itself.
    """
    if isinstance(chosen, Triplets):
        (positives, negatives), mined, select_fn = chosen
        square = mined.shape[0] == mined.shape[1]
    else:
        (positives, negatives), mined, select_fn, square = chosen, None, None, False

    if reduce_fn is None:
        d_ap, d_an = distances[:, :, None], distances[:, None, :]
        d_pn = None if between is None else between[None]
        valid = positives[:, :, None] & negatives[:, None, :]
        if select_fn is not None:
            valid &= select_fn(
                mined[:, :, None], mined[:, None, :], mined[None] if square else None
            )
        return sum(ops.reduce(None, f(d_ap, d_an, d_pn), valid) for f in entry_fns)

    def totals(column, valid, distances, between, negatives, mined):
        d_pn = None if between is None else between[column]
        keep = negatives & valid[:, None]
        if select_fn is not None:
            keep &= select_fn(_pick(mined, column), mined, mined[column] if square else None)
        parts = [reduce_fn(f(_pick(distances, column), distances, d_pn), keep) for f in entry_fns]
        return tuple(sum(part) for part in zip(*parts, strict=True))

    return ops.divide(*ops.sum_over_true(totals, positives, distances, between, negatives, mined))


def _over_positives(entry_fn: Callable, reduce_fn: ReduceFn | None, positives, *operands) -> Array:
    """Reduces `entry_fn(column, *operands) -> [b]` over all positive pairs."""

    def totals(column, valid, *operands):
        entries = entry_fn(column, *operands)
        if reduce_fn is not None:
            return reduce_fn(entries, valid)
        zeros = jnp.zeros(positives.shape, entries.dtype)
        return zeros.at[jnp.arange(len(column)), column].add(jnp.where(valid, entries, 0))

    result = ops.sum_over_true(totals, positives, *operands)
    return result if reduce_fn is None else ops.divide(*result)
