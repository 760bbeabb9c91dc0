"""A published config on a few small images with a small net; and a net that compiles at once."""

import contextlib
import functools
import pathlib
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from system import load_module

from dmljax.config import fields
from dmljax.config.build import build
from dmljax.methods import base
from dmljax.train.step import init_state, train_step

# Compiling is most of the time of these tests.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def fill(shapes: Any, *, seed: int = 0) -> Any:
    """Parameters and statistics of these shapes, drawn without compiling anything."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        if len(leaf.shape) > 1:
            fan_in = np.prod(leaf.shape[:-1])
            return (rng.normal(size=leaf.shape) * (2 / fan_in) ** 0.5).astype(np.float32)
        ones = path[-1].key in ("scale", "var")
        return np.full(leaf.shape, 1.0 if ones else 0.0, np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


class Patches(nn.Module, kw_only=True):
    """A backbone without convolutions or norms, which compiles at once."""

    start: str = "one"
    stop: str = "three"
    remat: bool = False
    dtype: str | None = None

    @nn.compact
    def __call__(self, x, *, train):
        names = ("one", "two", "three")
        for name in names[names.index(self.start) : names.index(self.stop) + 1]:
            if name == "one":
                b, h, w, c = x.shape
                x = x.reshape(b, h // 3, 3, w // 3, 3, c).swapaxes(2, 3)
                x = x.reshape(b, h // 3, w // 3, 9 * c)
            kernel = self.param(name, nn.initializers.he_normal(), (x.shape[-1], 10))
            x = jax.nn.relu(jnp.einsum("bhwi,io->bhwo", x, kernel))
        return {"features": x, "pooled": x.mean(axis=(1, 2))}


def read(name: str, arg: str | None = None) -> dict[str, Any]:
    """The config that `--config=configs/NAME.py:ARG` reads."""
    module = load_module(CONFIGS / f"{name}.py")
    return fields.plain(module.get_config(arg))


def shrink(
    config: dict,
    folder: pathlib.Path,
    *,
    sampler: dict,
    method: dict,
    net: Any = "one_step:Patches",
) -> dict:
    """The config with small data, a small net, and the given fields of sampler and method."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(8), 8)
    images = rng.integers(0, 128, (8, 12, 12, 3))[labels] + rng.integers(0, 128, (64, 12, 12, 3))
    np.savez(folder / "images.npz", images=images.astype(np.uint8), labels=labels)
    return config | {
        "dataset": {"name": "npz", "path": str(folder / "images.npz"), "split": 0.5},
        "size": None,
        "transform": "unchanged",
        "eval_transform": "unchanged",
        "net": net,
        "sampler": config["sampler"] | sampler,
        "method": config["method"] | method,
    }


def step(config: dict, *, stats: bool = False) -> tuple:
    """(run, state before, state after, metrics) of the config's first step.

    `stats` adds the diagnostics of the batch, which take most of the time to compile.
    """
    run = build(config)
    indices = run.sample_fn(run.train.labels, seed=0, step=0)
    batch = {
        "images": np.stack([run.train.records[i] for i in indices]),
        "labels": run.train.labels[indices].astype(np.int32),
    }

    images = run.normalize_fn(batch["images"])
    shapes = jax.eval_shape(run.method.init, jax.random.key(0), {**batch, "images": images})
    before = init_state(*fill(shapes), run.optimizer)
    step_fn = jit(train_step(run.method, run.optimizer, normalize_fn=run.normalize_fn, seed=0))
    without_diagnostics = mock.patch.object(base, "diagnostics", lambda *_: {})
    with contextlib.nullcontext() if stats else without_diagnostics:
        after, metrics = step_fn(before, batch)
    return run, *jax.device_get((before, after, metrics))


def moved(before: dict, after: dict, path: str) -> float:
    """The largest change of a parameter under a path such as 'net/masks'."""
    for name in path.split("/"):
        before, after = before[name], after[name]
    gaps = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
    return max(jax.tree.leaves(gaps))
