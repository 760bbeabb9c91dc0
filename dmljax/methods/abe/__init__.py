"""Attention-based ensemble (ABE; Kim et al., ECCV 2018).

* `nets.py`: the ensemble, which shares most of its net, and the control without attention.
* `losses.py`: a contrastive loss for every learner, and a divergence between learners.
* `method.py`: both together.
"""

from dmljax.methods.abe.losses import contrastive, divergence, drawn_pairs, mean_divergence
from dmljax.methods.abe.method import abe
from dmljax.methods.abe.nets import min_max

__all__ = [
    "abe",
    "contrastive",
    "divergence",
    "drawn_pairs",
    "mean_divergence",
    "min_max",
]
