"""Published systems as three pure functions each. `__all__` is the registry."""

from dmljax.methods.abe.method import abe
from dmljax.methods.dvml.method import dvml
from dmljax.methods.graph.method import graph
from dmljax.methods.pairs import pairs
from dmljax.methods.proxies import proxies
from dmljax.methods.semantic import semantic_proxies

__all__ = ["abe", "dvml", "graph", "pairs", "proxies", "semantic_proxies"]
