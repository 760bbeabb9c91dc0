"""What only a GPU can show: `JAX_PLATFORMS= python -m pytest -m gpu tests/gpu`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import losses, nets, ops, retrieval
from dmljax.data import transforms
from dmljax.data.transforms.transform import bind
from dmljax.nets import token_attention
from dmljax.nets.layers import pooling
from dmljax.retrieval import filtering
from dmljax.train import attention_choice, augment

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("tokens", [197, 257, 1370])
def test_cudnn_takes_bfloat16_and_agrees_with_plain(tokens):
    sizes = {"images": 4, "tokens": tokens, "heads": 6, "width": 384}
    times = token_attention.milliseconds(**sizes, dtype=jnp.bfloat16)
    assert isinstance(times["cudnn"], float), times
    refused = token_attention.milliseconds(**sizes, dtype=jnp.float32)
    assert isinstance(refused["cudnn"], str) and isinstance(refused["plain"], float)


def test_a_net_takes_the_fastest_form_and_trains():
    net = nets.dinov2_s14(depth=1, image_size=224, dtype=jnp.bfloat16)
    net, note = attention_choice.choose(net, image_shapes={(224, 224, 3)}, images=8, platform="gpu")
    assert net.attention in token_attention.FORMS and "257 tokens" in note
    x = jnp.asarray(RNG.normal(size=(2, 224, 224, 3)), jnp.bfloat16)
    variables = net.init(jax.random.key(0), x, train=True)
    gradients = jax.jit(jax.grad(lambda v: jnp.sum(net.apply(v, x, train=True)["pooled"] ** 2)))(
        variables
    )
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradients))


def test_ranks_do_not_depend_on_the_type_of_the_filter():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 1000, 6000)
    x = rng.normal(size=(1000, 128))[labels] + rng.normal(size=(6000, 128))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

    def ranks(dtype):
        blocks = retrieval.ranks(x, labels, filter_dtype=dtype)
        return {q: r.tolist() for b in blocks for q, r in zip(b.queries, b.ranks, strict=True)}

    assert ranks("auto") == ranks(jnp.bfloat16) == ranks(None)


@pytest.mark.parametrize("d", [24, 128, 512])
def test_a_similarity_does_not_depend_on_the_number_of_pairs(d):
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1 << 17, d)).astype(np.float32))
    offsets = -0.5 * jnp.sum(x**2, axis=1), -0.5 * jnp.sum(y**2, axis=1)
    of_all = filtering._pair_similarities(x, y, *offsets)
    for count in (1, 100, 1 << 13, 1 << 16):
        of_some = filtering._pair_similarities(*(a[:count] for a in (x, y, *offsets)))
        np.testing.assert_array_equal(of_some, of_all[:count])


def test_ties_are_exact():
    x, labels = RNG.integers(0, 3, (3000, 4)).astype(np.float32), RNG.integers(0, 600, 3000)
    blocks = retrieval.ranks(x, labels)
    first = {int(q): int(r[0]) for b in blocks for q, r in zip(b.queries, b.ranks, strict=True)}
    for query in list(first)[:200]:
        distances = ((x - x[query]) ** 2).sum(axis=1)
        same = labels == labels[query]
        same[query] = False
        ahead = (distances <= distances[same].min()) & (labels != labels[query])
        assert first[query] == 1 + ahead.sum()


TRANSFORMS = {
    "crop": functools.partial(transforms.standard_train, size=32, antialias=False),
    "colors": functools.partial(transforms.standard_train, size=32, antialias=False, color=0.4),
    "erased": functools.partial(transforms.graph_train, size=32),
}


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_pixels_are_those_of_the_host(name):
    image = np.asarray(RNG.integers(0, 256, (40, 48, 3)), np.uint8)
    transform = bind(TRANSFORMS[name])
    program = augment.program(transform, [image.shape])
    draws = [transform.draws(image.shape, np.random.default_rng(i)) for i in range(16)]
    numbers = np.array([sum(x, ()) for x in draws], np.float32)
    actual = jax.jit(functools.partial(augment.apply, program))(np.stack([image] * 16), numbers)
    expected = [transform(image, np.random.default_rng(i)) for i in range(16)]
    difference = np.abs(np.asarray(actual, int) - np.stack(expected))
    assert difference.max() <= 4 and difference.mean() < 0.5


X = np.asarray(RNG.normal(size=(96, 16)), np.float32)
LABELS = np.arange(96) // 4
PROXIES = np.asarray(RNG.normal(size=(24, 16)), np.float32)
MAPS = np.asarray(RNG.normal(size=(4, 12, 12, 8)), np.float32)
FUNCTIONS = {
    name: functools.partial(getattr(losses, name), labels=LABELS, tile=32)
    for name in ("contrastive", "multi_similarity", "ntxent", "recall_at_k", "smooth_ap", "supcon")
}
FUNCTIONS |= {
    "clip": lambda x: losses.clip(x, PROXIES[LABELS % 24] + x, tile=32),
    "classes in tiles": lambda x: losses.arcface(x, LABELS, PROXIES, tiles=ops.ClassTiles(8)),
    "max pooling": lambda x: jnp.sum(
        pooling.max_pool(MAPS * x[0, 0], 3, strides=2, padding=1) ** 2
    ),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_values_and_gradients_are_those_of_cpus(name):
    """Products in float32: by default GPUs multiply in TF32."""
    function = jax.jit(jax.value_and_grad(FUNCTIONS[name]))
    with jax.default_matmul_precision("highest"):
        expected = function(jax.device_put(X, jax.devices("cpu")[0]))
        actual = function(jax.device_put(X, jax.devices()[0]))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
