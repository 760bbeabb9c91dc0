"""Initial values of proxies and embedding layers, as the code published with a loss draws them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_step import Patches

from dmljax import losses, methods
from dmljax.config import registry

C, D, K = 48, 32, 4


def _params(loss_fn, factory=methods.proxies, **options):
    method = factory(Patches(), loss_fn, classes=C, **{"dim": D, **options})
    batch = {"images": jnp.zeros((2, 6, 6, 3)), "labels": jnp.zeros(2, jnp.int32)}
    return jax.device_get(method.init(jax.random.key(0), batch)[0])


@pytest.mark.parametrize(
    ("loss_fn", "kind", "size"),
    [
        (losses.proxy_anchor, "normal", (2 / C) ** 0.5),
        (functools.partial(losses.proxy_anchor, alpha=16.0), "normal", (2 / C) ** 0.5),
        (losses.proxy_nca_pp, "normal", 1 / 8),
        (losses.normalized_softmax, "uniform", 1 / D**0.5),
        (losses.arcface, "normal", 1.0),
        (losses.proxy_nca, "normal", 1.0),
    ],
)
def test_proxies_are_drawn_as_published(loss_fn, kind, size):
    proxies = _params(loss_fn)["proxies"]
    assert proxies.shape == (C, D)
    if kind == "uniform":
        assert 0.98 * size < np.abs(proxies).max() <= size
        size = size / 3**0.5
    else:
        assert np.abs(proxies).max() > 2.5 * size
    np.testing.assert_allclose(proxies.std(), size, rtol=0.05)


def test_centers_of_soft_triple_are_uniform_by_their_number():
    centers = _params(losses.soft_triple, centers=K)["proxies"]
    bound = 1 / (C * K) ** 0.5
    assert centers.shape == (C, K, D) and 0.98 * bound < np.abs(centers).max() <= bound


def test_a_config_sets_the_deviation_and_the_embedding_layer():
    spec = {"name": "proxies", "dim": 512}
    factory = registry.resolve("method", spec | {"proxy_init": 0.5, "dense_fn": "kaiming_dense"})
    plain = _params(losses.proxy_anchor, factory, dim=512)
    np.testing.assert_allclose(plain["proxies"].std(), 0.5, rtol=0.05)
    layer = plain["head"]["red"]
    np.testing.assert_allclose(layer["kernel"].std(), (2 / 512) ** 0.5, rtol=0.05)  # 0.0625
    assert not layer["bias"].any()
    # PyTorch's own values have a tenth of that deviation and a bias.
    usual = _params(losses.proxy_anchor, dim=512)["head"]["red"]
    assert usual["bias"].any() and np.abs(usual["kernel"]).max() <= 1 / 10**0.5
    with pytest.raises(ValueError, match="no linear layer 'kaiming'"):
        registry.resolve("method", spec | {"dense_fn": "kaiming"})
