"""Deep metric learning losses: plain functions of arrays. `__all__` is the registry."""

from dmljax.losses import combinators as around
from dmljax.losses import memory, pairs, proxies, ranking, regularizers, triplets
from dmljax.losses import two_views as selfsup
from dmljax.losses.combinators import *  # noqa: F403
from dmljax.losses.memory import *  # noqa: F403
from dmljax.losses.pairs import *  # noqa: F403
from dmljax.losses.proxies import *  # noqa: F403
from dmljax.losses.ranking import *  # noqa: F403
from dmljax.losses.regularizers import *  # noqa: F403
from dmljax.losses.triplets import *  # noqa: F403
from dmljax.losses.two_views import *  # noqa: F403

_FILES = (around, memory, pairs, proxies, ranking, regularizers, selfsup, triplets)
__all__ = sorted(name for file in _FILES for name in file.__all__)
