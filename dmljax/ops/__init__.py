"""Arrays in, arrays out: unit vectors, distances, pair masks, masked reductions, safe gradients.

Shared conventions:

* `x [b d]` are anchors and `y [n d]` references. `y is x` says "the batch itself".
* A distance is smaller for what is more alike.
* `where` masks are boolean, True counts. Nothing counted gives 0; a NaN that is counted stays NaN.
* Half-precision input is computed in float32; float64 stays float64.
"""

from dmljax.ops.distances import (
    cosine,
    dot,
    euclidean,
    snr,
    squared_euclidean,
    unit,
    unit_euclidean,
)
from dmljax.ops.loops import sum_over_true
from dmljax.ops.masks import pairs, triplets_to_pairs
from dmljax.ops.numerics import acos, logsumexp, matmul, normalize, sqrt, widen
from dmljax.ops.reductions import divide, mean, mean_of_active, reduce, sum, threshold, weighted
from dmljax.ops.types import (
    Array,
    DistanceFn,
    Labels,
    MineFn,
    Pairs,
    ReduceFn,
    ReferenceLabels,
    Triplets,
)

__all__ = [
    "Array",
    "DistanceFn",
    "Labels",
    "MineFn",
    "Pairs",
    "ReduceFn",
    "ReferenceLabels",
    "Triplets",
    "acos",
    "cosine",
    "divide",
    "dot",
    "euclidean",
    "logsumexp",
    "matmul",
    "mean",
    "mean_of_active",
    "normalize",
    "pairs",
    "reduce",
    "snr",
    "sqrt",
    "squared_euclidean",
    "sum",
    "sum_over_true",
    "threshold",
    "triplets_to_pairs",
    "unit",
    "unit_euclidean",
    "weighted",
    "widen",
]
