"""The small net of the contrastive loss's paper, for MNIST."""

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import layers
from dmljax.nets.layers import Conv, Dense, Dtype
from dmljax.ops import Array

__all__ = ["lecun"]


class Lecun(nn.Module, kw_only=True):
    """The net of Hadsell et al. (CVPR 2006) for MNIST padded to 32 x 32: 37,097 parameters.

    15 convolutions 6x6, relu, mean of 3x3, 30 convolutions 9x9, relu, and a linear map to
    `embeddings` of `dim` numbers, which `dim=None` leaves out. Unlike here, the subsampling of the
    paper is trainable, and its units are not relu.
    """

    dim: int | None = 2
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(features, size, name, x):
            options = {"use_bias": True, "kernel_init": None, "bias_init": None}
            options |= {"dtype": self.dtype, "impl": self.impl, "name": name}
            return nn.relu(Conv(features, size, **options)(x))

        layers.check_maps("lecun", images, (1, 3))
        if images.shape[1:3] != (32, 32):
            raise ValueError(
                f"lecun takes images of 32 x 32 pixels, not {images.shape[1]} x {images.shape[2]}: "
                "pad the images of MNIST by 2 on every side"
            )

        def conv1(_, x):
            return layers.avg_pool(conv(15, 6, "conv1", x), 3, strides=3)

        outputs = {"conv1": layers.checkpointed(conv1, self.remat)(self, images)}
        outputs["conv2"] = conv(30, 9, "conv2", outputs["conv1"])
        outputs = layers.add_pooled(outputs, outputs["conv2"])
        if self.dim is not None:
            outputs["embeddings"] = Dense(self.dim, name="fc")(outputs["pooled"])
        return outputs


lecun = Lecun
