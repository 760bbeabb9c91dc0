"""Prompts of a vision transformer against a loop over blocks in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained import VIT

from dmljax.adapt import trained
from dmljax.config import registry
from dmljax.methods import pairs

COUNT, HEADS, WIDTH = 2, 2, 16


def _norm(x, params):
    centered = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return centered / deviation * np.asarray(params["scale"]) + np.asarray(params["bias"])


def _dense(x, params):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def _gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _block(x, params):
    """One image `[n d]`."""
    qkv = _dense(_norm(x, params["norm1"]), params["attn"]["qkv"])
    heads = []
    for head in range(HEADS):
        size = WIDTH // HEADS
        q, k, v = (
            qkv[:, i * WIDTH + head * size : i * WIDTH + (head + 1) * size] for i in range(3)
        )
        scores = np.exp(q @ k.T / math.sqrt(size))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v)
    x = x + _dense(np.concatenate(heads, axis=1), params["attn"]["proj"])
    hidden = _gelu(_dense(_norm(x, params["norm2"]), params["mlp"]["fc1"]))
    return x + _dense(hidden, params["mlp"]["fc2"])


def _class_token(image, params, prompts, registers):
    """The class token after all blocks, with prompts `[depth or 1, count, width]`."""
    kernel = np.asarray(params["patch_embed"]["proj"]["kernel"]).reshape(-1, WIDTH)
    patches = [
        image[y : y + 4, x : x + 4].reshape(-1) @ kernel for y in (0, 4, 8) for x in (0, 4, 8)
    ]
    patches = np.stack(patches) + np.asarray(params["patch_embed"]["proj"]["bias"])
    positions = np.asarray(params["pos_embed"])[0]
    tokens = [np.asarray(params["cls_token"])[0] + positions[:1]]
    tokens += [np.asarray(params["reg_token"])[0]] if registers else []
    first, last = np.concatenate(tokens), patches + positions[1:]
    between = prompts[0]
    for i in range(3):
        between = prompts[i] if i < len(prompts) else between
        x = _block(np.concatenate((first, between, last)), params["blocks"][str(i)])
        first, between, last = np.split(x, (len(first), len(first) + COUNT))
    return _norm(first[:1], params["norm"])[0]


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
        token = _class_token(image, params["net"], prompts, registers)
        np.testing.assert_allclose(embedding, token / np.linalg.norm(token), atol=1e-5)
    maps = net.apply(
        {"params": {**params["net"], "prompts": params["prompts"]}}, images, train=False
    )
    assert maps["features"].shape == maps["1"].shape == (2, 3, 3, WIDTH)
