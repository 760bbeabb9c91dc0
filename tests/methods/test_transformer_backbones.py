"""ABE on a small ViT, and the recipes of DVML, ABE and the graph method with published weights."""

import functools

import jax
import numpy as np
import optax
import pytest

from dmljax import at_hand, metrics, recipes
from dmljax.methods.abe import abe, contrastive
from dmljax.nets.vit import ViT

# Optimizing the programs would take nearly all of the time of these tests.
_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
CLASSES, EACH, SIZE = 6, 4, 32
VIT = functools.partial(ViT, width=16, heads=2, depth=2, patch=8, image_size=SIZE, registers=1)
SPLIT = {"split": ("0", "1"), "attention": "1"}


def _batch(seed):
    """Noisy patterns of a few classes; the patterns do not depend on the seed."""
    patterns = np.random.default_rng(9).normal(size=(CLASSES, 4, 4, 3)).repeat(8, 1).repeat(8, 2)
    labels = np.repeat(np.arange(CLASSES, dtype=np.int32), EACH)
    noise = np.random.default_rng(seed).normal(size=(len(labels), SIZE, SIZE, 3))
    return {"images": (patterns[labels] + 2 * noise).astype(np.float32), "labels": labels}


# `abe` cuts the nets at their blocks; the others take only pooled features.
def test_an_ensemble_learns_on_a_transformer():
    method = abe(VIT(), contrastive, classes=CLASSES, learners=2, dim=8, **SPLIT)
    optimizer = optax.adam(3e-3)
    params, model_state = _jit(method.init)(jax.random.key(0), _batch(0))

    @_jit
    def step(params, model_state, opt_state, batch, number):
        key = jax.random.fold_in(jax.random.key(1), number)
        fn = functools.partial(method.loss, batch=batch, key=key, step=number)
        grad_fn = jax.value_and_grad(fn, has_aux=True)
        (loss, (model_state, _)), gradients = grad_fn(params, model_state)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), model_state, opt_state, loss

    embed = _jit(method.embed)

    def recall(params, model_state):
        test = _batch(1000)
        vectors = np.asarray(embed(params, model_state, test["images"]))
        return metrics.retrieval(vectors, test["labels"], ks=(1,))["R@1"]

    first = recall(params, model_state)
    opt_state, values = optimizer.init(params), []
    for number in range(30):
        batch = _batch(number)
        params, model_state, opt_state, loss = step(params, model_state, opt_state, batch, number)
        values.append(float(loss))
    last = recall(params, model_state)
    assert np.mean(values[-5:]) < 0.9 * np.mean(values[:5])
    assert last > first + 0.2


@pytest.mark.parametrize("net", ["dinov2_s14", "convnext_t"])
@pytest.mark.parametrize("name", ["abe", "dvml", "graph"])
def test_a_recipe_takes_published_weights(monkeypatch, tmp_path, name, net):
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: {net: tmp_path / net})
    config = getattr(recipes, name)(dataset="cars196", net=net)
    assert config["net"].items() >= {"name": net, "weights": str(tmp_path / net)}.items()
    assert "normalize" not in config and config["optimizer"]["rate"] == 1e-5
    assert config["transform"]["size"] == config["eval_transform"]["size"]
    if name == "abe":
        splits = {"dinov2_s14": (("5", "6"), "8"), "convnext_t": (("2.4", "2.5"), "2.8")}
        assert (config["method"]["split"], config["method"]["attention"]) == splits[net]
        with pytest.raises(ValueError, match="branch and blocks are stages of GoogLeNet"):
            recipes.abe(net=net, branch="4a")
    with pytest.raises(ValueError, match="there is no 'no_such_net'"):
        getattr(recipes, name)(net="no_such_net")
