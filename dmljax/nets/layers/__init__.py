"""Layers that compute the same as PyTorch's and Caffe's, so that published weights fit.

Feature maps are `[b h w c]`, kernels `[h w in out]`. Padding is explicit, symmetric, and part of
the layer: "SAME" would pad in another way at stride 2. `dtype` is the type of the computation
(None: what input and parameters promote to); parameters and running statistics are always float32.
`impl` chooses how convolutions and max pooling are computed: see `dmljax.kernels`.
"""

from dmljax.nets.layers.convolution import (
    MLP,
    CenteredDense,
    Conv,
    ConvNorm,
    Dense,
    Dtype,
    centered_dense,
    conv_norm,
    glorot_dense,
    kaiming_dense,
    mlp,
    orthogonal_dense,
)
from dmljax.nets.layers.normalization import BatchNorm, layer_norm, local_response_norm
from dmljax.nets.layers.pooling import avg_pool, global_max, global_mean, max_pool
from dmljax.nets.layers.stages import (
    DropPath,
    add_pooled,
    check_maps,
    checkpointed,
    drop_rate,
    multiple_of_8,
    named,
    shapes,
    stage_range,
    with_stored_gradient,
)

__all__ = [
    "MLP",
    "BatchNorm",
    "CenteredDense",
    "Conv",
    "ConvNorm",
    "Dense",
    "DropPath",
    "Dtype",
    "add_pooled",
    "avg_pool",
    "centered_dense",
    "check_maps",
    "checkpointed",
    "conv_norm",
    "drop_rate",
    "global_max",
    "global_mean",
    "glorot_dense",
    "kaiming_dense",
    "layer_norm",
    "local_response_norm",
    "max_pool",
    "mlp",
    "multiple_of_8",
    "named",
    "orthogonal_dense",
    "shapes",
    "stage_range",
    "with_stored_gradient",
]
