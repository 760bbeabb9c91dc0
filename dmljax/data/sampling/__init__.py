"""Which images form the global batch of a step: pure functions of (groups, seed, step).

A sampler is a function `(groups, *, ..., seed, step) -> indices [b]`, where `groups` are
`group(labels)`, or the labels themselves. Samplers store nothing between steps, so that a run can
start at any step, and every host computes the same global batch and reads only its own rows.

`plan` and `uniform` are the defaults; the others belong to published systems. The module
`sampling.sampler` converts epochs of a sampler to steps.
"""

from dmljax.data.sampling.class_balanced import coverage, plan
from dmljax.data.sampling.graph import combine, number
from dmljax.data.sampling.groups import Groups, Labels, group
from dmljax.data.sampling.pairs import abe_pairs, n_pairs
from dmljax.data.sampling.shuffled import uniform

__all__ = [
    "Groups",
    "Labels",
    "abe_pairs",
    "combine",
    "coverage",
    "group",
    "n_pairs",
    "number",
    "plan",
    "uniform",
]
