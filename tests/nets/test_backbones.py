"""Backbones against PyTorch, stage by stage, and a training step."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backbone_cases import (
    CASES,
    REFERENCED,
    assert_close,
    compiled_train,
    evaluate,
    images,
    run,
    shapes,
    step_images,
    train_fn,
)
from torch_weights import fill, randomize, variables

from dmljax import nets
from dmljax.nets import layers


def reference(name, **keywords):
    """The PyTorch net with random values, and the same values as variables of our net."""
    pytest.importorskip("torch")
    module, _, cls = CASES[name].reference.partition(":")
    cls = getattr(importlib.import_module(f"reference_{module}"), cls)
    net = randomize(cls(**keywords))
    return net, variables({k: v.numpy().copy() for k, v in net.state_dict().items()})


def to_torch(x):
    return importlib.import_module("torch").from_numpy(np.asarray(x)).permute(0, 3, 1, 2)


def to_numpy(x):
    x = x.detach().numpy()
    return x.transpose(0, 2, 3, 1) if x.ndim == 4 else x


@pytest.mark.parametrize("name", REFERENCED)
def test_every_stage_agrees_with_pytorch(name):
    net, values = reference(name)
    assert jax.tree.map(jnp.shape, values) == jax.tree.map(lambda s: s.shape, shapes(name))
    x = images(name)
    ours = dict(evaluate(name)(values, x))
    theirs = {key: to_numpy(value) for key, value in net.eval()(to_torch(x)).items()}
    assert_close(ours["max_pooled"], theirs["features"].max((1, 2)))
    assert set(ours) - {"max_pooled"} == set(theirs)
    for key, value in theirs.items():
        assert_close(ours[key], value)


def check_step(name, step, dtype, tolerance):
    net, values = reference(name)
    values = jax.tree.map(lambda a: a.astype(dtype), values)
    x = step_images(name).astype(dtype)
    theirs = net.to(to_torch(x).dtype).train()(to_torch(x), **CASES[name].steps)
    shape = to_numpy(theirs["features"]).shape
    directions = np.random.default_rng(8).normal(size=shape).astype(dtype)
    ((theirs["features"] * to_torch(directions)).sum() + (theirs["pooled"] ** 2).sum()).backward()
    (outputs, statistics), gradients = step(values, x, directions)
    assert_close(outputs["features"], to_numpy(theirs["features"]), tolerance / 10)

    state = {k: v.numpy() for k, v in net.state_dict().items()}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        dict(statistics),
        variables(state).get("batch_stats", {}),
    )
    expected = {
        path: np.zeros(p.shape, dtype) if p.grad is None else p.grad.numpy()
        for path, p in net.named_parameters()
    }
    expected = variables(expected)["params"]
    # The gradient of a bias before a batch norm is rounding only, hence the absolute tolerance.
    largest = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(expected))

    def compare(a, b):
        assert np.max(np.abs(a - b)) <= tolerance * max(np.max(np.abs(b)), 1e-3 * largest)

    jax.tree.map(compare, gradients, expected)
    nonzero = [leaf for leaf in jax.tree.leaves(expected) if np.max(np.abs(leaf)) > 1e-3 * largest]
    assert len(nonzero) >= 4


HEAVY = {"bn_inception", "googlenet_bn"}  # these compile for minutes


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in HEAVY)) for n in REFERENCED]
)
def test_a_training_step_agrees_with_pytorch(name):
    check_step(name, compiled_train(name), np.float32, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in REFERENCED if CASES[name].map_shape])
def test_a_training_step_of_all_stages_agrees_with_pytorch(name, monkeypatch):
    # In float32 the gradients of a deep net differ, because rounding decides some relus and maxima.
    monkeypatch.setitem(CASES, name, CASES[name]._replace(steps={}, map_shape=None, size=96))
    with jax.enable_x64(True):
        check_step(name, train_fn(name), np.float64, 1e-6)


def test_googlenet_with_the_response_norms_of_dvmls_code():
    lrn = {"lrn_size": 11, "lrn_alpha": 11e-4}
    net, values = reference("googlenet", lrn=(11, 11e-4))
    x = 60 * images("googlenet")
    ours = run(nets.googlenet(stop="pool2", **lrn), values, x)["features"]
    assert_close(ours, to_numpy(net(to_torch(x), stop="pool2")["features"]))
    plain = run(nets.googlenet(stop="pool2"), values, x)["features"]
    assert np.max(np.abs(ours - plain)) > 0.01 * np.max(ours)


def test_googlenet_bn_scales_imagenet_input_to_unit_range():
    pixels = np.random.default_rng(0).uniform(size=(1, 32, 32, 3)).astype(np.float32)
    normal = (pixels - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    plain = nets.googlenet_bn(stop="conv1", transform_input=False)
    values = fill(layers.shapes(plain, 32))
    expected = plain.apply(values, 2 * pixels - 1, train=False)["features"]
    scaled = nets.googlenet_bn(stop="conv1")
    assert_close(scaled.apply(values, normal, train=False)["features"], expected, 1e-5)
    # Feature maps of later stages are not scaled.
    late = {"start": "pool1", "stop": "pool1"}
    plain = nets.googlenet_bn(transform_input=False, **late)
    scaled = nets.googlenet_bn(**late)
    a, b = (net.apply({}, expected, train=False)["features"] for net in (scaled, plain))
    np.testing.assert_array_equal(a, b)


GOLDEN = {
    "bottleneck": (13.404375, 15.390230),
    "basic": (-10.682175, -8.753193),
    "googlenet": (8.698211, 8.208907),
    "googlenet_bn": (12.996244, 12.506556),
    "bn_inception": (-7.293233, -6.654482),
    "mobilenet_v2": (-2.556430, -2.417935),
    "lecun": (0.683973, 1.142453),
    "convnet": (-1.044481, -1.327793),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_outputs_are_those_that_agreed_with_pytorch(name):
    outputs = evaluate(name)(fill(shapes(name)), images(name))
    last = outputs["embeddings" if name == "lecun" else "logits"]
    np.testing.assert_allclose(last[:2, 0], GOLDEN[name], rtol=1e-4)
