"""What miners share: checks of their arguments, and selections in rows of masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.ops import Array, Pairs
from dmljax.ops.loops import vary

Distances = Float[Array, "b n"]  # Euclidean distances of unit embeddings


def check(distances, pairs) -> tuple[jax.Array, Pairs]:
    """Checks the arguments of a miner.

    Arguments of all miners:

    distances: Euclidean distances of unit embeddings, not squared.
    pairs: The positives and negatives to select from.
    """
    if not isinstance(pairs, tuple | list) or len(pairs) != 2:
        raise TypeError(
            f"pairs must be ops.pairs(labels), got {type(pairs).__name__}: of triplets, such as of "
            "another miner, take ops.triplets_to_pairs(triplets)"
        )
    distances = jax.lax.stop_gradient(ops.widen(distances))
    pairs = Pairs(*map(jnp.asarray, pairs))
    for name, mask in zip(Pairs._fields, pairs, strict=True):
        if mask.shape != distances.shape or mask.dtype != jnp.bool_:
            raise ValueError(
                f"{name} must be bool {list(distances.shape)} as the distances are, not "
                f"{mask.dtype} {list(mask.shape)}"
            )
    return distances, pairs


def batch_size(miner: str, distances) -> int:
    """Returns the number of rows of a batch that is compared with itself, or raises."""
    b, n = distances.shape
    if b != n:
        raise ValueError(
            f"{miner} works without references only: distances must be [b b], not {[b, n]}"
        )
    return b


def with_both_kinds(positives, negatives) -> Pairs:
    """Returns the pairs of the anchors that have positives and negatives."""
    has_positive, has_negative = (jnp.any(m, axis=1, keepdims=True) for m in (positives, negatives))
    has_both_kinds = has_positive & has_negative
    return Pairs(positives & has_both_kinds, negatives & has_both_kinds)


def best(distances, candidates, best_fn):
    """Selects in each row the candidate that `best_fn`, `jnp.argmin` or `jnp.argmax`, finds."""
    worst = -jnp.inf if best_fn is jnp.argmax else jnp.inf
    column = best_fn(jnp.where(candidates, distances, worst), axis=1)
    return candidates & (jnp.arange(distances.shape[1])[None, :] == column[:, None])


@functools.partial(jax.jit, inline=True)  # compiled once, also outside of the caller's jax.jit
def top(scores, where, count):
    """Marks the `count [r]` largest of the `scores [r m]` in each row of `where`.

    NaN is larger than all numbers; of equal scores, the first are taken. The threshold is found bit
    by bit, in one pass for each bit of a float. On all devices that is much faster than sorting.
    """
    bits = 8 * scores.dtype.itemsize
    unsigned = jnp.dtype(f"uint{bits}")
    sign, largest = unsigned.type(1 << (bits - 1)), np.iinfo(unsigned).max
    scores_without_minus_0 = jnp.where(scores == 0, 0, scores)
    keys = jax.lax.bitcast_convert_type(scores_without_minus_0, unsigned)
    keys = jnp.where(keys >= sign, ~keys, keys | sign)  # the order of the floats
    keys = jnp.where(jnp.isnan(scores), unsigned.type(largest), keys)
    keys = jnp.where(where, keys, 0)  # less than the key of -inf
    count = count[:, None]

    def refine(i, threshold):
        trial = threshold | (sign >> i.astype(unsigned))
        return jnp.where(jnp.sum(keys >= trial, axis=1, keepdims=True) >= count, trial, threshold)

    zeros = vary(jnp.zeros(count.shape, unsigned), keys, count)
    threshold = jax.lax.fori_loop(0, bits, refine, zeros)
    above, ties = where & (keys > threshold), where & (keys == threshold)
    missing = count - jnp.sum(above, axis=1, keepdims=True)
    return above | (ties & (jnp.cumsum(ties, axis=1) <= missing))
