"""A net of one's own, whose layers have no numbers."""

import flax.linen as nn

from dmljax.nets import layers


class Plain(nn.Module):
    """Two linear maps of the pixels."""

    @nn.compact
    def __call__(self, images, *, train):
        x = nn.relu(layers.Dense(8, name="first")(images))
        return layers.add_pooled({}, layers.Dense(8, name="second")(x))


plain = Plain
