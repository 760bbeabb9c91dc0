"""Positions of embeddings in the plane: t-SNE of some, and the others near their neighbors."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dmljax import retrieval

__all__ = ["ANCHORS", "anchors", "plane", "tsne"]

ANCHORS = 2000
_NEAREST_ANCHORS = 3
_WEIGHT_TEMPERATURE = 0.03


def plane(x: np.ndarray, labels: np.ndarray, *, seed: int = 0, most: int = ANCHORS) -> np.ndarray:
    """Positions `[n 2]` of embeddings `[n d]`.

    One or two dimensions are the positions themselves. Of more, at most `most` anchors, drawn from
    the classes in turn, are placed by t-SNE of unit vectors (van der Maaten & Hinton, 2008). Every
    other item lies at the mean of its 3 nearest anchors, with weights exp(cosine / 0.03).
    """
    n, d = x.shape
    if d <= 2:
        return np.pad(np.asarray(x, np.float32), ((0, 0), (0, 2 - d)))
    x = np.asarray(x, np.float32)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    if n <= most:
        return tsne(x)
    chosen = anchors(labels, most, seed=seed)
    positions = np.empty((n, 2), np.float32)
    positions[chosen] = tsne(x[chosen])
    others = np.setdiff1d(np.arange(n), chosen)
    near, cosines = retrieval.nearest(
        x[others], x[chosen], k=_NEAREST_ANCHORS, similarity_fn=retrieval.cosine
    )
    weights = np.exp((cosines - cosines[:, :1]) / _WEIGHT_TEMPERATURE)
    weights /= weights.sum(axis=1, keepdims=True)
    positions[others] = np.einsum("nk,nkd->nd", weights, positions[chosen][near])
    return positions


def anchors(labels: np.ndarray, count: int, *, seed: int = 0) -> np.ndarray:
    """`count` rows in ascending order, drawn from the classes in turn."""
    labels = np.asarray(labels)
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    starts = np.flatnonzero(np.diff(labels[by_class], prepend=labels[by_class[0]] - 1))
    sizes = np.diff(np.append(starts, len(labels)))
    turns = np.arange(len(labels)) - np.repeat(starts, sizes)  # place of a row in its class
    chosen = by_class[np.lexsort((np.arange(len(labels)), turns))[:count]]
    return np.sort(chosen)


def tsne(
    x: np.ndarray, *, perplexity: float = 30.0, steps: int = 300, exaggerated: int = 80
) -> np.ndarray:
    """t-SNE `[n 2]` of unit vectors `[n d]`, without sampling: all pairs, every step.

    It starts at the first two principal components and draws nothing, so that the same vectors give
    the same positions. For `exaggerated` steps, attraction is 12 times as strong.
    """
    n = len(x)
    if n < 4:
        return np.stack([np.arange(n), np.zeros(n)], axis=1).astype(np.float32)
    centered = x - x.mean(axis=0)
    _, _, components = np.linalg.svd(centered.T @ centered, hermitian=True)
    start = centered @ components[:2].T
    start = 1e-4 * start / max(float(start[:, 0].std()), 1e-12)
    attraction = _attraction(x, min(perplexity, (n - 1) / 4))
    positions = _descend(
        attraction,
        jnp.asarray(start, jnp.float32),
        rate=jnp.float32(max(n / 48, 50.0)),
        steps=steps,
        exaggerated=exaggerated,
    )
    return np.asarray(positions)


def _attraction(x: np.ndarray, perplexity: float) -> jax.Array:
    """The symmetric probabilities P `[n n]` of t-SNE, each row's entropy log(perplexity)."""
    return _symmetric_probabilities(jnp.asarray(x), jnp.float32(np.log(perplexity)))


@jax.jit
def _symmetric_probabilities(x: jax.Array, entropy: jax.Array) -> jax.Array:
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


@partial(jax.jit, static_argnames=("steps", "exaggerated"))
def _descend(
    attraction: jax.Array, start: jax.Array, *, rate: jax.Array, steps: int, exaggerated: int
) -> jax.Array:
    """Gradient descent with momentum and gains, as published."""

    def step(i, carry):
        y, velocity, gains = carry
        early = i < exaggerated
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
    return jax.lax.fori_loop(0, steps, step, carry)[0]
