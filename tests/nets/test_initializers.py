"""Initializers draw from the distributions that they name."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dmljax import losses, methods, nets
from dmljax.nets import initializers

SHAPE = (3, 3, 40, 60)
KEY = jax.random.key(3)
NET = nets.convnet(remat=True)
STANDARD = [initializers.normal(1.0), initializers.uniform(1.0), initializers.truncated_normal(1.0)]
EXPECTED = [
    [-2.3783398, 0.7800538, -1.9432216, -1.3987454],
    [-0.9826093, 0.5646408, -0.9480107, -0.8381107],
    [-1.8655831, 0.7371180, -1.6689661, -1.2814844],
]
METHODS = {
    "proxies": methods.proxies(NET, losses.proxy_anchor, classes=5),
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


@pytest.mark.parametrize(
    ("init", "distribution", "std"),
    [
        (initializers.normal(0.02), "normal", 0.02),
        (initializers.truncated_normal(0.02), "truncated", 0.02),
        (initializers.uniform(0.3), "uniform", 0.3 / 3**0.5),
        (initializers.fan_in_uniform(360), "uniform", (1 / 3 / 360) ** 0.5),
        (initializers.kaiming_normal, "normal", (2 / (9 * 60)) ** 0.5),
        (initializers.glorot_uniform, "uniform", (2 / (9 * 100)) ** 0.5),
        (initializers.caffe_xavier, "uniform", (1 / (9 * 40)) ** 0.5),
    ],
)
def test_an_initializer_draws_from_its_distribution(init, distribution, std):
    x = np.asarray(init(KEY, SHAPE)).ravel()
    assert x.dtype == np.float32
    distributions = {
        "normal": stats.norm(0, std),
        "truncated": stats.truncnorm(-2, 2, 0, std),
        "uniform": stats.uniform(-(3**0.5) * std, 12**0.5 * std),
    }
    assert stats.kstest(x, distributions[distribution].cdf).pvalue > 1e-3
    assert len(np.unique(x)) > 0.99 * len(x)  # no block repeats another
    np.testing.assert_array_equal(x, np.asarray(init(KEY, SHAPE)).ravel())
    assert not np.array_equal(x, np.asarray(init(jax.random.key(4), SHAPE)).ravel())


def test_longer_parameters_start_like_shorter_ones():
    short, long = (np.asarray(initializers.normal(1.0)(KEY, (n,))) for n in (1_500, 5_000))
    np.testing.assert_array_equal(short, long[:1_500])


def test_old_and_new_keys_draw_the_same_values():
    values = [
        initializers.normal(1.0)(key, (5,), jnp.float32)
        for key in (jax.random.PRNGKey(3), jax.random.key(3))
    ]
    np.testing.assert_array_equal(*values)


def test_the_numbers_of_a_key_do_not_change():
    """Initial values are part of a result, so they must not change unnoticed."""
    places = np.array([0, 1023, 1024, 69_999])
    numbers = [init(KEY, (70_000,))[places] for init in STANDARD]
    np.testing.assert_allclose(numbers, EXPECTED, rtol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_step_by_step_and_in_one_program_the_numbers_are_the_same(name):
    batch = {"images": jnp.zeros((2, 32, 32, 3)), "labels": jnp.arange(2)}
    init_fn = functools.partial(METHODS[name].init, batch=batch)
    eager, compiled = initializers.initial_values(init_fn, KEY), jax.jit(init_fn)(KEY)
    jax.tree.map(np.testing.assert_array_equal, eager, compiled)


def test_several_keys_draw_what_each_draws():
    keys = jax.random.split(KEY, 3)
    init = functools.partial(initializers.normal(0.5), shape=(2, 3))
    for numbers in (jax.vmap(init)(keys), jax.jit(jax.vmap(init))(keys)):
        np.testing.assert_array_equal(numbers, [init(key) for key in keys])


def test_initial_values_do_not_run_the_net():
    """And keep what is computed from the drawn numbers or given."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", initializers.normal(1.0), (3, 4))
            x = jax.pure_callback(self.fail, jax.ShapeDtypeStruct((2, 4), x.dtype), x @ kernel)
            return x + self.param("bias", nn.initializers.ones, x.shape)

        def fail(self, x):
            raise AssertionError("the net runs")

    def init_fn(key, given):
        params = Net().init(key, jnp.zeros((2, 3)))["params"]
        return {**params, "twice": 2 * params["kernel"], "given": given}

    params = initializers.initial_values(init_fn, KEY, jnp.arange(3))
    assert params["bias"].shape == (2, 4) and params["given"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(params["twice"], 2 * np.asarray(params["kernel"]))
    assert np.std(params["kernel"]) > 0.1
