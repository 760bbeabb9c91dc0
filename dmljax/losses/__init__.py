"""Deep metric learning losses: plain functions of arrays. `__all__` is the registry."""

from dmljax.losses import around, memory, pairs, proxies, regularizers, selfsup, triplets
from dmljax.losses.around import *  # noqa: F403
from dmljax.losses.memory import *  # noqa: F403
from dmljax.losses.pairs import *  # noqa: F403
from dmljax.losses.proxies import *  # noqa: F403
from dmljax.losses.regularizers import *  # noqa: F403
from dmljax.losses.selfsup import *  # noqa: F403
from dmljax.losses.triplets import *  # noqa: F403

__all__ = sorted(
    [
        *around.__all__,
        *memory.__all__,
        *pairs.__all__,
        *proxies.__all__,
        *regularizers.__all__,
        *selfsup.__all__,
        *triplets.__all__,
    ]
)
