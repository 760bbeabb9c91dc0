"""Semantic proxies against loops in numpy, their gradients, and a whole run with prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive_vit import class_token
from one_step import jit
from pretrained import VIT, with_weights
from processes import same
from system import tiny

from dmljax import losses, methods
from dmljax.config import registry
from dmljax.config.build import build
from dmljax.train.start import first_state
from dmljax.train.step import train_step

CLASSES, COUNT, D = 5, 2, 4
LABELS = np.array([3, 0, 3, 1, 0, 3])  # in any order and number; no image of 2 and 4
KEY = jax.random.key(0)
OPTIONS = {"classes": CLASSES, "dim": D, "count": COUNT, "depth": 2, "share": 0.3}


@pytest.fixture(scope="module")
def case():
    """A method, a batch, and parameters and state of which no value is 0."""
    net = registry.resolve("net", VIT)()
    method = methods.semantic_proxies(net, losses.proxy_anchor, **OPTIONS)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(len(LABELS), 12, 12, 3)).astype(np.float32)
    batch = {"images": jnp.asarray(images), "labels": jnp.asarray(LABELS)}
    params, state = method.init(KEY, batch)
    noise = lambda x: x + np.asarray(rng.normal(size=x.shape) * 0.2, np.float32)  # noqa: E731
    return method, batch, jax.tree.map(noise, params), state


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _unit(x):
    return x / np.linalg.norm(x)


def _naive_semantic(batch, params, state):
    """One image after the other, with dictionaries."""
    generator = jax.tree.map(np.asarray, params["generator"])
    head, gru = generator["head"], generator["gru"]
    rows = dict(enumerate(np.asarray(state["semantic"], np.float64)))
    for image, label in zip(np.asarray(batch["images"]), LABELS, strict=True):
        prompts = [*generator["prompts"][label], np.zeros((0, 16))]
        x = class_token(image, params["net"], prompts)
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * head["norm"]["scale"] + head["norm"]["bias"]
        x = _unit(x @ head["linear"]["kernel"] + head["linear"]["bias"])
        h = rows[label]
        gates = {}
        for gate in "rz":
            i, hidden = gru[f"i{gate}"], gru[f"h{gate}"]
            gates[gate] = _sigmoid(x @ i["kernel"] + i["bias"] + h @ hidden["kernel"])
        recurrent = h @ gru["hn"]["kernel"] + gru["hn"]["bias"]
        candidate = x @ gru["in"]["kernel"] + gru["in"]["bias"] + gates["r"] * recurrent
        rows[label] = (1 - gates["z"]) * np.maximum(candidate, 0) + gates["z"] * h
    return np.stack([_unit(rows[label]) for label in range(CLASSES)])


def test_the_loss_sees_proxies_that_a_loop_over_images_accumulates(case):
    method, batch, params, state = case
    # Prompts of `trained=prompts` are for the embeddings alone.
    prompts = np.random.default_rng(1).normal(size=(3, COUNT, 16)).astype(np.float32)
    with_prompts = {**params, "net": {**params["net"], "prompts": jnp.asarray(prompts)}}
    value, (new_state, _) = jax.jit(method.loss)(with_prompts, state, batch, key=KEY, step=0)
    semantic = _naive_semantic(batch, params, state)
    np.testing.assert_allclose(new_state["semantic"], semantic, atol=1e-5)
    np.testing.assert_allclose(semantic[[2, 4]], state["semantic"][np.array([2, 4])], atol=1e-6)
    assert np.abs(semantic - state["semantic"])[[0, 1, 3]].max(axis=1).min() > 1e-2
    tokens = np.stack([class_token(x, params["net"], list(prompts)) for x in batch["images"]])
    red = params["head"]["red"]
    features = jnp.asarray(tokens @ np.asarray(red["kernel"]) + np.asarray(red["bias"]))
    rows = 0.3 * params["proxies"] + 0.7 * jnp.asarray(semantic, jnp.float32)
    np.testing.assert_allclose(value, losses.proxy_anchor(features, LABELS, rows), rtol=1e-4)
    embeddings = method.embed(with_prompts, state, batch["images"])
    expected = features / jnp.linalg.norm(features, axis=1, keepdims=True)
    np.testing.assert_allclose(embeddings, expected, atol=1e-5)


def test_gradients_reach_the_prompts_of_the_classes_of_the_batch_and_the_generator(case):
    method, batch, params, state = case

    @jax.jit
    def value_and_gradient(generator):
        def loss(generator):
            rest = {**params, "generator": generator}
            return method.loss(rest, state, batch, key=KEY, step=0)[0]

        return jax.value_and_grad(loss)(generator)

    generator = params["generator"]
    value, gradient = value_and_gradient(generator)
    by_class = np.abs(gradient["prompts"]).max(axis=(1, 2, 3))
    assert (by_class[[0, 1, 3]] > 1e-4).all() and not by_class[[2, 4]].any()
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) > 1e-6
    size = sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(gradient)) ** 0.5
    moved = jax.tree.map(lambda x, g: x + 2e-3 * g / size, generator, gradient)
    slope = (value_and_gradient(moved)[0] - value) / 2e-3
    assert float(slope) == pytest.approx(size, rel=0.1)


def test_a_frozen_net_with_prompts_learns(tmp_path):
    config = tiny(
        tmp_path,
        net=with_weights(tmp_path, VIT | {"depth": 2, "width": 8}),
        trained={"name": "prompts", "count": 2},
        method={"name": "semantic_proxies", "dim": 4, "count": 2, "depth": 1},
        loss={"name": "proxy_anchor"},
        optimizer={"name": "adam", "rate": 2e-2},
        steps=40,
        runtime={"devices": 1},
    )
    run = build(config)
    first = state = first_state(run)
    assert state.model_state["semantic"].shape == (4, 4)
    assert state.params["generator"]["prompts"].shape == (4, 1, 2, 8)
    options = {"normalize_fn": run.normalize_fn, "seed": 0, "frozen": run.frozen}
    step_fn = jit(train_step(run.method, run.optimizer, **options))
    rows = np.arange(0, 32, 4)
    batch = {"images": run.train.records[rows], "labels": run.train.labels[rows]}
    values = []
    for _ in range(20):
        state, metrics = step_fn(state, batch)
        values.append(float(metrics["loss"]))
    assert values[-1] < 0.6 * values[0]
    same(state.params["net"], first.params["net"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": {"depth": 3}}, "depth=3 is above the 2 blocks of this net"),
        ({"method": {"count": 0}}, "count=0 and depth=1 must be 1 or more"),
        ({"method": {"share": 1.5}}, "share=1.5 between 0 and 1"),
        (
            {"net": {"name": "convnet", "widths": [4], "strides": [2]}},
            "above the 0 blocks ",
        ),
        ({"trained": "last", "features": "cached"}, "features='cached' is not enough"),
        ({"chunk": 2}, "chunk needs a method with a split loss"),
    ],
)
def test_what_has_no_semantic_proxies_is_refused_in_one_line(tmp_path, fields, words):
    net = with_weights(tmp_path, fields.pop("net", VIT | {"depth": 2, "width": 8}))
    method = {"name": "semantic_proxies", "dim": 4, "depth": 1} | fields.pop("method", {})
    config = tiny(tmp_path, net=net, method=method, loss="proxy_anchor") | fields
    with pytest.raises((ValueError, TypeError), match=words) as error:
        build(config)
    assert "\n" not in str(error.value)
