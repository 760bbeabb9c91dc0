"""Deep metric learning losses: plain functions of arrays. `__all__` is the registry."""

from dmljax.losses import pairs, ranking, triplets
from dmljax.losses.pairs import *  # noqa: F403
from dmljax.losses.ranking import *  # noqa: F403
from dmljax.losses.triplets import *  # noqa: F403

__all__ = sorted([*pairs.__all__, *ranking.__all__, *triplets.__all__])
