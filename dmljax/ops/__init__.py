"""Arrays in, arrays out: unit vectors, distances, pair masks, masked reductions, safe gradients.

Conventions of all functions here and of the losses:

* `x [b d]` are anchors, `y [n d]` references. `y is x` means that a batch is compared with itself.
* The smaller a distance, the more alike two rows are.
* `where` masks are boolean; True counts. Where nothing counts, the result is 0. A NaN that counts
  stays NaN.
* Half-precision input is computed in float32; float64 stays float64.
"""

from dmljax.ops import classes, distances, masks, reductions
from dmljax.ops.classes import *  # noqa: F403
from dmljax.ops.distances import *  # noqa: F403
from dmljax.ops.loops import sum_over_true as sum_over_true
from dmljax.ops.loops import take_column as take_column
from dmljax.ops.masks import *  # noqa: F403
from dmljax.ops.numerics import *  # noqa: F403
from dmljax.ops.reductions import *  # noqa: F403
from dmljax.ops.types import *  # noqa: F403

# Losses and miners also use `numerics`, `loops` and the other types by `ops.`.
_MODULES = (classes, distances, masks, reductions)
_OTHERS = ["Array", "Pairs", "Triplets", "normalize"]
__all__ = sorted([*_OTHERS, *(name for module in _MODULES for name in module.__all__)])
