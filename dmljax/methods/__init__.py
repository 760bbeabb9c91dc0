"""Published systems as three pure functions each. `__all__` is the registry."""

from dmljax.methods.abe import abe
from dmljax.methods.dvml import dvml
from dmljax.methods.graph import graph
from dmljax.methods.pairs import pairs
from dmljax.methods.proxies import proxies
from dmljax.methods.semantic import semantic_proxies

__all__ = ["abe", "dvml", "graph", "pairs", "proxies", "semantic_proxies"]
