"""Attention over the batch (Seidenschwarz et al., ICML 2021): nets, refinement, method."""

from dmljax.methods.graph.method import graph

__all__ = ["graph"]
