"""Miners that draw pairs at random."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dmljax.miners._common import Distances, check, top
from dmljax.ops import Pairs
from dmljax.ops.loops import vary

__all__ = ["distance_weighted", "uniform_histogram"]


def distance_weighted(
    distances: Distances,
    pairs: Pairs,
    *,
    key: PRNGKeyArray,
    dim: int,
    cutoff: float = 0.5,
    nonzero_loss_cutoff: float = 1.4,
) -> Pairs:
    """Draws negatives evenly over distances: the same number per anchor as its positives.

    Weights are 1 / q(max(d, cutoff)), where q(d) = d^(dim - 2) (1 - d^2 / 4)^((dim - 3) / 2) is the
    density of distances between random points of the unit sphere. Negatives are distinct. All
    positives of an anchor that draws are kept.

    Reference: Wu et al., Sampling Matters in Deep Embedding Learning, ICCV 2017, arXiv:1706.07567.

    Args:
        key: JAX key of the draw.
        dim: Dimensions of the embeddings.
        cutoff: Distances below this have the weight of this distance.
        nonzero_loss_cutoff: Negatives farther than this are not drawn.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.distance_weighted, key=jax.random.key(0), dim=2)
    >>> print(f"{losses.margin(x, np.array([0, 0, 1, 1]), mine_fn=mine_fn):.3f}")
    0.506
    """
    if dim < 2:
        raise ValueError(f"dim, the dimensions of the embeddings, must be at least 2, not {dim}")
    distances, (positives, negatives) = check(distances, pairs)
    squares = jnp.maximum(distances, cutoff) ** 2
    negatives = negatives & ~(distances >= nonzero_loss_cutoff) & ~(squares >= 4)
    squares = jnp.where(negatives, squares, 1)
    log_weights = (1 - dim / 2) * jnp.log(squares) + (1.5 - dim / 2) * jnp.log1p(-squares / 4)
    # The k largest of log weight + Gumbel noise are k draws by weight, without replacement.
    scores = log_weights + jax.random.gumbel(key, distances.shape, distances.dtype)
    drawn = top(scores, negatives, jnp.sum(positives, axis=1, dtype=jnp.int32))
    return Pairs(positives & jnp.any(drawn, axis=1, keepdims=True), drawn)


def uniform_histogram(
    distances: Distances,
    pairs: Pairs,
    *,
    key: PRNGKeyArray,
    num_bins: int = 100,
    pos_per_bin: int = 10,
    neg_per_bin: int = 10,
) -> Pairs:
    """Draws distinct pairs from bins of distance, up to the same number from every bin.

    Bins have equal width, from the smallest to the largest distance of the kind.

    Args:
        key: JAX key of the draw.
        num_bins: Number of bins for each kind.
        pos_per_bin: At most this many positive pairs per bin.
        neg_per_bin: At most this many negative pairs per bin.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.uniform_histogram, key=jax.random.key(0))
    >>> print(f"{losses.contrastive(x, np.array([0, 0, 1, 1]), mine_fn=mine_fn):.3f}")
    0.738
    """
    if num_bins < 1:
        raise ValueError(f"num_bins must be at least 1, not {num_bins}")
    distances, (positives, negatives) = check(distances, pairs)

    def bins(mask):
        low = jnp.min(distances, where=mask, initial=jnp.inf)
        width = (jnp.max(distances, where=mask, initial=-jnp.inf) - low) / num_bins
        position = (distances - low) / jnp.where(width > 0, width, 1)
        position = jnp.where(mask & (width > 0), position, 0)
        return jnp.clip(position.astype(jnp.int32), 0, num_bins - 1)

    # Bins of the positives, bins of the negatives, and one last bin for all other pairs. Taking the
    # pair with the largest random number from every bin, again and again, is much cheaper than
    # sorting the numbers, and a maximum does not depend on the order in which it is computed.
    ignored = 2 * num_bins
    negative_bins = jnp.where(negatives, num_bins + bins(negatives), ignored)
    bin_of_pair = jnp.where(positives, bins(positives), negative_bins).ravel()
    quota = jnp.where(bin_of_pair < num_bins, pos_per_bin, neg_per_bin)
    numbers = (jax.random.bits(key, bin_of_pair.shape, jnp.uint32) >> 1).astype(jnp.int32)
    index = jnp.arange(bin_of_pair.size, dtype=jnp.int32)

    def draw(i, drawn):
        largest = jax.ops.segment_max(jnp.where(drawn, -1, numbers), bin_of_pair, ignored + 1)
        ties = ~drawn & (numbers == largest[bin_of_pair])
        first = jax.ops.segment_min(jnp.where(ties, index, index.size), bin_of_pair, ignored + 1)
        return drawn | ((index == first[bin_of_pair]) & (i < quota))

    drawn = vary(jnp.zeros(bin_of_pair.shape, bool), bin_of_pair, numbers)
    drawn = jax.lax.fori_loop(0, max(pos_per_bin, neg_per_bin), draw, drawn)
    drawn = drawn.reshape(distances.shape) | jnp.isnan(distances)
    return Pairs(positives & drawn, negatives & drawn)
