"""Pools against numpy, alone and in a head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax.methods import assemble
from dmljax.nets import convnet, heads, pools
from dmljax.nets.vit import ViT

RNG = np.random.default_rng(0)


MAPS = RNG.normal(size=(3, 4, 5, 6)).astype(np.float32)


def _naive_gem(maps, p, epsilon=1e-6):
    b, h, w, c = maps.shape
    pooled = np.zeros((b, c))
    for i in range(b):
        for k in range(c):
            total = 0.0
            for y in range(h):
                for x in range(w):
                    total += max(float(maps[i, y, x, k]), epsilon) ** p
            pooled[i, k] = (total / (h * w)) ** (1 / p)
    return pooled


@pytest.mark.parametrize("p", [1.0, 2.5, 3.0, 10.0])
def test_gem_is_the_loop(p):
    np.testing.assert_allclose(pools.gem(MAPS, p=p), _naive_gem(MAPS, p), rtol=1e-5)


def test_gem_lies_between_mean_and_maximum():
    maps = np.abs(MAPS)
    np.testing.assert_allclose(pools.gem(maps, p=1.0), maps.mean(axis=(1, 2)), rtol=1e-5)
    np.testing.assert_allclose(pools.gem(maps, p=500.0), maps.max(axis=(1, 2)), rtol=1e-2)
    # No power overflows, however large the map.
    np.testing.assert_allclose(
        pools.gem(1e30 * maps, p=3.0), 1e30 * pools.gem(maps, p=3.0), rtol=1e-4
    )


def test_gradient_of_gem_reaches_maps_and_power():
    maps = np.abs(MAPS).astype(np.float64) + 0.1
    signs = RNG.normal(size=(3, 6))

    def naive(maps, p):
        return np.sum(_naive_gem(maps, p) * signs)

    with jax.enable_x64(True):
        slopes = jax.grad(lambda maps, p: jnp.sum(pools.gem(maps, p=p) * signs), argnums=(0, 1))(
            maps, jnp.asarray(3.0)
        )
    direction = RNG.normal(size=maps.shape)
    expected = (naive(maps + 1e-6 * direction, 3.0) - naive(maps - 1e-6 * direction, 3.0)) / 2e-6
    np.testing.assert_allclose(np.sum(np.asarray(slopes[0]) * direction), expected, rtol=1e-6)
    expected = (naive(maps, 3.0 + 1e-6) - naive(maps, 3.0 - 1e-6)) / 2e-6
    np.testing.assert_allclose(slopes[1], expected, rtol=1e-6)


def test_gem_of_an_empty_map_is_finite():
    slopes = jax.grad(lambda maps, p: jnp.sum(pools.gem(maps, p=p)), argnums=(0, 1))(
        np.zeros((1, 2, 2, 3), np.float32), 3.0
    )
    assert all(np.isfinite(slope).all() for slope in slopes)


POOLS = {
    "mean": lambda maps: maps.mean(axis=(1, 2)),
    "max": lambda maps: maps.max(axis=(1, 2)),
    "mean_max": lambda maps: maps.mean(axis=(1, 2)) + maps.max(axis=(1, 2)),
    "flatten": lambda maps: np.stack([x.flatten() for x in maps]),
    "gem": functools.partial(_naive_gem, p=3.0),
}


POOL_FNS = {
    "mean": pools.global_mean,
    "max": pools.global_max,
    "mean_max": pools.global_mean_max,
    "flatten": pools.flatten,
    "gem": pools.learned_gem,
}


@pytest.mark.parametrize("name", POOLS)
def test_a_head_uses_its_pool(name):
    head = heads.Head(features=None, pool_fn=POOL_FNS[name])
    out, variables = head.init_with_output(jax.random.key(0), MAPS, train=False)
    np.testing.assert_allclose(out["pooled"], POOLS[name](MAPS), rtol=1e-5)
    np.testing.assert_array_equal(out["features"], out["pooled"])
    learned = variables.get("params", {})
    assert learned == ({"gem": {"p": 3.0}} if name == "gem" else {})


def test_a_head_takes_a_pool_with_options_or_any_function():
    head = heads.Head(
        features=None, pool_fn=functools.partial(pools.learned_gem, p=2.0, epsilon=0.5)
    )
    out, _ = head.init_with_output(jax.random.key(0), MAPS, train=False)
    np.testing.assert_allclose(out["pooled"], _naive_gem(MAPS, 2.0, 0.5), rtol=1e-5)
    head = heads.Head(features=None, pool_fn=lambda maps: maps[:, 0, 0, :])
    np.testing.assert_array_equal(head.apply({}, MAPS, train=False)["pooled"], MAPS[:, 0, 0, :])


def test_learned_attention_is_the_loop():
    head = heads.Head(features=None, pool_fn=functools.partial(pools.learned_attention, heads=2))
    out, variables = head.init_with_output(jax.random.key(0), MAPS, train=False)
    params = jax.tree.map(np.asarray, variables["params"]["attention"])
    x = MAPS.reshape(3, 20, 6)
    k, v = (x @ params[name]["kernel"] + params[name]["bias"] for name in "kv")
    expected = np.zeros((3, 6))
    for i in range(3):
        for h in range(2):
            channels = slice(3 * h, 3 * h + 3)
            logits = [params["query"][h] @ k[i, n, channels] / np.sqrt(3) for n in range(20)]
            weights = np.exp(logits) / np.exp(logits).sum()
            expected[i, channels] = sum(w * v[i, n, channels] for n, w in enumerate(weights))
    np.testing.assert_allclose(out["pooled"], expected, atol=1e-5)
    with pytest.raises(ValueError, match="4 heads do not divide 6 channels"):
        heads.Head(features=None, pool_fn=functools.partial(pools.learned_attention, heads=4)).init(
            jax.random.key(0), MAPS, train=False
        )


def test_class_and_mean_is_an_output_of_nets_with_a_class_token():
    images = RNG.normal(size=(2, 8, 8, 3)).astype(np.float32)
    options = {"width": 8, "heads": 2, "depth": 1, "patch": 4, "image_size": 8}
    for projection in (None, 5):
        net = ViT(**options, registers=2, projection=projection)
        out, variables = net.init_with_output(jax.random.key(0), images, train=False)
        token = out["class_and_mean"][:, :8]
        if projection:  # the token comes before the projection
            token = token @ variables["params"]["proj"]["kernel"]
        np.testing.assert_allclose(token, out["pooled"], atol=1e-5)
        means = [np.mean([x for row in image for x in row], axis=0) for image in out["features"]]
        np.testing.assert_allclose(out["class_and_mean"][:, 8:], means, atol=1e-5)
    encoder = assemble.encoder(net, dim=None, pool_fn=pools.class_and_mean)
    _, _, outputs = encoder.init(jax.random.key(0), images)
    assert outputs["embeddings"].shape == (2, 16)
    encoder = assemble.encoder(convnet(), dim=None, pool_fn=pools.class_and_mean)
    with pytest.raises(ValueError, match="no output 'class_and_mean'; only nets with a class"):
        encoder.init(jax.random.key(0), images)
    with pytest.raises(ValueError, match="a map has none"):
        pools.class_and_mean(MAPS)
