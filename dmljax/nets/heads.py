"""From a backbone's maps to embeddings and logits.

A head is called as `(maps [b h w c] or pooled [b c], *, train, where=None)` and returns a dict in
float32:

* "pooled" `[b c]`: the maps, pooled.
* "features" `[b d]`: what the linear layer makes of it. Classifiers without a neck read these.
* "embeddings" `[b d]`: the same as unit vectors.
* "neck" `[b d]`: the features after the batch norm, and "logits" `[b classes]`: where asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.nets.initializers import normal
from dmljax.nets.layers import Dense, global_max, global_mean
from dmljax.ops import Array

__all__ = ["BNNeck", "GeM", "Head", "classify", "flatten", "gem", "global_mean_max"]


# --- pooling: [b h w c] -> [b c] ----------------------------------------------------------------


def gem(
    maps: Float[Array, "b h w c"], *, p: float | Float[Array, ""] = 3.0, epsilon: float = 1e-6
) -> Float[Array, "b c"]:
    """(mean x^p)^(1/p) over space, a mean at p = 1 and a maximum at infinity (Radenovic et al.,
    TPAMI 2019). What is below `epsilon` counts as `epsilon`.
    """
    maps = jnp.maximum(ops.widen(maps), epsilon)
    # Relative to the largest, no power of p overflows, and the gradient of p stays finite.
    peak = jax.lax.stop_gradient(jnp.max(maps, axis=(1, 2), keepdims=True))
    means = jnp.mean((maps / peak) ** p, axis=(1, 2))
    return means ** (1 / p) * peak[:, 0, 0, :]


def global_mean_max(maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
    """The sum of mean and maximum over space."""
    return global_mean(maps) + global_max(maps)


def flatten(maps: Float[Array, "b h w c"]) -> Float[Array, "b n"]:
    """Every place keeps its own features, for images whose layout says what they are."""
    return ops.widen(maps).reshape(len(maps), -1)


class GeM(nn.Module, kw_only=True):
    """`gem` whose power is learned, from `p` on."""

    p: float = 3.0
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, maps: Float[Array, "b h w c"]) -> Float[Array, "b c"]:
        p = self.param("p", nn.initializers.constant(self.p), (), jnp.float32)
        return gem(maps, p=p, epsilon=self.epsilon)


# Functions that make a pool when called inside a module.
_POOLS = {
    "flatten": lambda: flatten,
    "gem": lambda **options: GeM(**options, name="gem"),
    "max": lambda: global_max,
    "mean": lambda: global_mean,
    "mean_max": lambda: global_mean_max,
}


def _pool(spec: str | Mapping[str, Any] | Callable) -> Callable:
    if callable(spec):
        return spec
    options = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = options.pop("name", None)
    if name not in _POOLS:
        near = difflib.get_close_matches(str(name), _POOLS, n=1)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no pool {name!r}{hint} There are: {', '.join(_POOLS)}")
    if unknown := set(options) - ({"p", "epsilon"} if name == "gem" else set()):
        takes = "p, epsilon" if name == "gem" else "no arguments"
        raise TypeError(f"the pool {name!r} takes {takes}, not {', '.join(sorted(unknown))}")
    return _POOLS[name](**options)


# --- heads --------------------------------------------------------------------------------------


class BNNeck(nn.Module, kw_only=True):
    """Batch norm between the features a distance reads and those a classifier reads.

    (Luo et al., CVPR Workshops 2019.) Without a bias, so that classes stay around the origin. Rows
    outside `where` stay out of the statistics. `frozen` as in `layers.BatchNorm`.
    """

    use_bias: bool = False
    momentum: float = 0.1
    epsilon: float = 1e-5
    frozen: bool = False

    @nn.compact
    def __call__(
        self,
        features: Float[Array, "b d"],
        *,
        train: bool,
        where: Bool[Array, "b"] | None = None,
    ) -> Float[Array, "b d"]:
        shape = features.shape[1:]
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        x = ops.widen(features)
        if train and not self.frozen:
            rows = jnp.ones((len(x), 1), bool) if where is None else jnp.asarray(where)[:, None]
            count = jnp.sum(rows, dtype=x.dtype)
            mean = ops.divide(jnp.sum(x, axis=0, where=rows), count)
            gaps = jnp.where(rows, x - mean[None, :], 0)
            squares = jnp.sum(gaps * gaps, axis=0)
            var = ops.divide(squares, count)
            if not self.is_initializing():
                # As torch, which divides by n - 1 here. One row has no variance to learn from.
                fresh = jax.lax.stop_gradient((mean, ops.divide(squares, count - 1)))
                share = jnp.where(count > 1, self.momentum, 0)
                for running, new in zip((running_mean, running_var), fresh, strict=True):
                    running.value += (share * (new - running.value)).astype(jnp.float32)
        else:
            mean, var = running_mean.value, running_var.value
        y = (x - mean[None, :]) * (jax.lax.rsqrt(var + self.epsilon) * scale)[None, :]
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, shape, jnp.float32)[None, :]
        return y


class Head(nn.Module, kw_only=True):
    """Pool, linear layer, unit vectors; if asked for, a neck and a classifier.

    `pool`: "mean", "max", "gem", "mean_max", "flatten", dict(name="gem", p=4.0) or a function; None
    where the input is pooled already. `features=None` leaves out the linear layer. The names of the
    parameters, red, bottleneck and fc, are those of Seidenschwarz et al. (ICML 2021).
    """

    features: int | None = 512
    pool: str | Mapping[str, Any] | Callable | None = "mean"
    classes: int | None = None
    neck: bool = False
    frozen: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        maps: Float[Array, "b h w c"] | Float[Array, "b c"],
        *,
        train: bool,
        where: Bool[Array, "b"] | None = None,
    ) -> dict[str, Array]:
        pool = None if self.pool is None else _pool(self.pool)
        rank = 2 if pool is None else 4
        if jnp.ndim(maps) != rank:
            what = "[b c], pooled already (pool=None)" if pool is None else "maps [b h w c]"
            raise ValueError(f"this head takes {what}, not {list(jnp.shape(maps))}")
        pooled = ops.widen(maps if pool is None else pool(maps))
        features = pooled
        if self.features is not None:
            features = ops.widen(Dense(self.features, dtype=self.dtype, name="red")(pooled))
        outputs = classify(
            features,
            classes=self.classes,
            neck=self.neck,
            frozen=self.frozen,
            dtype=self.dtype,
            train=train,
            where=where,
        )
        return {"pooled": pooled, **outputs}


def classify(
    features: Float[Array, "b d"],
    *,
    classes: int | None,
    neck: bool,
    frozen: bool = False,
    dtype: Any = None,
    train: bool,
    where: Bool[Array, "b"] | None = None,
) -> dict[str, Array]:
    """What every head ends in; makes "bottleneck" and "fc" of the module that calls it."""
    outputs = {"features": features, "embeddings": ops.normalize(features)}
    if where is not None and (jnp.shape(where) != features.shape[:1] or where.dtype != bool):
        raise ValueError(
            f"where must be [{len(features)}] bool, one per row, not {where.dtype} "
            f"{list(jnp.shape(where))}"
        )
    if neck:
        norm = BNNeck(frozen=frozen, name="bottleneck")
        features = outputs["neck"] = norm(features, train=train, where=where)
    if classes is not None:
        # Behind a neck no bias: the classes' hyperplanes go through the origin too.
        init = normal(0.001) if neck else None
        linear = Dense(classes, use_bias=not neck, dtype=dtype, kernel_init=init, name="fc")
        outputs["logits"] = ops.widen(linear(features))
    return outputs
