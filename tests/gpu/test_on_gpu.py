"""What only a GPU can show: `JAX_PLATFORMS= python -m pytest -m gpu tests/gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import nets, retrieval
from dmljax.nets import token_attention
from dmljax.train import attention_choice

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
    labels = RNG.integers(0, 1000, 6000)
    x = RNG.normal(size=(1000, 128))[labels] + RNG.normal(size=(6000, 128))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

    def ranks(dtype):
        blocks = retrieval.ranks(x, labels, filter_dtype=dtype)
        return {q: r.tolist() for b in blocks for q, r in zip(b.queries, b.ranks, strict=True)}

    assert ranks("auto") == ranks(jnp.bfloat16) == ranks(jnp.float32)


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
