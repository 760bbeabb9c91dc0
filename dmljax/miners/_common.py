"""What miners share: checks of their arguments, and selections in rows of masks."""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax import ops
from dmljax.ops import Array, Pairs, Triplets
from dmljax.ops.loops import vary

Distances = Float[Array, "b n"]  # Euclidean distances of unit embeddings
_ARGUMENTS = """Args:
    distances: Euclidean distances of unit embeddings, not squared.
    pairs: The positives and negatives to select from."""


def document(miner: Callable) -> None:
    """Adds the arguments of all miners to the docstring of one."""
    text, example, lines = inspect.cleandoc(miner.__doc__ or "").partition("\n>>>")
    text += "" if "Args:" in text else "\nArgs:"
    miner.__doc__ = text.replace("Args:", _ARGUMENTS, 1).rstrip() + "\n" + example + lines


def check(distances, pairs) -> tuple[jax.Array, Pairs]:
    if isinstance(pairs, Triplets):
        raise TypeError(
            "a miner selects from pairs, and another miner gave it triplets: pass "
            "ops.triplets_to_pairs(triplets)"
        )
    if not isinstance(pairs, tuple | list) or len(pairs) != 2:
        shape = f" {list(pairs.shape)}" if hasattr(pairs, "shape") else ""
        raise TypeError(
            "a miner takes the distances of a batch, such as ops.unit_euclidean(x, x), and "
            f"ops.pairs(labels), not {type(pairs).__name__}{shape} as pairs"
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


def any_of_row(mask):
    return jnp.any(mask, axis=1, keepdims=True)


def with_both_kinds(positives, negatives) -> Pairs:
    """Returns the pairs of the anchors that have positives and negatives."""
    has_both_kinds = any_of_row(positives) & any_of_row(negatives)
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
