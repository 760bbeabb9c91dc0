"""The recipes for own images and glyphs choose batches and rates by the kind of the loss."""

import jax
import numpy as np
import pytest

from dmljax import recipes
from dmljax.config.build import build


@pytest.mark.parametrize("recipe", [recipes.glyphs, recipes.folder])
def test_losses_against_proxies_see_one_image_of_a_class_and_quicker_proxies(recipe):
    pairs, proxies = recipe(loss="contrastive"), recipe(loss="normalized_softmax")
    images = pairs["sampler"]["classes"] * pairs["sampler"]["per_class"]
    assert pairs["sampler"]["per_class"] == 4
    assert proxies["sampler"] == {"name": "class_balanced", "classes": images, "per_class": 1}
    assert proxies["method"] == {**pairs["method"], "name": "proxies", "proxy_init": 1.0}
    rates = {group["path"]: group["factor"] for group in proxies["optimizer"]["groups"]}
    assert rates["^proxies"] == 30.0
    assert recipe() == recipe(loss="multi_similarity") and "miner" not in recipes.glyphs()


def test_an_unknown_loss_of_a_recipe_is_refused():
    with pytest.raises(ValueError, match=r"loss is multi_similarity, .* or arcface, not 'proxies'"):
        recipes.folder(loss="proxies")


@pytest.mark.parametrize("loss", ["triplet", "circle", "proxy_nca_pp", "arcface"])
def test_losses_of_a_recipe_run_with_its_method(loss):
    run = build(recipes.glyphs(loss=loss))
    batch = {
        "images": jax.ShapeDtypeStruct((8, 32, 32, 1), np.float32),
        "labels": jax.ShapeDtypeStruct((8,), np.int32),
    }
    key = jax.random.key(0)
    params, state = jax.eval_shape(run.method.init, key, batch)
    value, _ = jax.eval_shape(
        lambda *arrays: run.method.loss(*arrays, key=key, step=0), params, state, batch
    )
    assert value.shape == ()
    assert ("proxies" in params) == (run.config["method"]["name"] == "proxies")
