"""How parameters begin: initialisers, and all their draws in one program.

A parameter's numbers come in blocks, each with a key of its own. So `together` can draw those of
all parameters as one array: XLA compiles each draw anew otherwise, 53 of them for a ResNet-50.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

__all__ = [
    "Initializer",
    "caffe_xavier",
    "fan_in_uniform",
    "glorot_uniform",
    "kaiming_normal",
    "normal",
    "together",
    "truncated_normal",
    "uniform",
]

Initializer = Callable[..., jax.Array]
_BLOCK = 1024  # numbers with a key of their own
_AT_A_TIME = 64  # blocks; more are drawn in a loop
_CALLS = ("jit", "checkpoint", "remat2")  # by jax's names
_KINDS = {
    "standard_normal": jax.random.normal,
    "standard_uniform": functools.partial(jax.random.uniform, minval=-1.0),
    "standard_truncated": functools.partial(jax.random.truncated_normal, lower=-2.0, upper=2.0),
}


# --- draws --------------------------------------------------------------------------------------


def _draws(kind: str, keys: Sequence[jax.Array], sizes: Sequence[int]) -> list[jax.Array]:
    """Of each key so many numbers; block `i` of a key is that of `fold_in(key, i)`."""
    counts = [-(-size // _BLOCK) for size in sizes]
    index = np.concatenate([np.arange(count) for count in counts])
    owner = np.repeat(np.arange(len(keys)), counts)
    more = -len(index) % _AT_A_TIME
    index, owner = np.pad(index, (0, more)), np.pad(owner, (0, more))
    folded = jax.vmap(jax.random.fold_in)(jnp.stack(keys)[owner], index)
    draw = jax.vmap(lambda key: _KINDS[kind](key, shape=(_BLOCK,)))
    # A loop: XLA would fuse, and so compile, what has no loop once with each parameter it is for.
    drawn = jax.lax.map(draw, folded.reshape(-1, _AT_A_TIME)).reshape(-1)
    starts = _BLOCK * (np.cumsum(counts) - counts)
    return [drawn[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _program(kind: str) -> Callable:
    """A jit of its own, so that `together` finds it in a trace by its name."""

    def draw(key, *, shape):
        return _draws(kind, [key], [math.prod(shape)])[0].reshape(shape)

    draw.__name__ = kind
    return jax.jit(draw, static_argnames="shape")


_PROGRAMS = {kind: _program(kind) for kind in _KINDS}


def _drawn(kind: str, scale: float) -> Initializer:
    def init(key, shape, dtype=jnp.float32):
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)  # of `jax.random.PRNGKey`
        return scale * _PROGRAMS[kind](key, shape=tuple(shape)).astype(dtype)

    return init


# --- all at once --------------------------------------------------------------------------------


def together(init: Callable) -> Callable:
    """The same function of the same arguments (by position), compiled several times as fast: what
    the initialisers of this file draw is drawn at once, and what nobody asks for is left out.

    Draws inside of loops or conditions, and those of keys from `vmap`, are left where they are.
    """

    @functools.wraps(init)
    def at_once(*args):
        leaves = jax.tree.leaves(args)
        traced, shapes = jax.make_jaxpr(init, return_shape=True)(*args)
        wanted = [True] * len(traced.jaxpr.outvars)
        needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, wanted, instantiate=True)
        flat = jax.make_jaxpr(functools.partial(_inlined, needed, traced.consts))(*leaves)
        jaxpr = flat.jaxpr
        values = dict(zip(jaxpr.constvars, flat.consts, strict=True))
        values |= dict(zip(jaxpr.invars, leaves, strict=True))
        draws = [e for e in jaxpr.eqns if e.params.get("name") in _KINDS and _scalars(e)]
        _evaluate_keys(_before(draws, jaxpr.eqns), values)
        for kind in _KINDS:
            own = [e for e in draws if e.params["name"] == kind]
            keys = [_value(e.invars[0], values) for e in own]
            places = [e.outvars[0] for e in own]
            drawn = _draws(kind, keys, [place.aval.size for place in places]) if own else []
            values.update({p: x.reshape(p.aval.shape) for p, x in zip(places, drawn, strict=True)})
        for equation in jaxpr.eqns:
            if values.keys().isdisjoint(equation.outvars):
                _evaluate(equation, values)
        found = [_value(atom, values) for atom in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return at_once


def _inlined(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The values of a program, without a trace of the jits and the remat in it, but for draws."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        call = equation.primitive.name in _CALLS
        if call and equation.params.get("name") not in _KINDS:
            inner = equation.params["jaxpr"]
            closed = isinstance(inner, core.ClosedJaxpr)
            program, own = (inner.jaxpr, inner.consts) if closed else (inner, ())
            out = _inlined(program, own, *[_value(atom, values) for atom in equation.invars])
            values.update(zip(equation.outvars, out, strict=True))
        else:
            _evaluate(equation, values)
    return [_value(atom, values) for atom in jaxpr.outvars]


def _evaluate(equation: Any, values: dict) -> None:
    args = [_value(atom, values) for atom in equation.invars]
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        out = equation.primitive.bind(*args, **params)
    out = out if equation.primitive.multiple_results else [out]
    values.update(zip(equation.outvars, out, strict=True))


def _value(atom: Any, values: dict) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def _variables(equation: Any) -> list[Any]:
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def _scalars(equation: Any) -> bool:
    return not any(atom.aval.ndim for atom in equation.invars)


def _before(draws: list[Any], equations: Sequence[Any]) -> list[Any]:
    """What the inputs of `draws` depend on, in order."""
    needed, found = {key for e in draws for key in _variables(e)}, []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            found.append(equation)
            needed.update(_variables(equation))
    return found[::-1]


def _evaluate_keys(equations: list[Any], values: dict) -> None:
    """In any order that is possible, so that keys are folded many at a time."""
    while equations:
        ready, later, folds = [], [], []
        for e in equations:
            if any(v not in values for v in _variables(e)):
                later.append(e)
            elif e.primitive.name == "random_fold_in" and _scalars(e):
                folds.append(e)
            else:
                ready.append(e)
        if folds:
            pairs = zip(*([_value(atom, values) for atom in e.invars] for e in folds), strict=True)
            keys = jax.vmap(jax.random.fold_in)(*map(jnp.stack, pairs))
            values.update({e.outvars[0]: keys[i] for i, e in enumerate(folds)})
        for e in ready:
            _evaluate(e, values)
        equations = later


# --- initialisers -------------------------------------------------------------------------------


def normal(std: float) -> Initializer:
    """Normal numbers of this standard deviation."""
    return _drawn("standard_normal", std)


def truncated_normal(std: float) -> Initializer:
    """Normal numbers that are drawn again beyond two of these standard deviations."""
    return _drawn("standard_truncated", std)


def uniform(bound: float) -> Initializer:
    """Uniform numbers of at most this size."""
    return _drawn("standard_uniform", bound)


def fan_in_uniform(fan_in: int) -> Initializer:
    """Uniform within 1 / sqrt(fan_in): PyTorch's default, of weights and biases alike."""
    return uniform(1 / math.sqrt(fan_in))


def kaiming_normal(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """He et al., 2015, on the outputs: torchvision's for convolutions that a batch norm follows."""
    fan_out = math.prod(shape[:-2]) * shape[-1]
    return normal(math.sqrt(2 / fan_out))(key, shape, dtype)


def glorot_uniform(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Glorot & Bengio, 2010: by the mean of inputs and outputs."""
    fans = math.prod(shape[:-2]) * (shape[-2] + shape[-1])
    return uniform(math.sqrt(6 / fans))(key, shape, dtype)


def caffe_xavier(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """What Caffe calls so: by the inputs alone."""
    return uniform(math.sqrt(3 / math.prod(shape[:-1])))(key, shape, dtype)
