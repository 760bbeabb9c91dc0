"""Which images form the global batch of a step: pure functions of (groups, seed, step).

A sampler is a function `(groups, *, ..., seed, step) -> indices [b]`, where `groups` are
`group(labels)`, or the labels themselves. Samplers store nothing between steps, so that a run can
start at any step, and every host computes the same global batch and reads only its own rows.

`class_balanced` and `uniform` are the defaults; the others belong to published systems. The module
`sampling.sampler` converts epochs of a sampler to steps.
"""

from dmljax.data.sampling import balanced, published
from dmljax.data.sampling.balanced import *  # noqa: F403
from dmljax.data.sampling.base import Groups, Labels, group
from dmljax.data.sampling.published import *  # noqa: F403

__all__ = ["Groups", "Labels", "group", *balanced.__all__, *published.__all__]
