"""Stochastic depth, and what is kept for the gradient (`remat`), by name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import nets
from dmljax.methods import pairs
from dmljax.nets import layers

VIT = functools.partial(
    nets.vit_s16, width=16, heads=2, depth=3, patch=4, image_size=16, resize="antialiased"
)
CONVNEXT = functools.partial(nets.convnext_t, width=8, blocks=(1, 1, 1, 1), impl="xla")
RNG = np.random.default_rng(0)


def _noisy(params):
    return jax.tree.map(lambda x: x + RNG.normal(size=x.shape).astype(np.float32) * 0.3, params)


def test_a_branch_is_left_out_for_a_share_of_the_images():
    y = jnp.asarray(RNG.normal(size=(4000, 2, 3)), jnp.float32)
    dropped = layers.DropPath(0.25).apply({}, y, rngs={"dropout": jax.random.key(0)})
    is_left_out = np.all(dropped == 0, axis=(1, 2))
    np.testing.assert_allclose(dropped[~is_left_out], y[~is_left_out] / 0.75, rtol=1e-6)
    assert abs(is_left_out.mean() - 0.25) < 0.03
    np.testing.assert_array_equal(layers.DropPath(0.25).apply({}, y), y)  # without a key


@pytest.mark.parametrize(("make", "last", "remat"), [(VIT, "2", "blocks"), (CONVNEXT, "3", "none")])
def test_the_last_block_is_left_out_at_the_rate_and_the_first_never(make, last, remat):
    net = make(drop_path=0.75, remat=remat)
    x = jnp.asarray(RNG.normal(size=(1, 32, 32, 3)), jnp.float32)
    x = jnp.broadcast_to(x, (64, *x.shape[1:]))
    variables = {"params": _noisy(net.init(jax.random.key(0), x[:1], train=True)["params"])}
    same_names = make().init(jax.random.key(0), x[:1], train=True)["params"]
    assert jax.tree.structure(same_names) == jax.tree.structure(variables["params"])
    apply = jax.jit(functools.partial(net.apply, train=True))
    outputs = apply(variables, x, rngs={"dropout": jax.random.key(1)})
    first = np.asarray(outputs["0"])
    np.testing.assert_allclose(first, np.broadcast_to(first[:1], first.shape), atol=1e-5)
    kinds = {np.round(row, 2).tobytes() for row in np.asarray(outputs[last])}
    assert len(kinds) > 3  # images of equal pixels, through other blocks
    for plain in (
        net.apply(variables, x[:1], train=False),
        net.apply(variables, x[:1], train=True),  # without a key
        make().apply(variables, x[:1], train=True),
    ):
        np.testing.assert_allclose(plain[last], make().apply(variables, x[:1], train=False)[last])


def test_blocks_are_left_out_at_rates_that_grow_with_depth():
    rates = [layers.drop_rate(i, 5, 0.4, train=True) for i in range(5)]
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3, 0.4])
    assert layers.drop_rate(0, 1, 0.4, train=True) == 0
    with pytest.raises(ValueError, match="drop_path is at least 0 and below 1, not 1"):
        layers.drop_rate(0, 2, 1.0, train=True)


def test_a_method_draws_in_training_and_not_in_evaluation():
    method = pairs(VIT(drop_path=0.5), lambda x, y: jnp.sum(x[0] * x[1]), classes=2, dim=None)
    images = jnp.asarray(RNG.normal(size=(4, 16, 16, 3)), jnp.float32)
    batch = {"images": images, "labels": jnp.zeros(4, int)}
    params, state = method.init(jax.random.key(0), batch)
    params = _noisy(params)
    loss = jax.jit(lambda key: method.loss(params, state, batch, key=key, step=0)[0])
    losses = [float(loss(jax.random.key(i))) for i in (1, 1, 2, 3)]
    assert losses[0] == losses[1] and len(set(losses)) > 1
    embeddings = jax.jit(lambda: method.embed(params, state, images))()
    plain = pairs(VIT(), lambda x, y: 0.0, classes=2, dim=None).embed(params, state, images)
    np.testing.assert_allclose(embeddings, plain, atol=1e-5)


def test_remat_by_name_changes_what_is_kept_and_no_gradient():
    """By the arrays that the forward pass leaves for the backward pass."""
    x = jnp.asarray(RNG.normal(size=(8, 32, 32, 3)), jnp.float32)
    params = VIT().init(jax.random.key(0), x[:1], train=False)["params"]
    kept, gradients = {}, {}
    for remat in ("none", "dots", "blocks"):
        net = VIT(remat=remat)

        def loss(params, net=net):
            return jnp.sum(net.apply({"params": params}, x, train=True)["pooled"] ** 2)

        residuals = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(residuals))
        gradients[remat] = jax.jit(jax.grad(loss))(params)
    assert kept["none"] > 1.5 * kept["dots"] > 1.5 * 1.5 * kept["blocks"]
    for remat in ("dots", "blocks"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
            gradients[remat],
            gradients["none"],
        )
    with pytest.raises(ValueError, match="remat is one of none, blocks, dots, not 'all'"):
        VIT(remat="all").init(jax.random.key(0), x[:1], train=False)
