"""A small backbone and its batches, for tests that compare ways to compute the same numbers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from system import tiny

from dmljax.nets import layers
from dmljax.runs import training
from dmljax.train.devices import Shardings, put, with_rows
from dmljax.train.step import init_state

# Compiling takes most of the time of these tests; without optimizations it is much faster.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
RNG = np.random.default_rng(0)
C, SIDE = 4, 8


class Pixels(nn.Module, kw_only=True):
    """A backbone that sees each pixel alone, and compiles at once."""

    widths: tuple[int, ...] = (6, 8)
    norm: bool = False

    @nn.compact
    def __call__(self, x, *, train):
        for width in self.widths:
            x = nn.Dense(width)(x)
            x = jax.nn.relu(layers.BatchNorm()(x, train=train) if self.norm else x)
        return {"features": x, "pooled": x.mean(axis=(1, 2))}


def scaled(images):
    return jnp.asarray(images, jnp.float32) / 128 - 1


def batch_of(b):
    tints = RNG.integers(0, 256, (b, 1, 1, 3))
    images = (tints + RNG.integers(0, 256, (b, SIDE, SIDE, 3))) // 2
    return {"images": images.astype(np.uint8), "labels": (np.arange(b) % C).astype(np.int32)}


def first_state(method, optimizer):
    batch = {"images": np.zeros((2, SIDE, SIDE, 3), np.float32), "labels": np.zeros(2, np.int32)}
    init_fn = functools.partial(method.init, batch=batch)
    return jit(lambda key: init_state(*init_fn(key), optimizer))(jax.random.key(0))


def distance(a, b):
    """|a - b| / |b| over all leaves."""
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


EXACT = 1e-12  # in float64


def as_float64(tree):
    return jax.tree.map(
        lambda a: np.float64(a) if jnp.issubdtype(a.dtype, np.floating) else a, tree
    )


def drawn(shapes):
    """Parameters and statistics, drawn without compiling anything."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return rng.normal(size=leaf.shape) * 0.3 if len(leaf.shape) > 1 else np.ones(leaf.shape)

    return jax.tree.map(draw, shapes)


def run_on(devices, function, shared, rows, *, chunk=None):
    """`function(shared, rows)` on a number of devices, over which `rows` are split.

    If they cannot be split evenly, the devices get rows of NaN after the last one.
    """
    shards = Shardings(jax.devices()[:devices])
    count = len(jax.tree.leaves(rows)[0])

    def cut(shared, rows):
        with jax.sharding.use_abstract_mesh(shards.mesh.abstract_mesh):
            return function(shared, jax.tree.map(lambda x: with_rows(x, count), rows))

    missing = shards.padded(count, chunk=chunk) - count
    padded = {
        k: np.concatenate([x, np.full_like(x[:1], _JUNK[x.dtype.kind]).repeat(missing, 0)])
        for k, x in rows.items()
    }
    on_devices = jax.device_put(shared, shards.everywhere), put(padded, shards.rows)
    return jax.device_get(jit(cut)(*on_devices))


_JUNK = {"f": np.nan, "i": -7, "u": 255, "b": True}


def refusal(tmp_path, **fields):
    """The one line with which a run of these fields is refused before anything is written."""
    config = tiny(tmp_path, **fields)
    with pytest.raises((TypeError, ValueError)) as refused:
        training.run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists() and "\n" not in str(refused.value)
    return str(refused.value)
