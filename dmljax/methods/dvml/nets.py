"""The modules that DVML adds to a backbone: heads, a sampler and a decoder.

The features f `[b c]` of the backbone become an invariant embedding z_I, used at test time, and
the mean and log variance of z_V, the variation within a class. The decoder maps z = z_I + z_V back
to f. (Lin et al., ECCV 2018.)
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.nets.layers import BatchNorm, glorot_dense
from dmljax.ops import Array

__all__ = [
    "NESTED_NORMS",
    "SHARED_NORM",
    "VariationalDecoder",
    "VariationalHeads",
    "log_variance_as_deviation",
    "sample_variations",
    "standard_deviation",
]

SHARED_NORM = ("norm",)
NESTED_NORMS = ("norm", "norm_mean", "norm_log_variance")
_NORM = functools.partial(BatchNorm, momentum=0.01, epsilon=1e-3)


class VariationalHeads(nn.Module, kw_only=True):
    """Three linear layers of the features: "invariant", "mean" and "log_variance", each `[b d]`.

    * `features`: d.
    * `variational=False` leaves out the mean and the log variance.
    * `norms`: the names of the batch norms. The paper has none; `SHARED_NORM` is one before all
      three layers; `NESTED_NORMS` adds one before the mean and one before the log variance, as
      published code for 128 dimensions does.
    """

    features: int = 512
    variational: bool = True
    norms: tuple[str, ...] = ()
    dtype: Any = None

    @nn.compact
    def __call__(self, features: Float[Array, "b c"], *, train: bool) -> dict[str, Array]:
        if unknown := sorted(set(self.norms) - set(NESTED_NORMS)):
            raise ValueError(f"norms can be {', '.join(NESTED_NORMS)}, not {unknown[0]!r}")

        def norm(x, name):
            return _NORM(name=name)(x, train=train) if name in self.norms else x

        x = norm(ops.widen(features), "norm")
        outputs: dict[str, Array] = {}
        for name in ("invariant", "mean", "log_variance") if self.variational else ("invariant",):
            linear = glorot_dense(self.features, dtype=self.dtype, name=name)
            outputs[name] = ops.widen(linear(norm(x, f"norm_{name}")))
        return outputs


def standard_deviation(log_variance: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Computes exp(log_variance / 2), limited to between exp(-10) and exp(10)."""
    # The divergence sees the log variance itself and pulls it back from beyond this range.
    return jnp.exp(jnp.clip(log_variance, -20, 20) / 2)


def log_variance_as_deviation(log_variance: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Returns the log variance itself, by which one version of the public code scales its noise."""
    return log_variance


def sample_variations(
    mean: Float[Array, "b d"],
    log_variance: Float[Array, "b d"],
    *,
    samples: int = 20,
    deviation_fn: Callable = standard_deviation,
    key: jax.Array,
) -> Float[Array, "t b d"]:
    """Draws t samples z_V = mean + std N(0, 1), with gradients to both arguments."""
    noise = jax.random.normal(key, (samples, *mean.shape), mean.dtype)
    return mean[None, :, :] + deviation_fn(log_variance)[None, :, :] * noise


class VariationalDecoder(nn.Module, kw_only=True):
    """From z to the features of the backbone: linear layer, `activation_fn`, linear layer.

    The paper has tanh between the two. No activation follows: the features are means of ReLUs and
    exceed 1.

    * `features`: width of the features. `hidden`: width between the layers.
    * `norm=True` adds a batch norm after the activation, as the published code does, which has
      `activation_fn=jax.nn.relu`.
    """

    features: int = 1024
    hidden: int = 512
    activation_fn: Callable = jnp.tanh
    norm: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, z: Float[Array, "*t b d"], *, train: bool) -> Float[Array, "*t b c"]:
        x = self.activation_fn(glorot_dense(self.hidden, dtype=self.dtype, name="fc1")(z))
        if self.norm:
            x = _NORM(name="norm")(x, train=train)
        return ops.widen(glorot_dense(self.features, dtype=self.dtype, name="fc2")(x))
