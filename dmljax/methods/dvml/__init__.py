"""Deep variational metric learning (DVML; Lin et al., ECCV 2018): nets, losses, method."""

from dmljax.methods.dvml.losses import divergence, n_pairs, reconstruction
from dmljax.methods.dvml.method import dvml

__all__ = ["divergence", "dvml", "n_pairs", "reconstruction"]
