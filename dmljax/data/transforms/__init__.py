"""Augmentation for training, and the geometry of evaluation.

A transform is a list of operations (`operations`). The functions here are recipes of such lists,
and the single operations; `transform.bind` turns each of them, or a function of your own, into a
transform that can be called with a `uint8 [h w c]` image and a `numpy.random.Generator`. It changes
neither the input nor any global state. Mean and deviation are not subtracted here but on the device
(`dmljax.nets.normalizations`), so that a batch is sent there with one byte per value.
"""

from dmljax.data.transforms import operations, recipes
from dmljax.data.transforms.operations import *  # noqa: F403
from dmljax.data.transforms.recipes import *  # noqa: F403

__all__ = [*operations.__all__, *recipes.__all__]
