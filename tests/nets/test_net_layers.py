"""Layers against PyTorch, and against numpy where it is not installed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dmljax.nets import layers

rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


def torch_map(x):
    return pytest.importorskip("torch").from_numpy(np.array(x)).permute(0, 3, 1, 2)


def from_torch(x):
    return x.detach().permute(0, 2, 3, 1).numpy()


# --- pooling ------------------------------------------------------------------------------------


def windows(n, size, strides, padding, ceil):
    """First and last index of every window, in a map padded on both sides; by definition."""
    padded = n + 2 * padding
    starts = [s for s in range(0, padded, strides) if s + size <= padded]
    if ceil and starts[-1] + size < padded and starts[-1] + strides < n + padding:
        starts.append(starts[-1] + strides)
    return [(s, min(s + size, padded)) for s in starts]


CASES = list(itertools.product((2, 3), (1, 2), (0, 1), (False, True)))
CASES += [(2, 3, 0, True), (3, 3, 1, True)]


@pytest.mark.parametrize(("size", "strides", "padding", "ceil"), CASES)
def test_pools_by_definition(size, strides, padding, ceil):
    for n in (4, 5, 6, 7, 8):
        x = normal(1, n, n, 2)
        pad = ((0, 0), (padding, padding), (padding, padding), (0, 0))
        low, zero = np.pad(x, pad, constant_values=-np.inf), np.pad(x, pad)
        spans = windows(n, size, strides, padding, ceil)
        pairs = [[(a, b) for b in spans] for a in spans]
        largest = [[low[0, a:b, c:d].max((0, 1)) for (a, b), (c, d) in row] for row in pairs]
        mean = [[zero[0, a:b, c:d].mean((0, 1)) for (a, b), (c, d) in row] for row in pairs]
        options = {"strides": strides, "padding": padding, "ceil": ceil}
        np.testing.assert_array_equal(layers.max_pool(x, size, **options)[0], largest)
        np.testing.assert_allclose(layers.avg_pool(x, size, **options)[0], mean, atol=1e-6)


@pytest.mark.parametrize(("size", "strides", "padding", "ceil"), CASES)
def test_pools_agree_with_pytorch(size, strides, padding, ceil):
    functional = pytest.importorskip("torch.nn.functional")
    for h, w in ((7, 8), (5, 6)):
        x = normal(2, h, w, 3)
        options = {"strides": strides, "padding": padding, "ceil": ceil}
        for ours, theirs in (
            (layers.max_pool, functional.max_pool2d),
            (layers.avg_pool, functional.avg_pool2d),
        ):
            expected = theirs(torch_map(x), size, strides, padding, ceil_mode=ceil)
            np.testing.assert_allclose(ours(x, size, **options), from_torch(expected), atol=1e-6)


def test_gradients_of_pools_and_response_norm_agree_with_pytorch():
    functional = pytest.importorskip("torch.nn.functional")
    x, options = 20 * normal(2, 7, 7, 6), {"strides": 2, "padding": 1, "ceil": True}
    for ours, theirs in (
        (
            lambda x: layers.max_pool(x, 3, **options),
            lambda x: functional.max_pool2d(x, 3, 2, 1, ceil_mode=True),
        ),
        (
            lambda x: layers.avg_pool(x, 3, **options),
            lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
        ),
        (
            layers.local_response_norm,
            lambda x: functional.local_response_norm(x, 5, 1e-4, 0.75, 1.0),
        ),
    ):
        inputs = torch_map(x).requires_grad_()
        (theirs(inputs) ** 2).sum().backward()
        gradient = jax.jit(jax.grad(lambda x, ours=ours: jnp.sum(ours(x) ** 2)))(x)
        np.testing.assert_allclose(gradient, from_torch(inputs.grad), rtol=1e-4, atol=1e-4)


def test_averages_of_bfloat16_are_summed_wider():
    x = jnp.full((1, 64, 64, 1), 1.01, jnp.bfloat16)
    x = x.at[0, 0, 0, 0].set(300)
    exact = np.asarray(x, np.float64).mean()
    assert layers.global_mean(x).dtype == jnp.float32
    np.testing.assert_allclose(layers.global_mean(x)[0, 0], exact, rtol=1e-5)
    pooled = layers.avg_pool(x, 64, strides=1)
    assert pooled.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(pooled[0, 0, 0, 0]), exact, rtol=2**-8)


# --- convolution, dense, response norm ----------------------------------------------------------


@pytest.mark.parametrize(
    "options", [(3, 1, 1, 1), (3, 2, 1, 2), (1, 2, 0, 1), (7, 2, 3, 1), (3, 1, 1, 6)]
)
def test_convolutions_agree_with_pytorch(options):
    functional = pytest.importorskip("torch.nn.functional")
    size, strides, padding, groups = options
    x, kernel, bias = normal(2, 9, 10, 6), normal(size, size, 6 // groups, 12), normal(12)
    layer = layers.Conv(12, size, strides, padding, groups, use_bias=True)
    ours = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    weight, b = torch_map(kernel.transpose(3, 0, 1, 2)), torch_map(bias[:, None, None, None])
    expected = functional.conv2d(torch_map(x), weight, b.flatten(), strides, padding, 1, groups)
    np.testing.assert_allclose(ours, from_torch(expected), rtol=1e-4, atol=1e-4)


def test_fresh_layers_have_the_published_spread():
    x = normal(1, 4, 4, 64)
    key = jax.random.key(0)
    plain = layers.Conv(256, 3, padding=1)
    kernel = jax.jit(plain.init)(key, x)["params"]["kernel"]
    np.testing.assert_allclose(np.std(kernel), np.sqrt(2 / (9 * 256)), rtol=0.02)
    assert set(jax.eval_shape(plain.init, key, x)["params"]) == {"kernel"}
    torchs = layers.Conv(256, 3, use_bias=True, kernel_init=None, bias_init=None)
    conv, dense = (
        jax.jit(torchs.init)(key, x),
        jax.jit(layers.Dense(512).init)(key, np.ones((1, 576), "f")),
    )
    for leaf in jax.tree.leaves((conv["params"], dense["params"])):  # all have 576 inputs
        assert 0.9 / 24 < float(jnp.max(jnp.abs(leaf))) <= 1 / 24
        assert abs(float(jnp.mean(leaf))) < 0.1 / 24


def test_dense_maps_the_last_axis():
    params = {"kernel": normal(3, 4), "bias": normal(4)}
    for shape in ((5, 3), (2, 5, 3)):
        x = normal(*shape)
        y = layers.Dense(4).apply({"params": params}, x)
        np.testing.assert_allclose(y, x @ params["kernel"] + params["bias"], atol=1e-6)
    narrow = layers.Dense(4, dtype=jnp.bfloat16).apply({"params": params}, x)
    assert narrow.dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [5, 11])
def test_response_norm_by_definition(size):
    x, alpha = 40 * normal(2, 3, 3, 16), 1e-4 * size
    expected = np.zeros_like(x)
    for c in range(16):
        near = x[..., max(0, c - size // 2) : c + size // 2 + 1]
        expected[..., c] = x[..., c] / (1 + 1e-4 * (near**2).sum(-1)) ** 0.75
    ours = layers.local_response_norm(x, size=size, alpha=alpha)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    assert np.max(np.abs(ours - x)) > 1
    torch = pytest.importorskip("torch")
    theirs = torch.nn.functional.local_response_norm(torch_map(x), size, alpha, 0.75, 1.0)
    np.testing.assert_allclose(ours, from_torch(theirs), rtol=1e-5)


# --- batch norm ---------------------------------------------------------------------------------


def batch_norm(x, *, train=True, old=None, **keywords):
    layer = layers.BatchNorm(**keywords)
    c = x.shape[-1]
    params = {
        "scale": np.linspace(0.5, 1.5, c, dtype="f"),
        "bias": np.linspace(-1, 1, c, dtype="f"),
    }
    old = old or {"mean": np.full(c, 0.3, "f"), "var": np.full(c, 2, "f")}
    v = {"params": params, "batch_stats": old}
    y, new = layer.apply(v, x, train=train, mutable=["batch_stats"])
    return y, new["batch_stats"], params, old


@pytest.mark.parametrize("shape", [(6, 4), (3, 5, 5, 4)])
def test_batch_norm_by_definition(shape):
    x = 3 * normal(*shape) + 1
    axes, n = tuple(range(len(shape) - 1)), int(np.prod(shape[:-1]))
    y, new, params, old = batch_norm(x, momentum=0.2, epsilon=1e-2)
    mean, var = x.mean(axes), x.var(axes)
    expected = (x - mean) / np.sqrt(var + 1e-2) * params["scale"] + params["bias"]
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(new["mean"], 0.8 * old["mean"] + 0.2 * mean, rtol=1e-5)
    np.testing.assert_allclose(new["var"], 0.8 * old["var"] + 0.2 * var * n / (n - 1), rtol=1e-5)

    for keywords in ({"train": False}, {"frozen": True}):
        y, new, params, old = batch_norm(x, epsilon=1e-2, **keywords)
        expected = (x - old["mean"]) / np.sqrt(old["var"] + 1e-2) * params["scale"] + params["bias"]
        np.testing.assert_allclose(y, expected, atol=1e-5)
        jax.tree.map(np.testing.assert_array_equal, dict(new), old)


def test_batch_norm_agrees_with_pytorch():
    torch = pytest.importorskip("torch")
    x, directions = normal(4, 5, 5, 3) + 2, normal(4, 5, 5, 3)
    y, new, params, old = batch_norm(x)
    theirs = torch.nn.BatchNorm2d(3)
    state = {"weight": params["scale"], "bias": params["bias"]}
    state |= {"running_mean": old["mean"], "running_var": old["var"]}
    theirs.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in state.items()}, strict=False)
    inputs = torch_map(x).requires_grad_()
    expected = theirs(inputs)
    np.testing.assert_allclose(y, from_torch(expected), atol=1e-5)
    np.testing.assert_allclose(new["mean"], theirs.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(new["var"], theirs.running_var.numpy(), rtol=1e-5)
    (expected * torch_map(directions)).sum().backward()
    gradient = jax.grad(lambda x: jnp.sum(batch_norm(x)[0] * directions))(x)
    np.testing.assert_allclose(gradient, from_torch(inputs.grad), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"use_scale": False}])
def test_gradients_of_batch_norm_are_those_of_its_definition(options):
    x = (3 * normal(4, 5, 6, 3) + 1).astype(np.float64)
    weights = normal(4, 5, 6, 3).astype(np.float64)
    with jax.enable_x64(True):
        layer = layers.BatchNorm(epsilon=1e-2, **options)
        variables = layer.init(jax.random.key(0), x, train=True)
        stats = variables["batch_stats"]
        params = jax.tree.map(lambda p: jnp.linspace(0.5, 2, 3), variables.get("params", {}))

        def ours(params, x):
            both = {"params": params, "batch_stats": stats}
            y, new = layer.apply(both, x, train=True, mutable=["batch_stats"])
            # The running statistics are no way for a gradient.
            return jnp.sum(y * weights) + sum(map(jnp.sum, jax.tree.leaves(new)))

        def definition(params, x):
            far = x - jnp.mean(x, axis=(0, 1, 2), keepdims=True)
            y = far / jnp.sqrt(jnp.mean(far * far, axis=(0, 1, 2), keepdims=True) + 1e-2)
            y = y * params.get("scale", jnp.ones(3)).reshape(1, 1, 1, 3)
            return jnp.sum((y + params.get("bias", jnp.zeros(3)).reshape(1, 1, 1, 3)) * weights)

        got, want = (jax.grad(f, argnums=(0, 1))(params, x) for f in (ours, definition))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), got, want)


def test_batch_norm_statistics_are_exact_far_from_zero():
    # Means of squares minus squares of means have no digits left here.
    x = 1000 + normal(4096, 2)
    y, new, *_ = batch_norm(x, momentum=1.0)
    np.testing.assert_allclose(new["var"], x.astype(np.float64).var(0, ddof=1), rtol=1e-3)
    x = jnp.asarray(x / 100, jnp.bfloat16)
    y, new, *_ = batch_norm(x, momentum=1.0, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16 and new["var"].dtype == jnp.float32
    np.testing.assert_allclose(new["mean"], np.asarray(x, np.float64).mean(0), rtol=1e-5)


def test_batch_norm_is_of_the_global_batch():
    x = normal(16, 2, 2, 3) + np.arange(16, dtype="f")[:, None, None, None]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert mesh.size == 8
    step = jax.jit(lambda x: batch_norm(x)[:2])
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), step(sharded), batch_norm(x)[:2]
    )


def test_batch_norm_needs_two_values():
    with pytest.raises(ValueError, match="one value per channel to train on: use a larger batch"):
        batch_norm(normal(1, 1, 1, 4))
    batch_norm(normal(1, 1, 1, 4), train=False)
    batch_norm(normal(1, 1, 1, 4), frozen=True)
    batch_norm(normal(1, 1, 2, 4))


# --- nets ---------------------------------------------------------------------------------------


def test_shapes_computes_nothing():
    v = layers.shapes(layers_net(), 8, channels=5)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(v))
    assert v["params"]["outer"]["0"]["kernel"].shape == (3, 3, 5, 4)


def layers_net():
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            return layers.named("outer", lambda x: layers.Conv(4, 3, name="0")(x), x)

    return Net()


def test_small_maps_are_named(unchecked):
    with pytest.raises(ValueError, match="a map of 2 pixels is too small for a window of 3"):
        layers.max_pool(normal(1, 2, 2, 1), 3, strides=2)
    with pytest.raises(ValueError, match="a map of 2 pixels is too small for a window of 5"):
        layers.avg_pool(normal(1, 6, 2, 1), 5, strides=1, padding=1)
