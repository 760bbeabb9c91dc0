"""Losses for deep metric learning: plain functions of arrays. `__all__` lists them."""

from dmljax.losses import (
    combinators,
    memory,
    pairs,
    proxies,
    ranking,
    regularizers,
    triplets,
    two_views,
)
from dmljax.losses import pnp_penalties as pnp_penalties
from dmljax.losses.combinators import *  # noqa: F403
from dmljax.losses.memory import *  # noqa: F403
from dmljax.losses.pairs import *  # noqa: F403
from dmljax.losses.proxies import *  # noqa: F403
from dmljax.losses.ranking import *  # noqa: F403
from dmljax.losses.regularizers import *  # noqa: F403
from dmljax.losses.triplets import *  # noqa: F403
from dmljax.losses.two_views import *  # noqa: F403

MODULES = (pairs, triplets, ranking, proxies, two_views, regularizers, memory, combinators)
__all__ = sorted(name for module in MODULES for name in module.__all__)
