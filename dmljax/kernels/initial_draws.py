"""Random initial values: blocks of numbers with keys of their own, and all draws in one program.

`draw` is the plain form: one random draw per parameter. Within `jit`, XLA compiles each of these
draws again, 53 of them for a ResNet-50. `batch_draws` is the faster form of a whole init function.
It draws the same numbers for all parameters at once, so XLA compiles one loop per distribution.

`batch_draws` is a small interpreter of JAX programs (jaxprs). It buys start-up time. Seconds of
`jit(init)` with compilation and without a compilation cache, on two cores of an AMD EPYC, jaxlib
0.10.2, flags as set by `dmljax.main`:

| net | plain | `batch_draws` |
|---|---|---|
| resnet50 | 12.5 | 2.4 |
| convnet | 1.0 | 0.6 |
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

__all__ = ["KINDS", "batch_draws", "draw"]

_BLOCK = 1024  # numbers per key
_BLOCKS_PER_ITERATION = 64
_CALLS = ("jit", "checkpoint", "remat2")  # JAX's names of equations that call a program
KINDS: dict[str, Callable] = {
    "standard_normal": jax.random.normal,
    "standard_uniform": functools.partial(jax.random.uniform, minval=-1.0),
    "standard_truncated": functools.partial(jax.random.truncated_normal, lower=-2.0, upper=2.0),
}


def draw(kind: str, key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Random numbers of a distribution of `KINDS`. A shorter draw is the start of a longer one."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)  # from `jax.random.PRNGKey`
    return _PROGRAMS[kind](key, shape=tuple(shape))


def _draw_blocks(kind: str, keys: Sequence[jax.Array], sizes: Sequence[int]) -> list[jax.Array]:
    """For each key an array of this size. Block `i` of a key is drawn with `fold_in(key, i)`."""
    counts = [-(-size // _BLOCK) for size in sizes]
    block = np.concatenate([np.arange(count) for count in counts])
    key_index = np.repeat(np.arange(len(keys)), counts)
    padding = -len(block) % _BLOCKS_PER_ITERATION
    block, key_index = np.pad(block, (0, padding)), np.pad(key_index, (0, padding))
    folded = jax.vmap(jax.random.fold_in)(jnp.stack(keys)[key_index], block)
    draw_block = jax.vmap(lambda key: KINDS[kind](key, shape=(_BLOCK,)))
    # Without the loop, XLA would inline and recompile the draw once per parameter.
    numbers = jax.lax.map(draw_block, folded.reshape(-1, _BLOCKS_PER_ITERATION)).reshape(-1)
    starts = _BLOCK * (np.cumsum(counts) - counts)
    return [numbers[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _program(kind: str) -> Callable:
    """A jit with the name of the distribution, by which `batch_draws` recognizes it in a jaxpr."""

    def draw(key, *, shape):
        return _draw_blocks(kind, [key], [math.prod(shape)])[0].reshape(shape)

    draw.__name__ = kind
    return jax.jit(draw, static_argnames="shape")


_PROGRAMS = {kind: _program(kind) for kind in KINDS}


def batch_draws(init_fn: Callable) -> Callable:
    """A function with the same results as `init_fn`, several times as fast to compile.

    All calls of `draw` become one draw per distribution, and what no result needs is left out. The
    arguments are passed by position. Calls of `draw` inside of loops or conditions, and those with
    keys from `vmap`, stay where they are.

    >>> import jax
    >>> from dmljax import nets
    >>> net, images = nets.convnet(), jax.numpy.zeros((1, 32, 32, 3))
    >>> init_fn = jax.jit(batch_draws(lambda key: net.init(key, images, train=True)))
    """

    @functools.wraps(init_fn)
    def batched(*args):
        leaves = jax.tree.leaves(args)
        traced, shapes = jax.make_jaxpr(init_fn, return_shape=True)(*args)
        outputs_needed = [True] * len(traced.jaxpr.outvars)
        needed, _ = partial_eval.dce_jaxpr(traced.jaxpr, outputs_needed, instantiate=True)
        flat = jax.make_jaxpr(functools.partial(_inline, needed, traced.consts))(*leaves)
        jaxpr = flat.jaxpr
        values = dict(zip(jaxpr.constvars, flat.consts, strict=True))
        values |= dict(zip(jaxpr.invars, leaves, strict=True))
        draws = [e for e in jaxpr.eqns if e.params.get("name") in KINDS and _has_scalar_inputs(e)]
        _evaluate_keys(_dependencies(draws, jaxpr.eqns), values)
        for kind in KINDS:
            of_kind = [e for e in draws if e.params["name"] == kind]
            if of_kind:
                keys = [_value(e.invars[0], values) for e in of_kind]
                results = [e.outvars[0] for e in of_kind]
                numbers = _draw_blocks(kind, keys, [var.aval.size for var in results])
                for var, x in zip(results, numbers, strict=True):
                    values[var] = x.reshape(var.aval.shape)
        for equation in jaxpr.eqns:
            if values.keys().isdisjoint(equation.outvars):
                _evaluate(equation, values)
        outputs = [_value(atom, values) for atom in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return batched


def _inline(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a program without its jits and checkpoints, except the jits of `draw`."""
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        call = equation.primitive.name in _CALLS
        if call and equation.params.get("name") not in KINDS:
            inner = equation.params["jaxpr"]
            closed = isinstance(inner, core.ClosedJaxpr)
            program, inner_consts = (inner.jaxpr, inner.consts) if closed else (inner, ())
            inputs = [_value(atom, values) for atom in equation.invars]
            outputs = _inline(program, inner_consts, *inputs)
            values.update(zip(equation.outvars, outputs, strict=True))
        else:
            _evaluate(equation, values)
    return [_value(atom, values) for atom in jaxpr.outvars]


def _evaluate(equation: Any, values: dict) -> None:
    args = [_value(atom, values) for atom in equation.invars]
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        outputs = equation.primitive.bind(*args, **params)
    outputs = outputs if equation.primitive.multiple_results else [outputs]
    values.update(zip(equation.outvars, outputs, strict=True))


def _value(atom: Any, values: dict) -> Any:
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def _variables(equation: Any) -> list[Any]:
    return [atom for atom in equation.invars if not isinstance(atom, core.Literal)]


def _has_scalar_inputs(equation: Any) -> bool:
    return not any(atom.aval.ndim for atom in equation.invars)


def _dependencies(draws: list[Any], equations: Sequence[Any]) -> list[Any]:
    """The equations that the inputs of `draws` depend on, in order."""
    needed, dependencies = {var for e in draws for var in _variables(e)}, []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            dependencies.append(equation)
            needed.update(_variables(equation))
    return dependencies[::-1]


def _evaluate_keys(equations: list[Any], values: dict) -> None:
    """Evaluates equations as soon as their inputs exist, so that many keys are folded at once."""
    while equations:
        ready, later, folds = [], [], []
        for e in equations:
            if any(v not in values for v in _variables(e)):
                later.append(e)
            elif e.primitive.name == "random_fold_in" and _has_scalar_inputs(e):
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
