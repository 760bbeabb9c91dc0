"""Layers that compute the same as PyTorch's and Caffe's, so that published weights fit.

Feature maps are `[b h w c]`, kernels `[h w in out]`. Padding is explicit, symmetric, and part of
the layer: "SAME" would pad in another way at stride 2. `dtype` is the type of the computation
(None: what input and parameters promote to); parameters and running statistics are always float32.
`impl` chooses how convolutions and max pooling are computed: see `nets.layers.impl`.
"""

from dmljax.nets.layers import convolution, normalization, pooling, stages
from dmljax.nets.layers.convolution import *  # noqa: F403
from dmljax.nets.layers.normalization import *  # noqa: F403
from dmljax.nets.layers.pooling import *  # noqa: F403
from dmljax.nets.layers.stages import *  # noqa: F403

_MODULES = (convolution, normalization, pooling, stages)
__all__ = sorted(name for module in _MODULES for name in module.__all__)
