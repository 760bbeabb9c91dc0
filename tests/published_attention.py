"""Parameters and input of the published attention code, and how its printed numbers are read."""

import jax
import jax.numpy as jnp
import numpy as np

N, D = 4, 8


X = np.sin(0.9 * np.arange(N * D).reshape(N, D) + 0.2).astype(np.float32)


def wave(p, *shape):
    """A tensor in torch's layout, weights [out, in]."""
    scale = 0.8 if p > 20 else 0.3
    return scale * np.sin(0.7 * np.arange(np.prod(shape)).reshape(shape) + 1.3 * p)


def linear_params(p, out, width, bias=None):
    kernel = {"kernel": wave(p, out, width).T}
    return kernel if bias is None else {**kernel, "bias": wave(bias, out)}


def norm_params(p):
    return {"scale": wave(p, D), "bias": wave(p + 1, D)}


DOT = {
    "q_linear": linear_params(1, D, D, 2),
    "v_linear": linear_params(3, D, D, 4),
    "k_linear": linear_params(5, D, D, 6),
    "out": linear_params(7, D, D, 8),
}


GAT = {
    "layer1": {"linear": linear_params(21, D, D), "attn": linear_params(22, 1, 2 * D // 2)},
    "output": {"linear": linear_params(23, D, D), "attn": linear_params(24, 1, 2 * D)},
}


GATV2 = {
    "layer1": {"linear_l": linear_params(21, D, D), "attn": linear_params(22, 1, D // 2)},
    "output": {"linear_l": linear_params(23, D, D), "attn": linear_params(24, 1, D)},
}


SHARED = {"sublayers": 2, "share_vector": True, "share_projection": True}


def parse_numbers(text):
    return np.array(text.split(), float)


def count_parameters(module, width=512):
    x = jax.ShapeDtypeStruct((4, width), jnp.float32)
    shapes = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), x)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
