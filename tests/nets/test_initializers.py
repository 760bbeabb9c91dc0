"""Initializers draw from the distributions that they name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dmljax.nets import initializers

SHAPE = (3, 3, 40, 60)
KEY = jax.random.key(3)


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
