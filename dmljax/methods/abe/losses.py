"""The losses of ABE: of pairs of images, and between the learners of one image."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.ops import Labels, MineFn

__all__ = ["contrastive", "divergence"]


def contrastive(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: float = 1.0,
    push_positives: bool = False,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
) -> Float[Array, ""]:
    """The metric loss of ABE: sum(d^2 of positives, [margin - d^2]+ of negatives) / their number.

    Of embeddings as they are, which are unit vectors in ABE. The square is inside the hinge, and
    one mean goes over both kinds of pairs: `dmljax.losses.contrastive` does neither.
    `push_positives=True` hinges positives too, as a published reading of the formula that lost its
    factor (1 - y) would.
    """
    x = ops.widen(embeddings)
    squares = ops.squared_euclidean(x, x)
    pairs = ops.pairs(labels, where=where)
    if mine_fn is not None:
        distances = jax.lax.stop_gradient(ops.unit_euclidean(x, x))
        pairs = ops.triplets_to_pairs(mine_fn(distances, pairs))
    positives, negatives = pairs
    pushed = positives | negatives if push_positives else negatives
    total = jnp.sum(squares, where=positives)
    total += jnp.sum(jax.nn.relu(margin - squares), where=pushed)
    return ops.divide(total, jnp.sum(positives | negatives, dtype=total.dtype))


def divergence(
    learners: Float[Array, "b m d"], *, margin: float = 1.0, pairs: str = "sum"
) -> Float[Array, ""]:
    """sum_{p<q} [margin - |B_p(x) - B_q(x)|^2]+ of an image's own learners, mean over images.

    The paper sums over images too, which `lambda_div` would have to make up for. `pairs='mean'`
    divides by the m (m - 1) / 2 pairs of learners, as public code does.
    """
    if pairs not in ("sum", "mean"):
        raise ValueError(f"pairs is 'sum' or 'mean', not {pairs!r}")
    m = learners.shape[1]
    first, second = np.triu_indices(m, 1)
    if not len(first):
        return jnp.zeros((), learners.dtype)
    gaps = learners[:, first] - learners[:, second]  # [b pairs d]
    each = jax.nn.relu(margin - jnp.sum(gaps * gaps, axis=2))
    return jnp.mean(jnp.sum(each, axis=1)) / (len(first) if pairs == "mean" else 1)
