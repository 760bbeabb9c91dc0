"""A map of the embeddings: a position in the plane for every item."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import retrieval
from dmljax.metrics.sides import in_turn
from dmljax.retrieval.inputs import Embeddings, Labels

ANCHORS = 2000
_NEIGHBORS, _TEMPERATURE = 3, 0.03  # anchors that place an item, weighted by exp(s / temperature)


def map_positions(
    embeddings: Embeddings,
    labels: Labels,
    *,
    anchors: int = ANCHORS,
    seed: int = 0,
    devices: Sequence[Any] | None = None,
) -> Float[np.ndarray, "n 2"]:
    """Computes a position of every item by t-SNE (van der Maaten & Hinton, 2008); NaN for NaN.

    Embeddings of 1 or 2 dimensions are their own map. Up to `anchors` items are placed by t-SNE of
    their unit vectors, with perplexity min(30, (n - 1) / 4) and a start by principal components. Of
    more items, t-SNE places `anchors`, drawn by class in turn, and every other item lies at the
    mean of its 3 nearest anchors with weights exp(cosine / 0.03). The same embeddings give the same
    map. Neighborhoods in a map mean something; far distances, sizes and gaps do not.
    """
    vectors, labels = np.asarray(embeddings), np.asarray(labels)
    rows = np.flatnonzero(np.isfinite(vectors).all(axis=1))
    positions, dimension = np.full((len(vectors), 2), np.nan), vectors.shape[1]
    if dimension <= 2:
        positions[rows] = np.pad(vectors[rows], ((0, 0), (0, 2 - dimension)))
        return positions
    points = np.asarray(vectors[rows], np.float32)
    points = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    chosen = _anchors(labels[rows], anchors, seed)
    anchor_positions = _tsne(points[chosen])
    positions[rows[chosen]] = anchor_positions
    others = np.setdiff1d(np.arange(len(rows)), chosen)
    if not len(others):
        return positions
    near, cosines = retrieval.nearest(
        points[others],
        points[chosen],
        k=_NEIGHBORS,
        similarity_fn=retrieval.cosine,
        devices=devices,
    )
    weights = np.exp((cosines - cosines[:, :1]) / _TEMPERATURE)
    weights /= weights.sum(axis=1, keepdims=True)
    positions[rows[others]] = np.einsum("nk,nkd->nd", weights, anchor_positions[near])
    return positions


def _anchors(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draws at most `count` items, from the classes in turn; returns their sorted indices."""
    order = np.random.default_rng(seed).permutation(len(labels))
    return np.sort(in_turn(order, labels)[:count])


def _tsne(x: np.ndarray) -> np.ndarray:
    """Computes t-SNE `[n 2]` of unit vectors `[n d]` with all pairs in every step.

    It starts at the first two principal components and draws nothing, so that the same vectors give
    the same positions. For the first 80 of 300 steps, attraction is 12 times as strong.
    """
    n = len(x)
    if n == 0 or not np.ptp(x, axis=0).any():  # all embeddings are equal
        return np.zeros((n, 2), np.float32)
    if n < 5:  # too few for a perplexity
        return np.stack([np.arange(n), np.zeros(n)], axis=1).astype(np.float32)
    centered = x - x.mean(axis=0)
    _, _, components = np.linalg.svd(centered.T @ centered, hermitian=True)
    start = centered @ components[:2].T
    start = 1e-4 * start / max(float(start[:, 0].std()), 1e-12)
    attraction = _attraction(jnp.asarray(x), jnp.float32(np.log(min(30.0, (n - 1) / 4))))
    rate = jnp.float32(max(n / 48, 50.0))
    return np.asarray(_descend(attraction, jnp.asarray(start, jnp.float32), rate))


@jax.jit
def _attraction(x: jax.Array, entropy: jax.Array) -> jax.Array:
    """Computes the probabilities P `[n n]` of t-SNE; `entropy` is the log of the perplexity."""
    n = len(x)
    distances = 2 - 2 * jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)
    itself = jnp.eye(n, dtype=bool)
    distances = jnp.where(itself, jnp.inf, jnp.maximum(distances, 0))
    distances = distances - distances.min(axis=1, keepdims=True)

    def weights_of(precision):
        return jnp.exp(-jnp.where(itself, jnp.inf, distances) * precision[:, None])

    def halve(_, bounds):
        low, high = bounds
        middle = jnp.sqrt(low * high)
        weights = weights_of(middle)
        total = weights.sum(axis=1)
        mean = jnp.where(itself, 0, weights * jnp.where(itself, 0, distances)).sum(axis=1) / total
        is_wide = jnp.log(total) + middle * mean > entropy
        return jnp.where(is_wide, middle, low), jnp.where(is_wide, high, middle)

    bounds = jnp.full(n, 1e-3, x.dtype), jnp.full(n, 1e6, x.dtype)
    low, high = jax.lax.fori_loop(0, 40, halve, bounds)
    weights = weights_of(jnp.sqrt(low * high))
    conditional = weights / weights.sum(axis=1, keepdims=True)
    return (conditional + conditional.T) / (2 * n)


@jax.jit
def _descend(attraction: jax.Array, start: jax.Array, rate: jax.Array) -> jax.Array:
    """Runs gradient descent with momentum and gains, as published."""

    def step(i, carry):
        y, velocity, gains = carry
        early = i < 80
        strength = jnp.where(early, 12.0, 1.0)
        a, b = y[:, 0], y[:, 1]
        kernel = 1 / (1 + (a[:, None] - a[None]) ** 2 + (b[:, None] - b[None]) ** 2)
        total = kernel.sum() - len(y)  # without every item with itself
        force = (strength * attraction - kernel / total) * kernel
        sums = force.sum(axis=1)
        pull = jnp.matmul(force, y, precision=jax.lax.Precision.HIGHEST)
        gradient = 4 * (sums[:, None] * y - pull)
        gains = jnp.where(velocity * gradient < 0, gains + 0.2, gains * 0.8)
        gains = jnp.maximum(gains, 0.01)
        velocity = jnp.where(early, 0.5, 0.8) * velocity - rate * gains * gradient
        y = y + velocity
        return y - y.mean(axis=0, keepdims=True), velocity, gains

    carry = start, jnp.zeros_like(start), jnp.ones_like(start)
    return jax.lax.fori_loop(0, 300, step, carry)[0]
