"""Losses of embeddings against learned proxies, one or several per class.

Every loss is `f(embeddings [b d], labels [b], proxies, *, ...) -> scalar` and they share arguments:

* `labels`: int `[b]`, from 0 to c - 1. A label outside raises where its value is known; inside
  `jit` it is not, and the result is NaN.
* `proxies [c d]`, or `[c k d]` with k centres per class: parameters, to be trained along. Their
  length only matters to `large_margin_softmax`.
* `where [b]`: rows that count. Masking a row equals dropping it, whatever its label.
* `reduce_fn`: see `dmljax.ops`; None returns the entries, 0 where they do not count. Class weights
  are `ops.weighted(weights[labels])`.

Notation: s is the cosine and t the angle between an embedding and a proxy, y the row's own class,
and CE(z) = -log softmax(z)_y.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from dmljax import ops
from dmljax.losses._common import matrix, rows
from dmljax.ops import Array, ReduceFn

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

Scalar = float | Float[Array, ""]  # may be learned, or scheduled


def normalized_softmax(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    temperature: Scalar = 0.05,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CE(s / temperature), a softmax on unit vectors (Zhai & Wu, BMVC 2019)."""
    batch = _prepare(embeddings, labels, proxies, where)
    return _cross_entropy(_cosines(batch), _same, 1 / temperature, batch, reduce_fn)


