"""Vision transformers, beyond the outputs of published files, which test_published.py compares."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import STORED, apply, images, keys, load

from dmljax import nets
from dmljax.nets.token_attention import attention
from dmljax.nets.transformer import gelu

KEY = jax.random.key(0)


def test_bfloat16_is_near_float32(tmp_path):
    for name in ("dinov3_splus", "siglip"):
        variables, (size, key) = load(tmp_path, name), list(keys(name).items())[-1]
        outputs = apply(name, variables, images(size), dtype="bfloat16")
        ours, exact = outputs["pooled"], STORED[f"{key}/pooled"]
        cosines = np.sum(ours * exact, -1) / np.linalg.norm(ours, axis=-1)
        assert np.min(cosines / np.linalg.norm(exact, axis=-1)) > 0.999
        assert np.max(np.abs(ours - exact)) > 1e-4


# Image towers as transformers holds them, with the mask token of DINO and without what is in no
# file of ours: https://huggingface.co/docs/transformers.
PUBLISHED_COUNTS = {
    "dinov2_s14": 22_056_576 - 384,
    "dinov2_b14": 86_580_480 - 768,
    "dinov2_l14": 304_368_640 - 1024,
    "dinov2_g14": 1_136_480_768 - 1536,
    "dinov2_s14_reg": 22_056_576 + 3 * 384,
    "dinov2_b14_reg": 86_580_480 + 3 * 768,
    "dinov2_l14_reg": 304_368_640 + 3 * 1024,
    "dinov2_g14_reg": 1_136_480_768 + 3 * 1536,
    "dinov3_s16": 21_596_544 - 384,
    "dinov3_splus16": 28_692_864 - 384,
    "dinov3_b16": 85_660_416 - 768,
    "dinov3_l16": 303_129_600 - 1024,
    "dinov3_hplus16": 840_592_640 - 1280,
    "clip_b32": 87_849_216,
    "clip_b16": 86_192_640,
    "clip_l14": 303_966_208,
    "clip_l14_336": 304_293_888,
    "openclip_h14": 632_077_824 - 1024,  # timm adds a bias of zeros
    "siglip_b16_224": 92_884_224,
    "siglip2_b16_256": 92_930_304,
    "siglip2_l16_256": 315_956_224,
    "siglip_so400m14_384": 428_225_600,
    "siglip2_so400m16_256": 427_888_064,
    "vit_s16": 21_665_664,
    "vit_b16": 85_798_656,
}


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_the_number_of_parameters_is_the_published_one(name):
    def count(depth):
        model = getattr(nets, name)(depth=depth)
        shapes = nets.layers.shapes(model, model.image_size)["params"]
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    one, two = count(1), count(2)  # all blocks are equal
    assert one + (getattr(nets, name)().depth - 1) * (two - one) == PUBLISHED_COUNTS[name]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tokens", [5, 257])  # 257 are computed in two parts
@pytest.mark.parametrize(("dtype", "atol"), [(jnp.float32, 2e-6), (jnp.bfloat16, 0.02)])
def test_attention_is_that_of_jax(dtype, atol, tokens, is_causal):
    shape = (2, tokens, 3, 4)
    q, k, v = (jax.random.normal(key, shape, dtype) for key in jax.random.split(KEY, 3))
    plain = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
    ours_fn = functools.partial(attention, is_causal=is_causal)

    def value_and_gradients(fn, *arrays):
        result, gradients_fn = jax.vjp(fn, *arrays)
        return result, *gradients_fn(v)

    run = jax.jit(value_and_gradients, static_argnums=0)
    results, expected = run(ours_fn, q, k, v), run(plain, q, k, v)
    assert results[0].dtype == dtype
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (ours, theirs)), atol=atol, rtol=atol
        )


def test_two_devices_share_a_batch_that_they_do_not_divide_evenly():
    net, side = nets.dinov2_s14(image_size=56, depth=2, width=64, heads=2), 56  # 17 tokens
    params = nets.layers.shapes(net, side)["params"]

    def flops(devices):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
        places = [jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in ((), ("data",))]

        def step(params, images):
            def loss(params):
                outputs = net.apply({"params": params}, images[:5], train=False)
                return jnp.sum(outputs["pooled"] ** 3)

            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return jax.grad(loss)(params)

        images = jax.ShapeDtypeStruct((5 + 5 % devices, side, side, 3), jnp.float32)
        step_fn = jax.jit(step, in_shardings=tuple(places), out_shardings=places[0])
        return step_fn.lower(params, images).compile().cost_analysis()["flops"]

    assert flops(2) < 0.7 * flops(1)  # a device has 3 of the 5 images


def test_gelu_keeps_the_tail_of_negative_values_in_half_precision():
    x = jnp.linspace(-4, 4, 81)
    expected = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in np.asarray(x, np.float64)]
    np.testing.assert_allclose(gelu(x), expected, rtol=2e-3, atol=1e-6)
    half = np.asarray(gelu(x.astype(jnp.bfloat16)), np.float64)
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in np.asarray(x.astype(jnp.bfloat16))]
    np.testing.assert_allclose(half, exact, rtol=0.05, atol=1e-6)
