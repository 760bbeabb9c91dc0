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
    "uniform",
]

Initializer = Callable[..., jax.Array]
_BLOCK, _BLOCKS = 1024, 64
_KINDS = {
    "_standard_normal": jax.random.normal,
    "_standard_uniform": functools.partial(jax.random.uniform, minval=-1.0),
}
# Calls of programs, and where these are, by jax's names.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr"}
_CALLS |= {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


# --- draws --------------------------------------------------------------------------------------


def _draws(kind: str, keys: Sequence[jax.Array], sizes: Sequence[int]) -> list[jax.Array]:
    """Of each key so many numbers; block `i` of a key is that of `fold_in(key, i)`."""
    counts = [-(-size // _BLOCK) for size in sizes]
    index = np.concatenate([np.arange(count) for count in counts])
    owner = np.repeat(np.arange(len(keys)), counts)
    more = -len(index) % _BLOCKS
    index, owner = np.pad(index, (0, more)), np.pad(owner, (0, more))
    folded = jax.vmap(jax.random.fold_in)(jnp.stack(keys)[owner], index).reshape(-1, _BLOCKS)
    # A loop, for XLA would compute what has no loop anew for each parameter.
    draw = jax.vmap(lambda key: _KINDS[kind](key, (_BLOCK,)))
    drawn = jax.lax.map(draw, folded).reshape(-1)
    starts = _BLOCK * (np.cumsum(counts) - counts)
    return [drawn[start : start + size] for start, size in zip(starts, sizes, strict=True)]


# Programs of their own, so that `together` finds them in a trace by their names.


@functools.partial(jax.jit, static_argnames="shape")
def _standard_normal(key: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return _draws("_standard_normal", [key], [math.prod(shape)])[0].reshape(shape)


@functools.partial(jax.jit, static_argnames="shape")
def _standard_uniform(key: jax.Array, *, shape: tuple[int, ...]) -> jax.Array:
    return _draws("_standard_uniform", [key], [math.prod(shape)])[0].reshape(shape)


def together(init: Callable) -> Callable:
    """The same function of the same arguments, compiled several times as fast: what the
    initialisers of this file draw is drawn at once, and what nobody asks for is left out."""

    @functools.wraps(init)
    def at_once(*args):
        traced, shapes = jax.make_jaxpr(init, return_shape=True)(*args)
        wanted = [True] * len(traced.jaxpr.outvars)
        jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, wanted, instantiate=True)
        values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        values |= dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        draws = [e for e in jaxpr.eqns if e.params.get("name") in _KINDS and _scalars(e)]
        _evaluate_keys(_before(draws, jaxpr.eqns), values)
        for kind in _KINDS:
            own = [e for e in draws if e.params["name"] == kind]
            places = [e.outvars[0] for e in own]
            sizes = [place.aval.size for place in places]
            drawn = _draws(kind, [values[e.invars[0]] for e in own], sizes) if own else []
            values.update({p: x.reshape(p.aval.shape) for p, x in zip(places, drawn, strict=True)})
        for equation in jaxpr.eqns:
            if values.keys().isdisjoint(equation.outvars):
                _evaluate(equation, values)
        leaves = [_value(atom, values) for atom in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return at_once


def _scalars(equation: Any) -> bool:
    return not any(atom.aval.ndim for atom in equation.invars)


def _variables(equation: Any) -> list[Any]:
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def _value(atom: Any, values: dict) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


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
        ready = [e for e in equations if all(v in values for v in _variables(e))]
        folds = [e for e in ready if e.primitive.name == "random_fold_in" and _scalars(e)]
        if folds:
            pairs = zip(*([_value(atom, values) for atom in e.invars] for e in folds), strict=True)
            keys = jax.vmap(jax.random.fold_in)(*map(jnp.stack, pairs))
            values.update({e.outvars[0]: keys[i] for i, e in enumerate(folds)})
        for equation in ready:
            if equation not in folds:
                _evaluate(equation, values)
        equations = [e for e in equations if e not in ready]


def _evaluate(equation: Any, values: dict) -> None:
    args = [_value(atom, values) for atom in equation.invars]
    name = equation.primitive.name
    if name in _CALLS:
        out = core.jaxpr_as_fun(equation.params[_CALLS[name]])(*args)
    else:
        out = equation.primitive.bind(*args, **equation.params)
        out = out if equation.primitive.multiple_results else [out]
    values.update(zip(equation.outvars, out, strict=True))


# --- initialisers -------------------------------------------------------------------------------


def normal(std: float) -> Initializer:
    """Normal numbers of this standard deviation."""

    def init(key, shape, dtype=jnp.float32):
        return std * _standard_normal(key, shape=tuple(shape)).astype(dtype)

    return init


def uniform(bound: float) -> Initializer:
    """Uniform numbers of at most this size."""

    def init(key, shape, dtype=jnp.float32):
        return bound * _standard_uniform(key, shape=tuple(shape)).astype(dtype)

    return init


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
