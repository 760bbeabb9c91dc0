"""Layers that compute the same as PyTorch's and Caffe's, so that published weights fit.

Feature maps are `[b h w c]`, kernels `[h w in out]`. Padding is explicit, symmetric, and part of
the layer: "SAME" would pad in another way at stride 2. `dtype` is the type of the computation
(None: what input and parameters promote to); parameters and running statistics are always float32.
`impl` chooses how convolutions and max pooling are computed: see `dmljax.kernels`.
"""

from dmljax.nets.layers.convolution import (
    Conv,
    ConvNorm,
    Dense,
    Dtype,
    glorot_dense,
    kaiming_dense,
)
from dmljax.nets.layers.normalization import BatchNorm, local_response_norm
from dmljax.nets.layers.pooling import avg_pool, global_max, global_mean, max_pool
from dmljax.nets.layers.stages import add_pooled, check_maps, named, shapes, stage_range

__all__ = [
    "BatchNorm",
    "Conv",
    "ConvNorm",
    "Dense",
    "Dtype",
    "add_pooled",
    "avg_pool",
    "check_maps",
    "global_max",
    "global_mean",
    "glorot_dense",
    "kaiming_dense",
    "local_response_norm",
    "max_pool",
    "named",
    "shapes",
    "stage_range",
]
