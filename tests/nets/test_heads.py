"""Pools, necks and heads against plain numpy, torch, and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax.nets import heads, layers, pools

RNG = np.random.default_rng(0)
MAPS = RNG.normal(size=(3, 4, 5, 6)).astype(np.float32)
ROWS = RNG.normal(size=(7, 6)).astype(np.float32) * 3 + 1


# --- pools --------------------------------------------------------------------------------------


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
def test_gem(p):
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
    way = RNG.normal(size=maps.shape)
    expected = (naive(maps + 1e-6 * way, 3.0) - naive(maps - 1e-6 * way, 3.0)) / 2e-6
    np.testing.assert_allclose(np.sum(np.asarray(slopes[0]) * way), expected, rtol=1e-6)
    expected = (naive(maps, 3.0 + 1e-6) - naive(maps, 3.0 - 1e-6)) / 2e-6
    np.testing.assert_allclose(slopes[1], expected, rtol=1e-6)


def test_gem_of_an_empty_map_is_finite():
    slopes = jax.grad(lambda maps, p: jnp.sum(pools.gem(maps, p=p)), argnums=(0, 1))(
        np.zeros((1, 2, 2, 3), np.float32), 3.0
    )
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_mean_and_maximum():
    expected = MAPS.mean(axis=(1, 2)) + MAPS.max(axis=(1, 2))
    np.testing.assert_allclose(pools.global_mean_max(MAPS), expected, rtol=1e-5)


POOLS = {
    "mean": lambda maps: maps.mean(axis=(1, 2)),
    "max": lambda maps: maps.max(axis=(1, 2)),
    "mean_max": lambda maps: maps.mean(axis=(1, 2)) + maps.max(axis=(1, 2)),
    "flatten": lambda maps: np.stack([one.flatten() for one in maps]),
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
def test_heads_pool(name):
    head = heads.Head(features=None, pool_fn=POOL_FNS[name])
    out, variables = head.init_with_output(jax.random.key(0), MAPS, train=False)
    np.testing.assert_allclose(out["pooled"], POOLS[name](MAPS), rtol=1e-5)
    np.testing.assert_array_equal(out["features"], out["pooled"])
    learned = variables.get("params", {})
    assert learned == ({"gem": {"p": 3.0}} if name == "gem" else {})


def test_pools_take_options_and_functions():
    head = heads.Head(
        features=None, pool_fn=functools.partial(pools.learned_gem, p=2.0, epsilon=0.5)
    )
    out, _ = head.init_with_output(jax.random.key(0), MAPS, train=False)
    np.testing.assert_allclose(out["pooled"], _naive_gem(MAPS, 2.0, 0.5), rtol=1e-5)
    head = heads.Head(features=None, pool_fn=lambda maps: maps[:, 0, 0, :])
    np.testing.assert_array_equal(head.apply({}, MAPS, train=False)["pooled"], MAPS[:, 0, 0, :])


# --- neck ---------------------------------------------------------------------------------------

SCALE = np.linspace(0.5, 2, 6).astype(np.float32)
STATS = {"mean": np.linspace(-1, 1, 6, dtype=np.float32), "var": SCALE[::-1] ** 2}


def _neck(x, *, train=True, where=None, neck=None):
    variables = {"params": {"scale": SCALE}, "batch_stats": STATS}
    neck = neck or heads.BNNeck()
    y, state = neck.apply(variables, x, train=train, where=where, mutable="batch_stats")
    return np.asarray(y), state["batch_stats"]


def test_neck_is_a_batch_norm_without_bias():
    variables = heads.BNNeck().init(jax.random.key(0), ROWS, train=False)
    assert sorted(variables["params"]) == ["scale"]
    y, stats = _neck(ROWS)
    mean, var = ROWS.mean(axis=0), ROWS.var(axis=0)
    np.testing.assert_allclose(y, (ROWS - mean) / np.sqrt(var + 1e-5) * SCALE, atol=1e-5)
    np.testing.assert_allclose(stats["mean"], 0.9 * STATS["mean"] + 0.1 * mean, rtol=1e-5)
    unbiased = ROWS.var(axis=0, ddof=1)
    np.testing.assert_allclose(stats["var"], 0.9 * STATS["var"] + 0.1 * unbiased, rtol=1e-5)
    y, stats = _neck(ROWS, train=False)
    expected = (ROWS - STATS["mean"]) / np.sqrt(STATS["var"] + 1e-5) * SCALE
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(stats["mean"], STATS["mean"])


def test_neck_is_the_batch_norm_of_the_other_layers():
    def ours(norm, x, params):
        y, state = norm.apply(
            {"params": params, "batch_stats": STATS}, x, train=True, mutable="batch_stats"
        )
        return jnp.sum(y**3), state

    params = {"scale": SCALE, "bias": SCALE - 1}
    norms = (heads.BNNeck(use_bias=True), layers.BatchNorm())
    neck, norm = (
        jax.value_and_grad(ours, argnums=(1, 2), has_aux=True)(n, ROWS, params) for n in norms
    )
    for one, other in zip(*map(jax.tree.leaves, (neck, norm)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_neck_against_torch():
    torch = pytest.importorskip("torch")
    norm = torch.nn.BatchNorm1d(6)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor(SCALE))
        norm.running_mean.copy_(torch.tensor(STATS["mean"]))
        norm.running_var.copy_(torch.tensor(np.ascontiguousarray(STATS["var"])))
    theirs = norm(torch.tensor(ROWS)).detach().numpy()
    y, stats = _neck(ROWS)
    np.testing.assert_allclose(y, theirs, atol=1e-5)
    np.testing.assert_allclose(stats["mean"], norm.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(stats["var"], norm.running_var.numpy(), rtol=1e-5)


def test_masking_a_row_of_the_neck_is_dropping_it():
    where = np.array([True, True, False, True, True, False, True])
    broken = np.where(where[:, None], ROWS, np.nan)
    y, stats = _neck(broken, where=where)
    expected, few = _neck(ROWS[where])
    np.testing.assert_allclose(y[where], expected, atol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (stats, few)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    # One row, or none, has no variance to learn from.
    for count in (0, 1):
        _, stats = _neck(ROWS, where=np.arange(7) < count)
        np.testing.assert_array_equal(stats["var"], STATS["var"])


def test_a_frozen_neck_stays():
    neck = heads.BNNeck(frozen=True)
    y, stats = _neck(ROWS, neck=neck)
    np.testing.assert_allclose(y, _neck(ROWS, train=False)[0], atol=1e-6)
    for name in STATS:
        np.testing.assert_array_equal(stats[name], STATS[name])


# --- heads --------------------------------------------------------------------------------------


def _init(head, x):
    init = jax.jit(lambda: head.init_with_output(jax.random.key(0), x, train=False))
    return jax.device_get(init())


def test_outputs_of_a_head():
    head = heads.Head(features=4, classes=5, neck=True)
    out, variables = _init(head, MAPS)
    assert {name: array.shape for name, array in out.items()} == {
        "pooled": (3, 6),
        "features": (3, 4),
        "embeddings": (3, 4),
        "neck": (3, 4),
        "logits": (3, 5),
    }
    params = variables["params"]
    expected = MAPS.mean(axis=(1, 2)) @ params["red"]["kernel"] + params["red"]["bias"]
    np.testing.assert_allclose(out["features"], expected, atol=1e-5)
    np.testing.assert_allclose(
        out["embeddings"], expected / np.linalg.norm(expected, axis=1)[:, None], atol=1e-5
    )
    np.testing.assert_allclose(out["neck"], expected / np.sqrt(1 + 1e-5), atol=1e-5)
    assert sorted(params["fc"]) == ["kernel"]
    np.testing.assert_allclose(out["logits"], out["neck"] @ params["fc"]["kernel"], atol=1e-5)


def test_a_head_without_a_neck_classifies_the_raw_features():
    head = heads.Head(features=4, classes=5, pool_fn=None)
    out, variables = _init(head, ROWS)
    fc = variables["params"]["fc"]
    assert "neck" not in out and "batch_stats" not in variables
    np.testing.assert_allclose(
        out["logits"], out["features"] @ fc["kernel"] + fc["bias"], atol=1e-5
    )
    out, variables = _init(heads.Head(features=4), MAPS)
    assert "logits" not in out and sorted(variables["params"]) == ["red"]


@pytest.mark.parametrize(
    ("classes", "encoder_size"), [(98, 24_607_394), (100, 24_608_420), (3997, 26_607_581)]
)
def test_parameters_of_the_published_head(classes, encoder_size):
    """Of Seidenschwarz et al.: the whole encoder less the 23,508,032 of ResNet-50."""
    head = heads.Head(features=512, pool_fn=pools.global_max, classes=classes)
    maps = jax.ShapeDtypeStruct((2, 8, 8, 2048), jnp.float32)
    shapes = jax.eval_shape(lambda x: head.init(jax.random.key(0), x, train=False), maps)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == encoder_size - 23_508_032


def test_initial_weights():
    """Behind a neck N(0, 0.001); else PyTorch's default, uniform within 1 / sqrt(fan in)."""
    x = jnp.zeros((2, 64))
    behind = heads.Head(features=None, classes=500, neck=True, pool_fn=None)
    kernel = behind.init(jax.random.key(0), x, train=False)["params"]["fc"]["kernel"]
    assert 0.00095 < np.std(kernel) < 0.00105
    plain = heads.Head(features=None, classes=500, pool_fn=None)
    kernel = plain.init(jax.random.key(0), x, train=False)["params"]["fc"]["kernel"]
    assert 0.12 < np.abs(kernel).max() <= 0.125


