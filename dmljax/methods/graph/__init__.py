"""Attention over the batch (Seidenschwarz et al., ICML 2021).

* `nets.py`: the graph of a batch, and the network that passes messages along it.
* `refine.py`: the same network at test time, among nearest neighbors.
* `method.py`: backbone, network and their two classifiers.
"""

from dmljax.methods.graph.method import graph
from dmljax.methods.graph.nets import (
    GraphNetwork,
    MessagePassing,
    similarity_edges,
    similarity_graph,
)

__all__ = ["GraphNetwork", "MessagePassing", "graph", "similarity_edges", "similarity_graph"]
