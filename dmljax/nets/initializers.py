"""Initial values of parameters: `initializer(key, shape, dtype) -> array`, as Flax takes them.

Numbers are drawn in blocks with keys of their own, so a shorter draw is the start of a longer one.
`initial_values(init_fn, ...)` starts a net several times as fast as `jax.jit(init_fn)`: it skips
the forward pass, and one compiled function draws the parameters of all shapes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import batching, mlir, partial_eval

__all__ = [
    "Initializer",
    "caffe_xavier",
    "fan_in_uniform",
    "glorot_uniform",
    "initial_values",
    "kaiming_normal",
    "normal",
    "truncated_normal",
    "uniform",
]

Initializer = Callable[..., jax.Array]
_BLOCK = 1024  # numbers per key
_BLOCKS_PER_PART = 64  # drawn in one step of a loop
_DISTRIBUTIONS: dict[str, Callable] = {
    "standard_normal": jax.random.normal,
    "standard_uniform": functools.partial(jax.random.uniform, minval=-1.0),
    "standard_truncated": functools.partial(jax.random.truncated_normal, lower=-2.0, upper=2.0),
}


def normal(std: float) -> Initializer:
    """Draws from a normal distribution with mean 0 and this standard deviation."""
    return _scaled("standard_normal", std)


def truncated_normal(std: float) -> Initializer:
    """Draws from a normal distribution with this std and redraws values beyond two of them."""
    return _scaled("standard_truncated", std)


def uniform(bound: float) -> Initializer:
    """Draws uniformly between -bound and bound."""
    return _scaled("standard_uniform", bound)


def fan_in_uniform(fan_in: int) -> Initializer:
    """Draws uniformly within 1 / sqrt(fan_in): PyTorch's default for weights and biases."""
    return uniform(1 / math.sqrt(fan_in))


def kaiming_normal(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Draws from a normal distribution of variance 2 / fan_out (He et al., 2015), as torchvision
    does for convolutions.
    """
    fan_out = math.prod(shape[:-2]) * shape[-1]
    return normal(math.sqrt(2 / fan_out))(key, shape, dtype)


def glorot_uniform(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Draws uniformly with variance 2 / (fan_in + fan_out) (Glorot & Bengio, 2010)."""
    fans = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    return uniform(math.sqrt(6 / fans))(key, shape, dtype)


def caffe_xavier(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Draws uniformly with variance 1 / fan_in, which Caffe calls "xavier"."""
    return uniform(math.sqrt(3 / math.prod(shape[:-1])))(key, shape, dtype)


def initial_values(init_fn: Callable, *args: Any) -> Any:
    """Evaluates `init_fn(*args)` step by step, without the steps that its results do not need.

    An init function of Flax runs the net to learn the shapes of its parameters. No parameter
    depends on the outputs, so they are not computed here.

    >>> import jax
    >>> from dmljax import nets
    >>> net, images = nets.convnet(), jax.numpy.zeros((1, 32, 32, 3))
    >>> init_fn = functools.partial(net.init, train=True)
    >>> variables = initial_values(init_fn, jax.random.key(0), images)
    """
    traced, shapes = jax.make_jaxpr(init_fn, return_shape=True)(*args)
    needed, _ = partial_eval.dce_jaxpr(
        traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=True
    )
    leaves = jax.core.eval_jaxpr(needed, traced.consts, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _scaled(kind: str, scale: float) -> Initializer:
    def init(key, shape, dtype=jnp.float32):
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)  # from `jax.random.PRNGKey`
        options = {"shape": tuple(shape), "dtype": jnp.dtype(dtype), "kind": kind, "scale": scale}
        return jnp.asarray(_draw.bind(key, **options))

    return init


# A primitive has two forms. A program that XLA compiles draws by a loop (`_draw_in_program`).
# Outside of programs, one compiled function serves all shapes (`_draw_eagerly`).
_draw = core.Primitive("draw")


@_draw.def_abstract_eval
def _draw_shape(key, *, shape, dtype, kind, scale):
    return jax.core.ShapedArray(shape, dtype)


@_draw.def_impl
def _draw_eagerly(key, *, shape, dtype, kind, scale):
    parts = [np.asarray(_draw_part(kind, key, np.int32(i))) for i in range(_count_parts(shape))]
    numbers = np.concatenate(parts)[: math.prod(shape)].reshape(shape)
    return np.asarray(scale, dtype) * numbers.astype(dtype)


def _draw_in_program(key, *, shape, dtype, kind, scale):
    # Without the loop, XLA would inline and compile the draw once per part.
    draw_part = functools.partial(_draw_part, kind, key)
    numbers = jax.lax.map(draw_part, jnp.arange(_count_parts(shape))).reshape(-1)
    return scale * numbers[: math.prod(shape)].reshape(shape).astype(dtype)


def _draw_for_keys(keys, dims, **params):
    keys = jnp.moveaxis(keys[0], dims[0], 0)
    return jax.lax.map(functools.partial(_draw_in_program, **params), keys), 0


mlir.register_lowering(_draw, mlir.lower_fun(_draw_in_program, multiple_results=False))
batching.primitive_batchers[_draw] = _draw_for_keys


@functools.partial(jax.jit, static_argnums=0)
def _draw_part(kind: str, key: jax.Array, part: jax.Array) -> jax.Array:
    """Draws the numbers of some blocks; block i uses `fold_in(key, i)`."""
    blocks = part * _BLOCKS_PER_PART + jnp.arange(_BLOCKS_PER_PART)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, blocks)
    return jax.vmap(lambda key: _DISTRIBUTIONS[kind](key, shape=(_BLOCK,)))(keys).reshape(-1)


def _count_parts(shape: tuple[int, ...]) -> int:
    return max(1, -(-math.prod(shape) // (_BLOCK * _BLOCKS_PER_PART)))
