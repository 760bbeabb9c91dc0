"""Which of its positives, or of its negatives, an anchor keeps: arguments of `batch_easy_hard`.

Every function is `(difficulty [b n], candidates [b n], limit [b 1]) -> mask [b n]`.

* `difficulty` is the distance of a positive, and minus the distance of a negative.
* `candidates` are the pairs to select from.
* `limit` is the difficulty at which a pair would be as far from the anchor as the selected pair of
  the other kind. An easier pair keeps the order: the positive is nearer than the negative.
"""

import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax.miners._common import best
from dmljax.ops import Array

__all__ = ["easiest", "every", "hardest", "semihardest"]

Difficulty = Float[Array, "b n"]
Mask = Bool[Array, "b n"]
Limit = Float[Array, "b 1"]


def easiest(difficulty: Difficulty, candidates: Mask, limit: Limit) -> Mask:
    """Selects the nearest positive, or the farthest negative."""
    del limit
    return best(difficulty, candidates, jnp.argmin)


def semihardest(difficulty: Difficulty, candidates: Mask, limit: Limit) -> Mask:
    """Selects the hardest pair that keeps the order with the selected pair of the other kind.

    That is the farthest positive nearer than the negative, or the nearest negative beyond the
    positive.
    """
    return best(difficulty, candidates & ~(difficulty >= limit), jnp.argmax)


def hardest(difficulty: Difficulty, candidates: Mask, limit: Limit) -> Mask:
    """Selects the farthest positive, or the nearest negative."""
    del limit
    return best(difficulty, candidates, jnp.argmax)


def every(difficulty: Difficulty, candidates: Mask, limit: Limit) -> Mask:
    """Selects all candidates, even of an anchor without a pair of the other kind."""
    del difficulty, limit
    return candidates
