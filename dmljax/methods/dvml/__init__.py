"""Deep variational metric learning (DVML; Lin et al., ECCV 2018).

* `nets.py`: the heads, the sampler and the decoder that are added to a backbone.
* `losses.py`: the divergence, three forms of the reconstruction loss, and the n-pairs loss.
* `method.py`: all terms and their two phases.

`n_pairs` is the loss 'dmljax.methods.dvml:n_pairs' of a config.
"""

from dmljax.methods.dvml.losses import (
    divergence,
    n_pairs,
    reconstruction_half_sum,
    reconstruction_mean_square,
    reconstruction_norm,
)
from dmljax.methods.dvml.method import dvml
from dmljax.methods.dvml.nets import (
    VariationalDecoder,
    VariationalHeads,
    log_variance_as_deviation,
    standard_deviation,
)

__all__ = [
    "VariationalDecoder",
    "VariationalHeads",
    "divergence",
    "dvml",
    "log_variance_as_deviation",
    "n_pairs",
    "reconstruction_half_sum",
    "reconstruction_mean_square",
    "reconstruction_norm",
    "standard_deviation",
]
