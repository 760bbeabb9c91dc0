"""Miners that select triplets: they return `ops.Triplets`, a rule instead of b n n masks.

The gap of a triplet is g = d_an - d_ap, how much farther its negative is than its positive.
Three miners divide all triplets by their gap: `hard_triplets` (g <= 0), `semihard_triplets`
(0 < g <= margin) and `easy_triplets` (margin < g). `triplet_margin` is the first two together.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from dmljax.miners._common import Distances, batch_size, check
from dmljax.ops import Array, Pairs, Scalar, Triplets

__all__ = [
    "angular",
    "easy_triplets",
    "hard_triplets",
    "semihard_triplets",
    "triplet_margin",
]


def triplet_margin(distances: Distances, pairs: Pairs, *, margin: Scalar = 0.2) -> Triplets:
    """Selects triplets that violate a margin: d_an - d_ap <= margin.

    Args:
        margin: Of the gap d_an - d_ap.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.triplet_margin, margin=0.1)
    >>> print(f"{losses.triplet(x, np.array([0, 1, 0, 1]), mine_fn=mine_fn):.3f}")
    0.744
    """
    return _by_gap(distances, pairs, lambda gap: ~(gap > margin))


def hard_triplets(distances: Distances, pairs: Pairs) -> Triplets:
    """Selects triplets whose negative is not farther than their positive: d_an <= d_ap.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> loss = losses.triplet(x, np.array([0, 1, 0, 1]), mine_fn=miners.hard_triplets)
    >>> print(f"{loss:.3f}")
    0.744
    """
    return _by_gap(distances, pairs, lambda gap: ~(gap > 0))


def semihard_triplets(distances: Distances, pairs: Pairs, *, margin: Scalar = 0.2) -> Triplets:
    """Selects triplets in order that violate a margin: 0 < d_an - d_ap <= margin.

    Reference: Schroff et al., FaceNet: A Unified Embedding for Face Recognition and Clustering,
    CVPR 2015, arXiv:1503.03832.

    Args:
        margin: Of the gap d_an - d_ap.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.semihard_triplets, margin=0.5)
    >>> print(f"{losses.triplet(x, np.array([0, 0, 1, 1]), margin=0.5, mine_fn=mine_fn):.3f}")
    0.238
    """
    return _by_gap(distances, pairs, lambda gap: ~(gap > margin) & ~(gap <= 0))


def easy_triplets(distances: Distances, pairs: Pairs, *, margin: Scalar = 0.2) -> Triplets:
    """Selects triplets that keep a margin: d_an - d_ap > margin.

    Args:
        margin: Of the gap d_an - d_ap.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.easy_triplets, margin=0.1)
    >>> print(f"{losses.triplet(x, np.array([0, 0, 1, 1]), margin=1.0, mine_fn=mine_fn):.3f}")
    0.392
    """
    return _by_gap(distances, pairs, lambda gap: ~(gap <= margin))


def angular(distances: Distances, pairs: Pairs, *, angle: float = 20.0) -> Triplets:
    """Selects triplets whose angle at the negative exceeds an angle.

    atan(d_ap / (2 |n - c|)) > angle, with c the middle of anchor and positive, and
    4 |n - c|^2 = 2 d_an^2 + 2 d_pn^2 - d_ap^2. This needs distances between references, so the
    batch must be compared with itself.

    Reference: Wang et al., Deep Metric Learning with Angular Loss, ICCV 2017, arXiv:1708.01682.

    Args:
        angle: In degrees, between 0 and 90.

    >>> x = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]], np.float32)
    >>> mine_fn = functools.partial(miners.angular, angle=20)
    >>> print(f"{losses.triplet(x, np.array([0, 1, 0, 1]), mine_fn=mine_fn):.3f}")
    0.744
    """
    if not 0 < angle < 90:
        raise ValueError(f"angle is in degrees between 0 and 90, not {angle}")
    distances, pairs = check(distances, pairs)
    batch_size("angular", distances)
    tan_squared = float(np.tan(np.deg2rad(angle)) ** 2)
    # Three points that are equal, up to rounding, have no angle.
    rounding = float((4 * jnp.finfo(distances.dtype).eps) ** 2)

    def select(d_ap, d_an, d_pn):
        medians = 2 * d_an**2 + 2 * d_pn**2 - d_ap**2
        return ~(d_ap**2 <= tan_squared * jnp.maximum(medians, 0) + rounding)

    return Triplets(pairs, distances, select)


def _by_gap(distances, pairs: Pairs, holds_fn: Callable[[Array], Array]) -> Triplets:
    distances, pairs = check(distances, pairs)
    return Triplets(pairs, distances, lambda d_ap, d_an, d_pn: holds_fn(d_an - d_ap))