def test_half_precision_of_a_head():
    options = {"features": 4, "classes": 5, "neck": True, "pool_fn": pools.learned_gem}
    half = heads.Head(**options, dtype=jnp.bfloat16)
    maps = MAPS.astype(jnp.bfloat16)
    variables = half.init(jax.random.key(0), maps, train=False)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    out = half.apply(variables, maps, train=False)
    assert {array.dtype for array in out.values()} == {jnp.dtype("float32")}
    np.testing.assert_allclose(np.linalg.norm(out["embeddings"], axis=1), 1, atol=1e-6)
    full = heads.Head(**options).apply(variables, maps.astype(np.float32), train=False)
    assert 1e-5 < np.abs(out["features"] - full["features"]).max() < 0.05


@pytest.mark.parametrize(
    ("options", "x", "message"),
    [
        ({}, ROWS, r"this head takes maps \[b h w c\], not \[7, 6\]"),
        (
            {"pool_fn": None},
            MAPS,
            r"takes pooled features \[b c\] \(pool_fn=None\), not \[3, ",
        ),
    ],
)
def test_says_what_and_how(options, x, message, unchecked):
    head = heads.Head(**options)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        jax.eval_shape(lambda: head.init(jax.random.key(0), x, train=False))
    assert "\n" not in str(caught.value)


def test_says_which_mask_fits(unchecked):
    head = heads.Head(pool_fn=None)
    for where, what in ((np.ones(6, bool), r"bool \[6\]"), (np.ones(7), r"float64 \[7\]")):
        with pytest.raises(ValueError, match=rf"where must be \[7\] bool, one per row, not {what}"):
            head.init(jax.random.key(0), ROWS, train=False, where=where)