def cosface(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    margin: Scalar = 0.35,
    scale: Scalar = 64.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CE(scale s) with s_y - margin for the own class (Wang et al., CVPR 2018)."""
    batch = _prepare(embeddings, labels, proxies, where)
    return _cross_entropy(_cosines(batch), lambda s: s - margin, scale, batch, reduce_fn)


def arcface(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    margin: Scalar = 28.6,
    scale: Scalar = 64.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CE(scale s) with cos(t_y + margin) for the own class (Deng et al., CVPR 2019).

    `margin` in degrees, from 0 to 180. Beyond t_y = 180 - margin, where that cosine would rise
    again, it is s_y - margin sin(margin), with the margin in radians.
    """
    batch = _prepare(embeddings, labels, proxies, where)
    return _cross_entropy(_cosines(batch), _add_angle(margin), scale, batch, reduce_fn)


def subcenter_arcface(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c k d"],
    *,
    margin: Scalar = 28.6,
    scale: Scalar = 64.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """`arcface` on the nearest of each class's k centres (Deng et al., ECCV 2020)."""
    batch = _prepare(embeddings, labels, proxies, where, centres=True)
    nearest = functools.reduce(jnp.maximum, _centre_cosines(batch))
    return _cross_entropy(nearest, _add_angle(margin), scale, batch, reduce_fn)


def sphereface(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    margin: int = 4,
    scale: Scalar = 1.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """`large_margin_softmax` with proxies of length 1 (Liu et al., CVPR 2017)."""
    batch = _prepare(embeddings, labels, proxies, where)
    lengths = scale * _norm(batch.x)[:, None]
    return _cross_entropy(_cosines(batch), _multiply_angle(margin), lengths, batch, reduce_fn)


def large_margin_softmax(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    margin: int = 4,
    scale: Scalar = 1.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CE(scale |x| |w| s) with psi(t_y) for the own class (Liu et al., ICML 2016).

    psi(t) = (-1)^k cos(margin t) - 2k for t in [k, k + 1] pi / margin: it falls all the way, from 1
    to 1 - 2 margin.
    """
    batch = _prepare(embeddings, labels, proxies, where)
    lengths = scale * _norm(batch.x)[:, None] * _norm(batch.proxies)[None, :]
    return _cross_entropy(_cosines(batch), _multiply_angle(margin), lengths, batch, reduce_fn)


def soft_triple(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c k d"],
    *,
    la: Scalar = 20.0,
    gamma: Scalar = 0.1,
    margin: Scalar = 0.01,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CE(la s) with s_y - margin, s_c a soft maximum over k centres (Qian et al., ICCV 2019).

    s_c = sum_k softmax_k(s_ck / gamma) s_ck. The paper adds 0.2 times
    `dmljax.losses.sparse_centers` of the proxies.
    """
    batch = _prepare(embeddings, labels, proxies, where, centres=True)
    cosines = _centre_cosines(batch)
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, cosines))
    shares = [jnp.exp((s - peak) / gamma) for s in cosines]
    soft = sum(e * s for e, s in zip(shares, cosines, strict=True)) / sum(shares)
    return _cross_entropy(soft, lambda s: s - margin, la, batch, reduce_fn)


def proxy_anchor(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    margin: Scalar = 0.1,
    alpha: Scalar = 32.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """Every proxy against the rows of the batch (Kim et al., CVPR 2020).

    log(1 + sum_{y = c} exp(-alpha (s - margin))) averaged over the classes of the rows that count,
    plus log(1 + sum_{y != c} exp(alpha (s + margin))) averaged over all classes. Entries per class.
    """
    batch = _prepare(embeddings, labels, proxies, where)
    cosines = _cosines(batch)
    positives = batch.target & batch.where[:, None]
    negatives = ~batch.target & batch.where[:, None]
    pull = _log_1_plus_sum_exp(-alpha * (cosines - margin), positives)
    push = _log_1_plus_sum_exp(alpha * (cosines + margin), negatives)
    present = jnp.any(positives, axis=0)
    everyone = jnp.ones(present.shape, bool)
    return ops.reduce(reduce_fn, pull, present) + ops.reduce(reduce_fn, push, everyone)


def proxy_nca(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    softmax_scale: Scalar = 1.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """CE(-softmax_scale d^2) on unit vectors (Movshovitz-Attias et al., ICCV 2017).

    The own proxy stands in the denominator too, as in all published code; the paper's formula
    leaves it out and is not bounded below.
    """
    batch = _prepare(embeddings, labels, proxies, where)
    # d^2 = 2 - 2 s, and a softmax does not see what all its logits share.
    return _cross_entropy(_cosines(batch), _same, 2 * softmax_scale, batch, reduce_fn)


def proxy_nca_pp(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "c d"],
    *,
    temperature: Scalar = 1 / 9,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """`proxy_nca` made sharper: CE(-d^2 / temperature) (ProxyNCA++, Teh et al., ECCV 2020)."""
    return proxy_nca(
        embeddings,
        labels,
        proxies,
        softmax_scale=1 / temperature,
        where=where,
        reduce_fn=reduce_fn,
    )


def label_smoothed_cross_entropy(
    logits: Float[Array, "b c"],
    labels: Integer[Array, "b"],
    *,
    epsilon: float = 0.1,
    temperature: Scalar = 1.0,
    where: Bool[Array, "b"] | None = None,
    reduce_fn: ReduceFn | None = ops.mean,
) -> Float[Array, "..."]:
    """(1 - epsilon) CE(z) + epsilon mean_c(-log softmax(z)_c), z = logits / temperature.

    `epsilon` of the target is spread over all classes, the own one too (Szegedy et al., CVPR 2016).
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is a share between 0 and 1, not {epsilon}")
    logits = matrix("logits", logits)
    logits, target, where = _rows(logits, labels, logits.shape[1], where)
    log_shares = jax.nn.log_softmax(logits / temperature, axis=1)
    own = jnp.sum(log_shares, axis=1, where=target)
    entries = -(1 - epsilon) * own - epsilon * jnp.mean(log_shares, axis=1)
    return ops.reduce(reduce_fn, entries, where)


# --- the core -----------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """Embeddings `x [b d]`, proxies, which class is a row's own `[b c]`, which rows count."""

    x: Array
    proxies: Array
    target: Array
    where: Array


def _cross_entropy(
    cosines: Array, margin_fn: Callable, scale, batch: _Batch, reduce_fn: ReduceFn | None
) -> Array:
    """CE(scale z) where z is `cosines [b c]` but for z_y = margin_fn(s_y)."""
    _, _, target, where = batch
    own = margin_fn(jnp.sum(cosines, axis=1, where=target))
    scale = jnp.broadcast_to(jnp.asarray(scale, cosines.dtype), cosines.shape)
    own_logits = own * jnp.sum(scale, axis=1, where=target)
    # The own class against all others, so that a loss near 0 keeps its digits.
    others = ops.logsumexp(scale * cosines, where=~target)
    if cosines.shape[1] == 1:
        others = jnp.full_like(others, -jnp.inf)
    return ops.reduce(reduce_fn, jax.nn.softplus(others - own_logits), where)


def _same(cosines):
    return cosines


def _add_angle(margin) -> Callable:
    """cos(t + margin), continued downwards from where it would rise again."""
    if isinstance(margin, int | float) and not 0 <= margin <= 180:
        raise ValueError(f"margin is an angle from 0 to 180 degrees, not {margin}")
    margin = jnp.deg2rad(margin)

    def margin_fn(cosines):
        # By the sum of angles, not by acos: its slope is infinite for an embedding that is parallel
        # to its proxy, whereas `ops.sqrt` has slope 0 there, as the angle has on average.
        sines = ops.sqrt((1 - cosines) * (1 + cosines))
        moved = cosines * jnp.cos(margin) - sines * jnp.sin(margin)
        return jnp.where(
            cosines < -jnp.cos(margin), cosines - margin * jnp.sin(margin), moved
        ).astype(cosines.dtype)

    return margin_fn


def _multiply_angle(margin: int) -> Callable:
    """psi(t), see `large_margin_softmax`, as a polynomial in cos t."""
    if margin != int(margin) or margin < 1:
        raise ValueError(f"margin multiplies the angle: a whole number from 1 on, not {margin}")
    margin = int(margin)
    edges = np.cos(np.pi * np.arange(1, margin) / margin)

    def margin_fn(cosines):
        below, multiple = jnp.ones_like(cosines), cosines  # cos(0 t), cos(1 t)
        for _ in range(margin - 1):
            below, multiple = multiple, 2 * cosines * multiple - below
        k = sum(((cosines <= edge).astype(cosines.dtype) for edge in edges), jnp.zeros_like(below))
        return (1 - 2 * (k % 2)) * multiple - 2 * k

    return margin_fn


def _cosines(batch: _Batch) -> jax.Array:
    """Of every row with every proxy: [b c]."""
    return ops.matmul(ops.normalize(batch.x), ops.normalize(batch.proxies).T)


def _centre_cosines(batch: _Batch) -> list[jax.Array]:
    """Of every row with the first centre of every class, with the second, ...: k arrays [b c]."""
    x, proxies = ops.normalize(batch.x), ops.normalize(batch.proxies)
    # One array [b c k] would be reduced along its short last axis, which is slow.
    return [ops.matmul(x, proxies[:, k].T) for k in range(proxies.shape[1])]


def _norm(x: Array) -> jax.Array:
    # Divided by the largest entry first, so that no square overflows.
    peak = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    peak = jnp.where(peak > 0, peak, 1)
    return ops.sqrt(jnp.sum((x / peak) ** 2, axis=-1)) * peak[..., 0]


def _log_1_plus_sum_exp(x, where):
    """Over the rows; 0 for a class without any."""
    sums = jax.nn.softplus(ops.logsumexp(x, where=where, axis=0))
    return jnp.where(jnp.any(where, axis=0), sums, 0)


# --- arguments ----------------------------------------------------------------------------------


def _prepare(embeddings, labels, proxies, where, *, centres: bool = False) -> _Batch:
    x = matrix("embeddings", embeddings)
    proxies = jnp.asarray(proxies)
    axes = ["c", "k", "d"] if centres else ["c", "d"]
    if proxies.ndim != len(axes) or 0 in proxies.shape or proxies.shape[-1] != x.shape[1]:
        raise ValueError(
            f"proxies must be [{' '.join(axes)}] with d = {x.shape[1]} as the embeddings have, "
            f"not of shape {proxies.shape}"
        )
    if not jnp.issubdtype(proxies.dtype, jnp.floating):
        raise ValueError(f"proxies must be floats, not {proxies.dtype}")
    x, target, where = _rows(x, labels, len(proxies), where)
    return _Batch(x, ops.widen(proxies), target, where)


def _rows(x: Array, labels, classes: int, where) -> tuple[Array, Array, Array]:
    """The rows, 0 where they do not count; which class is their own; which of them count."""
    shape, dtype = jnp.shape(labels), jnp.asarray(labels).dtype
    if shape != x.shape[:1] or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"labels must be int [{len(x)}], not {dtype} {list(shape)}")
    counts = rows(where, x)
    _check_range(labels, classes, where)
    own = jnp.where(counts, jnp.asarray(labels), 0)
    target = own[:, None] == jnp.arange(classes)[None, :]
    # A label that names no class has no loss. NaN says so where no exception can.
    x = jnp.where(jnp.any(target, axis=1)[:, None], x, jnp.nan)
    return jnp.where(counts[:, None], x, 0), target, counts


def _check_range(labels, classes: int, where) -> None:
    if isinstance(labels, jax.core.Tracer) or isinstance(where, jax.core.Tracer):
        return
    labels, where = jax.device_get((labels, where))
    labels = np.asarray(labels)
    wrong = (labels < 0) | (labels >= classes)
    wrong = np.flatnonzero(wrong if where is None else wrong & where)
    if wrong.size:
        row = wrong[0]
        raise ValueError(
            f"label {labels[row]} in row {row} names none of the {classes} classes, which are "
            f"0 to {classes - 1}"
        )
