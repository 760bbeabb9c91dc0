"""What backbones share: levels of names, and shapes of variables."""

import flax.linen as nn
import jax

from dmljax.nets import layers


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        return layers.named("outer", lambda x: layers.Conv(4, 3, name="0")(x), x)


def test_shapes_have_the_names_of_the_net_and_compute_nothing():
    variables = layers.shapes(Net(), 8, channels=5)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(variables))
    assert variables["params"]["outer"]["0"]["kernel"].shape == (3, 3, 5, 4)
