"""Initialisers draw what they say, and drawing all at once changes speed alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from scipy import stats

from dmljax import losses, methods, nets
from dmljax.kernels import initial

SHAPE = (3, 3, 40, 60)
KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("init", "law", "std"),
    [
        (initial.normal(0.02), "normal", 0.02),
        (initial.truncated_normal(0.02), "truncated", 0.02),
        (initial.uniform(0.3), "uniform", 0.3 / 3**0.5),
        (initial.fan_in_uniform(360), "uniform", (1 / 3 / 360) ** 0.5),
        (initial.kaiming_normal, "normal", (2 / (9 * 60)) ** 0.5),
        (initial.glorot_uniform, "uniform", (2 / (9 * 100)) ** 0.5),
        (initial.caffe_xavier, "uniform", (1 / (9 * 40)) ** 0.5),
    ],
)
def test_laws(init, law, std):
    x = np.asarray(init(KEY, SHAPE)).ravel()
    assert x.dtype == np.float32
    laws = {
        "normal": stats.norm(0, std),
        "truncated": stats.truncnorm(-2, 2, 0, std),
        "uniform": stats.uniform(-(3**0.5) * std, 12**0.5 * std),
    }
    assert stats.kstest(x, laws[law].cdf).pvalue > 1e-3
    assert len(np.unique(x)) > 0.99 * len(x)  # no block repeats another
    np.testing.assert_array_equal(x, np.asarray(init(KEY, SHAPE)).ravel())
    assert not np.array_equal(x, np.asarray(init(jax.random.key(4), SHAPE)).ravel())


def test_longer_parameters_begin_as_shorter_ones():
    short, long = (np.asarray(initial.normal(1.0)(KEY, (n,))) for n in (1_500, 5_000))
    np.testing.assert_array_equal(short, long[:1_500])


NET = nets.convnet()
METHODS = {
    "pairs": methods.pairs(NET, losses.triplet, classes=5),
    "proxies": methods.proxies(NET, losses.proxy_anchor, classes=5),
    "graph": methods.graph(NET, losses.label_smoothed_cross_entropy, classes=5, dim=16, heads=2),
    "dvml": methods.dvml(NET, losses.triplet, classes=5, dim=16, samples=2),
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
def test_together_is_the_same_numbers(name):
    batch = {"images": jnp.zeros((2, 32, 32, 3)), "labels": jnp.arange(2)}

    def begin(key):
        return METHODS[name].init(key, batch)

    for plain, at_once in zip(
        jax.tree.leaves(jax.jit(begin)(KEY)),
        jax.tree.leaves(jax.jit(initial.together(begin))(KEY)),
        strict=True,
    ):
        np.testing.assert_allclose(plain, at_once, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"remat": True}])
def test_together_draws_once_whatever_the_number_of_layers(options):
    def loops(transform, **more):
        net = nets.convnet(**options, **more)

        def begin(key):
            return net.init(key, jnp.zeros((1, 32, 32, 3)), train=True)

        return str(jax.make_jaxpr(transform(begin))(KEY)).count(" scan[")

    deeper = {"widths": (8, 16, 24, 32, 40, 48), "strides": (1,) * 6}
    assert loops(lambda begin: begin, **deeper) > 1
    assert loops(initial.together) == loops(initial.together, **deeper) == 1


def test_keys_of_the_old_kind():
    old, new = (make(3) for make in (jax.random.PRNGKey, jax.random.key))
    np.testing.assert_array_equal(initial.normal(1.0)(old, (5,)), initial.normal(1.0)(new, (5,)))
    x = jnp.zeros((1, 8, 8, 3))
    net = nets.convnet(widths=(4,), strides=(2,))
    trees = [initial.together(lambda key: net.init(key, x, train=True))(key) for key in (old, new)]
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_together_takes_any_function():
    """Draws of others, of several keys, loops, shards, functions with own derivatives, and none."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    apart = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    def begin(key, offset):
        keys = jax.random.split(key, 3)
        many = jax.vmap(lambda key: initial.normal(1.0)(key, (2, 2)))(keys)
        total = jax.lax.fori_loop(0, 3, lambda i, x: x + i, offset)
        running = jax.lax.scan(lambda c, x: (c + x, c), offset, jnp.arange(3.0))[1]
        own = jax.nn.relu(jax.random.normal(keys[0], (4,)) + initial.uniform(1.0)(keys[1], (4,)))
        parts = apart(lambda x: 2 * x)(initial.uniform(1.0)(keys[2], (4,)))
        after = initial.normal(1.0)(jax.random.fold_in(key, own.argmax()), (3,))
        return {
            "many": many,
            "total": total,
            "running": running,
            "own": own,
            "parts": parts,
            "after": after,
        }

    plain, at_once = begin(KEY, 1.5), initial.together(begin)(KEY, 1.5)
    assert plain.keys() == at_once.keys()
    for name in plain:
        np.testing.assert_allclose(plain[name], at_once[name], rtol=1e-6)
    assert initial.together(lambda key: jnp.ones(3))(KEY).tolist() == [1, 1, 1]
