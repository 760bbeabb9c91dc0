"""The losses of DVML, and its n-pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import losses, ops
from dmljax.ops import Labels

__all__ = ["divergence", "n_pairs", "reconstruction"]


def divergence(mean: Float[Array, "b d"], log_variance: Float[Array, "b d"]) -> Float[Array, ""]:
    """KL of N(mean, variance) from N(0, 1): sum over dimensions, mean over the batch.

    (variance + mean^2 - log variance - 1) / 2. The paper's equation 8 prints the negative of it,
    and other public code divides by the batch twice.
    """
    # Beyond exp(20) a tangent goes on, which pulls the variance back where exp would overflow.
    variance = jnp.exp(jnp.minimum(log_variance, 20)) * (1 + jax.nn.relu(log_variance - 20))
    each = (variance + mean**2 - log_variance - 1) / 2
    return jnp.mean(jnp.sum(each, axis=1))


def reconstruction(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"], *, form: str = "norm"
) -> Float[Array, ""]:
    """How far the features decoded from t samples are from the features.

    "norm": mean of |f - f'| over samples and batch, the paper's equation 9. "half_sum": half the
    sum of squares over batch and dimensions, as in public code for 128 dimensions; it grows with
    the batch and is 1e3 to 1e5 times as large. "mean_square": mean over all entries, as in others.
    """
    gaps = decoded - features[None, :, :]
    squares = gaps * gaps
    if form == "norm":
        return jnp.mean(ops.sqrt(jnp.sum(squares, axis=2)))
    if form == "half_sum":
        return jnp.mean(jnp.sum(squares, axis=(1, 2))) / 2
    if form == "mean_square":
        return jnp.mean(squares)
    raise ValueError(f"form is 'norm', 'half_sum' or 'mean_square', not {form!r}")


def n_pairs(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    l2_weight: float = 3e-3,
    where: Bool[Array, "b"] | None = None,
) -> Float[Array, ""]:
    """`losses.n_pairs` on dot products of embeddings as they are (Sohn, NeurIPS 2016).

    With `l2_weight` / 4 times the mean squared norms of anchors and positives: 3e-3 in the code
    that DVML's grew from, which recommends 1.5e-2 for CUB.
    """
    return losses.n_pairs(embeddings, labels, l2_weight=l2_weight, distance_fn=ops.dot, where=where)
