"""Which images form the global batch of a step: pure functions of (groups, seed, step).

A sampler is a function `(groups, *, ..., seed, step) -> indices [b]`, where `groups` are
`group(labels)`, or the labels themselves. Samplers store nothing between steps, so that a run can
start at any step, and every host computes the same global batch and reads only its own rows.

`class_balanced` and `uniform` are the defaults; the others belong to published systems. The module
`sampling.sampler` converts epochs of a sampler to steps.
"""

from dmljax.data.sampling.balanced import class_balanced, nearest_classes, uniform
from dmljax.data.sampling.base import Groups, Labels, group
from dmljax.data.sampling.published import abe_pairs, class_chunks, n_pairs, random_class_count

__all__ = [
    "Groups",
    "Labels",
    "abe_pairs",
    "class_balanced",
    "class_chunks",
    "group",
    "n_pairs",
    "nearest_classes",
    "random_class_count",
    "uniform",
]
