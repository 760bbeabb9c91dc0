"""`batch_draws` changes the speed of an init function and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dmljax import losses, methods, nets
from dmljax.kernels.initial_draws import KINDS, batch_draws, draw

KEY = jax.random.key(3)
NET = nets.convnet()
METHODS = {
    "pairs": methods.pairs(NET, losses.triplet, classes=5),
    "proxies": methods.proxies(NET, losses.proxy_anchor, classes=5),
    "graph": methods.graph(NET, losses.label_smoothed_cross_entropy, classes=5, dim=16),
    "dvml": methods.dvml(NET, losses.triplet, classes=5, samples=2),
    "abe": methods.abe(
        NET,
        losses.triplet,
        classes=5,
        dim=16,
        learners=2,
        split=("conv3", "conv4"),
        attention="conv4",
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_batched_draws_are_the_same_numbers(name):
    batch = {"images": jnp.zeros((2, 32, 32, 3)), "labels": jnp.arange(2)}

    def init(key):
        return METHODS[name].init(key, batch)

    for plain, batched in zip(
        jax.tree.leaves(jax.jit(init)(KEY)),
        jax.tree.leaves(jax.jit(batch_draws(init))(KEY)),
        strict=True,
    ):
        np.testing.assert_allclose(plain, batched, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"remat": True}])
def test_there_is_one_draw_whatever_the_number_of_layers(options):
    def count_loops(transform, **keywords):
        net = nets.convnet(**options, **keywords)

        def init(key):
            return net.init(key, jnp.zeros((1, 32, 32, 3)), train=True)

        return str(jax.make_jaxpr(transform(init))(KEY)).count(" scan[")

    deeper = {"widths": (8, 16, 24, 32, 40, 48), "strides": (1,) * 6}
    assert count_loops(lambda init: init, **deeper) > 1
    assert count_loops(batch_draws) == count_loops(batch_draws, **deeper) == 1


def test_old_style_keys_draw_the_same_numbers():
    x = jnp.zeros((1, 8, 8, 3))
    net = nets.convnet(widths=(4,), strides=(2,))
    init = batch_draws(lambda key: net.init(key, x, train=True))
    jax.tree.map(np.testing.assert_array_equal, init(jax.random.PRNGKey(3)), init(KEY))


def test_functions_with_other_operations_give_the_same_numbers():
    """Other draws, several keys, loops, shards, custom derivatives, and no draw."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    normal, uniform = (functools.partial(draw, kind) for kind in list(KINDS)[:2])

    def init(key, offset):
        keys = jax.random.split(key, 3)
        of_relu = jax.nn.relu(jax.random.normal(keys[0], (4,)) + uniform(keys[1], (4,)))
        return {
            "vmap": jax.vmap(lambda key: normal(key, (2, 2)))(keys),
            "loop": jax.lax.fori_loop(0, 3, lambda i, x: x + i, offset),
            "scan": jax.lax.scan(lambda c, x: (c + x, c), offset, jnp.arange(3.0))[1],
            "relu": of_relu,
            "shards": shard(lambda x: 2 * x)(uniform(keys[2], (4,))),
            "key from values": normal(jax.random.fold_in(key, of_relu.argmax()), (3,)),
        }

    plain, batched = init(KEY, 1.5), batch_draws(init)(KEY, 1.5)
    assert plain.keys() == batched.keys()
    for name in plain:
        np.testing.assert_allclose(plain[name], batched[name], rtol=1e-6)
    assert batch_draws(lambda key: jnp.ones(3))(KEY).tolist() == [1, 1, 1]
