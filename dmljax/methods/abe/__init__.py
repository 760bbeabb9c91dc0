"""Attention-based ensemble (ABE; Kim et al., ECCV 2018): nets, losses, method."""

from dmljax.methods.abe.losses import contrastive, divergence
from dmljax.methods.abe.method import abe

__all__ = ["abe", "contrastive", "divergence"]
