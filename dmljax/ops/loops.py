"""Loops over the True entries of a mask `[b n]`, in O(b n) memory."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from dmljax.ops.types import Array

__all__ = [
    "next_true",
    "sum_over_true",
    "take_column",
    "vary",
    "while_true",
]


def next_true(mask: Bool[Array, "b n"], after: Integer[Array, "b"]) -> Integer[Array, "b"]:
    """Returns the first True column behind column `after`, for each row; n if there is none."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    candidates = jnp.where(mask & (columns > after[:, None]), columns, mask.shape[1])
    return jnp.min(candidates, axis=1, initial=mask.shape[1])


def while_true(mask: Bool[Array, "b n"], body: Callable, initial: Any) -> Any:
    """Loops over the True entries of all rows; returns the last value of `carry`.

    `body` runs once for the first True entries of all rows, then for the second ones, and so on.
    `column` is n for a row without further True entries.
    """
    first = next_true(mask, jnp.full(len(mask), -1, jnp.int32))
    return jax.lax.while_loop(lambda c: jnp.any(c[0] < mask.shape[1]), body, (first, initial))[1]


def take_column(matrix: Array, column: Integer[Array, "b"]) -> Array:
    """Returns the entry of each row of `matrix [b n]` in that row's `column`: `[b 1]`."""
    return jnp.take_along_axis(matrix, column[:, None], axis=1)


def sum_over_true(fn: Callable, mask: Bool[Array, "b n"], *operands: Any) -> Any:
    """Sums `fn(column, valid, *operands)` over the first, second, ... True entry of all rows.

    The fullest row of `mask` decides the number of rounds, at run time. So a loss over triplets
    costs O(b n) memory and, with K images per class, O(b n K) time.

    Args:
        fn: Gets `column [b]`, the place of this round's True entry in each row, and `valid [b]`,
            False for rows that have no more True entries. It returns arrays to be summed over
            rounds, and must not close over traced arrays: these are `operands`.
        mask: The entries to loop over.
        operands: Arrays that `fn` reads. Gradients flow into the float ones; the backward pass
            computes each round again instead of storing it.
    """
    mask, operands = vary((jnp.asarray(mask), jax.tree.map(jnp.asarray, operands)))
    return _sum_over_true(fn, mask, floats_of(operands), others_of(operands))


def vary(arrays: Any, *like: Any) -> Any:
    """Types `arrays` as varying over all devices over which any of them, or of `like`, varies.

    Inside `jax.shard_map`, types say which arrays differ between devices, and a loop must start
    with the type that its body returns. Elsewhere, nothing changes.
    """

    def axes_of(array):
        return jax.typeof(array).manual_axis_type.varying

    axes = frozenset().union(*map(axes_of, jax.tree.leaves((arrays, like))))
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(sorted(axes - axes_of(x))), to="varying"), arrays
    )


def floats_of(tree: Any) -> Any:
    """Returns the tree with None for all arrays but floats."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree)


def others_of(tree: Any) -> Any:
    """Returns the tree with None for all floats."""
    return jax.tree.map(lambda x: None if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def merged(floats: Any, others: Any) -> Any:
    """Joins the trees of `floats_of` and `others_of`."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, floats, others, is_leaf=lambda x: x is None
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_true(fn, mask, floats, others):
    return _compiled_once(_total, fn)(mask, floats, others)


def _sum_over_true_forward(fn, mask, floats, others):
    return _sum_over_true(fn, mask, floats, others), (mask, floats, others)


def _sum_over_true_backward(fn, residual, cotangent):
    return None, _compiled_once(_gradients, fn)(*residual, cotangent), None


_sum_over_true.defvjp(_sum_over_true_forward, _sum_over_true_backward)


def _call(fn, column, mask, floats, others):
    # Rows without a True entry left read column 0, and `valid` tells `fn`.
    valid = column < mask.shape[1]
    return fn(jnp.where(valid, column, 0), valid, *merged(floats, others))


def _total(fn, mask, floats, others):
    def body(carry):
        column, total = carry
        result = _call(fn, column, mask, floats, others)
        return next_true(mask, column), jax.tree.map(jnp.add, total, result)

    first = jax.ShapeDtypeStruct(mask.shape[:1], jnp.int32)
    shapes = jax.eval_shape(functools.partial(_call, fn), first, mask, floats, others)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return while_true(mask, body, vary(zeros, mask))


def _gradients(fn, mask, floats, others, cotangent):
    def body(carry):
        column, total = carry
        _, pull_back = jax.vjp(lambda floats: _call(fn, column, mask, floats, others), floats)
        return next_true(mask, column), jax.tree.map(jnp.add, total, pull_back(cotangent)[0])

    return while_true(mask, body, jax.tree.map(jnp.zeros_like, floats))


class _Keyed:
    """A function that equals all others of the same key, so that `jax.jit` compiles one of them."""

    def __init__(self, fn, key):
        self.fn, self.key = fn, key

    def __call__(self, *args):
        return self.fn(*args)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, _Keyed) and self.key == other.key


def _compiled_once(loop: Callable, fn: Callable) -> Callable:
    """Returns `loop` of `fn`, compiled once outside of `jax.jit`, though `fn` is new each time.

    A loss makes a new `fn` at each call, and JAX compiles loops of new functions again. Inside
    of `jax.jit` nothing changes: the loop is traced into the caller's program.
    """
    try:
        return functools.partial(_jitted(loop), _Keyed(fn, _key(fn)))
    except TypeError:
        return functools.partial(loop, fn)


@functools.cache
def _jitted(loop: Callable) -> Callable:
    return jax.jit(loop, static_argnums=0, inline=True)


def _key(value: Any) -> Any:
    """Returns equal keys for functions that compute the same: same code, same closed-over values.

    Raises TypeError for a function that is not of this package or JAX, because it may read a
    variable that changes, and for arrays.
    """
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return type(value), repr(value)  # 0.0 and -0.0 are equal, but compute other results
    if isinstance(value, tuple | list):
        return type(value), *map(_key, value)
    if isinstance(value, functools.partial):
        return functools.partial, *map(_key, (value.func, value.args, *value.keywords.items()))
    package = getattr(value, "__module__", "").partition(".")[0]
    if not callable(value) or package not in ("dmljax", "jax"):
        raise TypeError(f"{value!r} cannot be compared")
    if not isinstance(value, types.FunctionType) or "<locals>" not in value.__qualname__:
        return value
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    defaults = value.__defaults__, *(value.__kwdefaults__ or {}).items()
    return value.__module__, value.__code__, _key(cells), _key(defaults)
