"""Heads: their outputs, initial weights, precision and messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax.nets import heads, layers, pools

RNG = np.random.default_rng(0)


MAPS = RNG.normal(size=(3, 4, 5, 6)).astype(np.float32)


ROWS = RNG.normal(size=(7, 6)).astype(np.float32) * 3 + 1


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


def test_the_neck_is_a_batch_norm_of_the_rows_that_count():
    head = heads.Head(features=None, pool_fn=None, neck=True)
    variables, where = head.init(jax.random.key(0), ROWS, train=False), np.arange(7) != 2
    out, new = head.apply(variables, ROWS, train=True, where=where, mutable="batch_stats")
    mean, var = ROWS[where].mean(axis=0), ROWS[where].var(axis=0)
    np.testing.assert_allclose(out["neck"], (ROWS - mean) / np.sqrt(var + 1e-5), atol=1e-5)
    actual = new["batch_stats"]["bottleneck"]["mean"]
    np.testing.assert_allclose(actual, 0.1 * mean, atol=1e-6)


def test_a_classifier_behind_a_neck_starts_small():
    """Behind a neck N(0, 0.001); else PyTorch's default, uniform within 1 / sqrt(fan in)."""
    x = jnp.zeros((2, 64))
    with_neck = heads.Head(features=None, classes=500, neck=True, pool_fn=None)
    kernel = with_neck.init(jax.random.key(0), x, train=False)["params"]["fc"]["kernel"]
    assert 0.00095 < np.std(kernel) < 0.00105
    plain = heads.Head(features=None, classes=500, pool_fn=None)
    kernel = plain.init(jax.random.key(0), x, train=False)["params"]["fc"]["kernel"]
    assert 0.12 < np.abs(kernel).max() <= 0.125


def test_a_head_in_half_precision_returns_float32():
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
def test_wrong_arguments_are_refused_in_one_line(options, x, message, unchecked):
    head = heads.Head(**options)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        jax.eval_shape(lambda: head.init(jax.random.key(0), x, train=False))
    assert "\n" not in str(caught.value)


def test_a_mask_that_does_not_fit_is_refused(unchecked):
    head = heads.Head(pool_fn=None)
    for where, what in ((np.ones(6, bool), r"bool \[6\]"), (np.ones(7), r"float64 \[7\]")):
        with pytest.raises(ValueError, match=rf"where must be \[7\] bool, one per row, not {what}"):
            head.init(jax.random.key(0), ROWS, train=False, where=where)


def test_an_mlp_is_two_layers_around_a_batch_norm():
    head = heads.Head(features=4, pool_fn=None, dense_fn=functools.partial(layers.mlp, hidden=5))
    _, variables = _init(head, ROWS)
    params = variables["params"]["red"]
    out, state = head.apply(variables, ROWS, train=True, mutable="batch_stats")
    hidden = np.zeros((len(ROWS), 5))
    for i in range(len(ROWS)):
        for k in range(5):
            hidden[i, k] = sum(ROWS[i, j] * params["0"]["kernel"][j, k] for j in range(6))
    normed = (hidden - hidden.mean(axis=0)) / np.sqrt(hidden.var(axis=0) + 1e-5)
    expected = np.maximum(normed, 0) @ params["3"]["kernel"] + params["3"]["bias"]
    np.testing.assert_allclose(out["features"], expected, atol=1e-4)
    running = state["batch_stats"]["red"]["1"]["mean"]
    np.testing.assert_allclose(running, 0.1 * hidden.mean(axis=0), atol=1e-5)
    evaluated = head.apply(variables, ROWS, train=False)["features"]
    expected = np.maximum(hidden / np.sqrt(1 + 1e-5), 0) @ params["3"]["kernel"]
    np.testing.assert_allclose(evaluated, expected + params["3"]["bias"], atol=1e-4)


@pytest.mark.parametrize("features", [4, 6, 9])
def test_an_orthogonal_layer_has_orthonormal_columns_or_rows(features):
    head = heads.Head(features=features, pool_fn=None, dense_fn=layers.orthogonal_dense)
    red = _init(head, ROWS)[1]["params"]["red"]
    kernel = red["kernel"]  # [6 features]
    product = kernel.T @ kernel if features <= 6 else kernel @ kernel.T
    np.testing.assert_allclose(product, np.eye(min(features, 6)), atol=1e-5)
    assert not red["bias"].any()
