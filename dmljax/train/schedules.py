"""Functions of the step: factors of the learning rate, and values such as a margin.

These are not optax's schedules, which compute the same formulas with other rounding errors, so that
a run would not repeat bit for bit.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["Schedule", "constant", "cosine", "ramp", "steps"]

Schedule = Callable[[jax.Array], jax.Array]


def constant(*, total: int, warmup: int = 0) -> Schedule:
    """Returns 1, after a linear `warmup` from 0."""
    del total
    return _with_warmup(lambda step: jnp.ones((), jnp.float32), warmup)


def cosine(*, total: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Falls by half a cosine from 1 to `end` at the last step (Loshchilov & Hutter, 2017)."""

    def factor(step):
        share = jnp.clip((step - warmup) / max(1, total - warmup), 0, 1)
        return end + (1 - end) * 0.5 * (1 + jnp.cos(np.pi * share))

    return _with_warmup(factor, warmup)


def steps(*, total: int, at: Sequence[int], divide: float = 10.0, warmup: int = 0) -> Schedule:
    """Returns 1, divided by `divide` at each of the steps `at`."""
    del total
    ends = np.asarray(at, np.int32)
    return _with_warmup(lambda step: divide ** -jnp.sum(step >= ends).astype(jnp.float32), warmup)


def ramp(step: jax.Array | int, *, first: float, last: float, at: Sequence[int]) -> jax.Array:
    """Interpolates a value from `first` to `last` between two steps `at`.

    >>> [float(ramp(step, first=0.1, last=0.5, at=(100, 200))) for step in (0, 150, 900)]
    [0.10000000149011612, 0.30000001192092896, 0.5]
    """
    if len(at) != 2 or not at[0] < at[1]:
        raise ValueError(f"at={list(at)}: of two steps, the second step must come after the first")
    start, end = at
    share = jnp.clip((step - start) / (end - start), 0, 1).astype(jnp.float32)
    return first + (last - first) * share


def _with_warmup(factor: Schedule, warmup: int) -> Schedule:
    if warmup <= 0:
        return factor
    return lambda step: factor(step) * jnp.minimum(1, (step + 1) / warmup)
