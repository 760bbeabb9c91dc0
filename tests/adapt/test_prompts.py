"""Prompts of a vision transformer against a loop over blocks in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive_vit import WIDTH, class_token
from pretrained import VIT

from dmljax.adapt import trained
from dmljax.config import registry
from dmljax.methods import pairs

COUNT = 2


@pytest.mark.parametrize(("deep", "registers"), [(True, 0), (False, 0), (True, 3)])
def test_blocks_read_their_prompts_beside_the_patches(deep, registers):
    net = registry.resolve("net", VIT | {"registers": registers})()
    method = pairs(net, lambda x, y: 0.0, classes=2, dim=None)
    adapted = trained.prompts(method, count=COUNT, deep=deep)
    images = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)
    params, state = adapted.method.init(jax.random.key(0), {"images": jnp.asarray(images)})
    noise = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: x + np.asarray(noise.normal(size=x.shape) * 0.2, np.float32), params
    )
    assert params["prompts"].shape == (3 if deep else 1, COUNT, WIDTH)
    embeddings = adapted.deployed.embed(params, state, jnp.asarray(images))
    assert adapted.deployed is adapted.method  # the prompts are shipped
    prompts = np.asarray(params["prompts"])
    for image, embedding in zip(images, embeddings, strict=True):
        token = class_token(image, params["net"], prompts, registers)
        np.testing.assert_allclose(embedding, token / np.linalg.norm(token), atol=1e-5)
    maps = net.apply(
        {"params": {**params["net"], "prompts": params["prompts"]}}, images, train=False
    )
    assert maps["features"].shape == maps["1"].shape == (2, 3, 3, WIDTH)
