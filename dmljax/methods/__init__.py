"""Published systems as three pure functions each. `__all__` is the registry."""

from dmljax.methods.pairs import pairs
from dmljax.methods.proxies import proxies

__all__ = ["pairs", "proxies"]
