"""Deep metric learning losses: plain functions of arrays. `__all__` is the registry."""

from dmljax.losses import around, memory, pairs, proxies, ranking, regularizers, selfsup, triplets
from dmljax.losses.around import *  # noqa: F403
from dmljax.losses.memory import *  # noqa: F403
from dmljax.losses.pairs import *  # noqa: F403
from dmljax.losses.proxies import *  # noqa: F403
from dmljax.losses.ranking import *  # noqa: F403
from dmljax.losses.regularizers import *  # noqa: F403
from dmljax.losses.selfsup import *  # noqa: F403
from dmljax.losses.triplets import *  # noqa: F403

_FILES = (around, memory, pairs, proxies, ranking, regularizers, selfsup, triplets)
__all__ = sorted(name for file in _FILES for name in file.__all__)
