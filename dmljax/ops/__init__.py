"""Arrays in, arrays out: unit vectors, distances, pair masks, masked reductions, safe gradients.

Conventions of all functions here and of the losses:

* `x [b d]` are anchors, `y [n d]` references. `y is x` means that a batch is compared with itself.
* The smaller a distance, the more alike two rows are.
* `where` masks are boolean; True counts. Where nothing counts, the result is 0. A NaN that counts
  stays NaN.
* Half-precision input is computed in float32; float64 stays float64.
"""

from dmljax.ops.class_tiles import ClassTiles, over_classes
from dmljax.ops.distances import (
    cosine,
    cosine_similarity,
    dot,
    euclidean,
    snr,
    squared_euclidean,
    unit,
    unit_euclidean,
)
from dmljax.ops.loops import sum_over_true, take_column
from dmljax.ops.masks import pairs, triplets_to_pairs
from dmljax.ops.numerics import (
    acos,
    log_1_plus_sum_exp,
    logsumexp,
    matmul,
    norm,
    normalize,
    power,
    sqrt,
    widen,
)
from dmljax.ops.reductions import divide, mean, mean_of_active, reduce, sum, threshold, weighted
from dmljax.ops.types import (
    Array,
    DistanceFn,
    Labels,
    MineFn,
    Pairs,
    ReduceFn,
    ReferenceLabels,
    Scalar,
    Triplets,
)

__all__ = [
    "Array",
    "ClassTiles",
    "DistanceFn",
    "Labels",
    "MineFn",
    "Pairs",
    "ReduceFn",
    "ReferenceLabels",
    "Scalar",
    "Triplets",
    "acos",
    "cosine",
    "cosine_similarity",
    "divide",
    "dot",
    "euclidean",
    "log_1_plus_sum_exp",
    "logsumexp",
    "matmul",
    "mean",
    "mean_of_active",
    "norm",
    "normalize",
    "over_classes",
    "pairs",
    "power",
    "reduce",
    "snr",
    "sqrt",
    "squared_euclidean",
    "sum",
    "sum_over_true",
    "take_column",
    "threshold",
    "triplets_to_pairs",
    "unit",
    "unit_euclidean",
    "weighted",
    "widen",
]
