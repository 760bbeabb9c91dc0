"""The losses of DVML: the divergence, the reconstruction, and an n-pairs loss on raw products."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import losses, ops
from dmljax.ops import Array, Labels

__all__ = [
    "divergence",
    "n_pairs",
    "reconstruction_half_sum",
    "reconstruction_mean_square",
    "reconstruction_norm",
]


def divergence(mean: Float[Array, "b d"], log_variance: Float[Array, "b d"]) -> Float[Array, ""]:
    """Computes KL(N(mean, variance) | N(0, 1)), summed over dimensions, averaged over the batch.

    (variance + mean^2 - log variance - 1) / 2. Equation 8 of Lin et al. (ECCV 2018) prints its
    negative, and other public code divides by the batch twice.
    """
    # Above exp(20) the variance continues as a straight line: exp would overflow, and the gradient
    # still pulls the variance back.
    variance = jnp.exp(jnp.minimum(log_variance, 20)) * (1 + jax.nn.relu(log_variance - 20))
    terms = (variance + mean**2 - log_variance - 1) / 2
    return jnp.mean(jnp.sum(terms, axis=1))


def reconstruction_norm(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"]
) -> Float[Array, ""]:
    """Computes the mean of |f - f'| over the batch and t samples (Lin et al., ECCV 2018, eq. 9)."""
    return jnp.mean(ops.sqrt(jnp.sum(_squares(features, decoded), axis=2)))


def reconstruction_half_sum(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"]
) -> Float[Array, ""]:
    """Sums (f - f')^2 / 2 over batch and dimensions, averaged over t samples, as in public code.

    It grows with the batch and is 1e3 to 1e5 times as large as `reconstruction_norm`.
    """
    return jnp.mean(jnp.sum(_squares(features, decoded), axis=(1, 2))) / 2


def reconstruction_mean_square(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"]
) -> Float[Array, ""]:
    """Averages (f - f')^2 over samples, batch and dimensions, as in other public code."""
    return jnp.mean(_squares(features, decoded))


def n_pairs(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    l2_weight: float = 3e-3,
    where: Bool[Array, "b"] | None = None,
) -> Float[Array, ""]:
    """Computes `losses.n_pairs` without normalization of embeddings (Sohn, NeurIPS 2016).

    Adds `l2_weight` / 4 times the mean squared norms of anchors and of positives. The predecessor
    of DVML's public code uses 3e-3, and recommends 1.5e-2 for CUB.
    """
    return losses.n_pairs(embeddings, labels, l2_weight=l2_weight, distance_fn=ops.dot, where=where)


def _squares(features, decoded):
    gaps = decoded - features[None, :, :]
    return gaps * gaps
