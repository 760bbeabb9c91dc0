"""Loops over the True entries of a mask, in the memory of the mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from dmljax.ops.types import Array

__all__ = [
    "next_true",
    "sum_over_true",
    "while_true",
]


def next_true(mask, after):
    """Per row, the first True column past `after`; the row's length where there is none."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    rest = jnp.where(mask & (columns > after[:, None]), columns, mask.shape[1])
    return jnp.min(rest, axis=1, initial=mask.shape[1])


def while_true(mask, body, initial):
    """`body((column [b], carry))` for the first True of every row, then the second, and so on."""
    first = next_true(mask, jnp.full(len(mask), -1, jnp.int32))
    return jax.lax.while_loop(lambda c: jnp.any(c[0] < mask.shape[1]), body, (first, initial))[1]


def sum_over_true(fn: Callable, mask: Bool[Array, "b n"], *operands: Any) -> Any:
    """The sum over t of `fn(column, valid, *operands)`, with each row's t-th True of `mask`.

    `column [b]` is where that entry stands and `valid [b]` False for rows that have run out. There
    are as many rounds as the fullest row has True entries, decided while running, so a loss over
    triplets costs O(b n) memory and, with K images per class, O(b n K) time. Gradients flow into
    the float `operands` by running the rounds again; `fn` must not close over traced arrays.
    """
    return _sum_over_true(fn, jnp.asarray(mask), jax.tree.map(jnp.asarray, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_true(fn, mask, operands):
    width = mask.shape[1]

    def call(column):
        # Rows that ran out read column 0 and are told so.
        return fn(jnp.where(column < width, column, 0), column < width, *operands)

    def body(carry):
        column, total = carry
        return next_true(mask, column), jax.tree.map(jnp.add, total, call(column))

    shapes = jax.eval_shape(call, jax.ShapeDtypeStruct(mask.shape[:1], jnp.int32))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return while_true(mask, body, zeros)


def _sum_over_true_forward(fn, mask, operands):
    return _sum_over_true(fn, mask, operands), (mask, operands)


def _sum_over_true_backward(fn, residual, cotangent):
    mask, operands = residual
    leaves, structure = jax.tree.flatten(operands)
    smooth = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [leaf for leaf, s in zip(leaves, smooth, strict=True) if s]
    width = mask.shape[1]

    def body(carry):
        column, total = carry

        def call(*floats):
            fill = iter(floats)
            mixed = [next(fill) if s else leaf for leaf, s in zip(leaves, smooth, strict=True)]
            whole = jax.tree.unflatten(structure, mixed)
            return fn(jnp.where(column < width, column, 0), column < width, *whole)

        gradients = jax.vjp(call, *floats)[1](cotangent)
        return next_true(mask, column), jax.tree.map(jnp.add, total, list(gradients))

    fill = iter(while_true(mask, body, [jnp.zeros_like(leaf) for leaf in floats]))
    zeros = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    mixed = [next(fill) if s else zero for zero, s in zip(zeros, smooth, strict=True)]
    return np.zeros(mask.shape, jax.dtypes.float0), jax.tree.unflatten(structure, mixed)


_sum_over_true.defvjp(_sum_over_true_forward, _sum_over_true_backward)
