"""Loops over the True entries of a mask `[b n]`, in O(b n) memory."""

from __future__ import annotations

import functools
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
    "while_true",
]


def next_true(mask: Bool[Array, "b n"], after: Integer[Array, "b"]) -> Integer[Array, "b"]:
    """The first True column behind column `after`, for each row; n where there is none."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    candidates = jnp.where(mask & (columns > after[:, None]), columns, mask.shape[1])
    return jnp.min(candidates, axis=1, initial=mask.shape[1])


def while_true(mask: Bool[Array, "b n"], body: Callable, initial: Any) -> Any:
    """The last value of `carry` in `body((column [b], carry)) -> (next column, carry)`.

    `body` runs once for the first True entries of all rows, then for the second ones, and so on.
    `column` is n for a row that has no more True entries.
    """
    first = next_true(mask, jnp.full(len(mask), -1, jnp.int32))
    return jax.lax.while_loop(lambda c: jnp.any(c[0] < mask.shape[1]), body, (first, initial))[1]


def take_column(matrix: Array, column: Integer[Array, "b"]) -> Array:
    """[b 1]: the entry of every row of `matrix [b n]` in that row's `column`."""
    return jnp.take_along_axis(matrix, column[:, None], axis=1)


def sum_over_true(fn: Callable, mask: Bool[Array, "b n"], *operands: Any) -> Any:
    """The sum of `fn(column, valid, *operands)` over the first, second, ... True entry of all rows.

    There are as many rounds as the fullest row of `mask` has True entries, which is decided at run
    time. So a loss over triplets costs O(b n) memory and, with K images per class, O(b n K) time.

    Args:
        fn: Gets `column [b]`, the place of this round's True entry in each row, and `valid [b]`,
            False for rows that have no more True entries. It returns arrays to be summed over
            rounds, and must not close over traced arrays: these are `operands`.
        mask: The entries to loop over.
        operands: Arrays that `fn` reads. Gradients flow into the float ones; the backward pass
            computes each round again instead of storing it.
    """
    return _sum_over_true(fn, jnp.asarray(mask), jax.tree.map(jnp.asarray, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_true(fn, mask, operands):
    width = mask.shape[1]

    def call(column):
        # Rows without a True entry left read column 0, and `valid` tells `fn`.
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
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [leaf for leaf, f in zip(leaves, is_float, strict=True) if f]
    width = mask.shape[1]

    def body(carry):
        column, total = carry

        def call(*floats):
            remaining = iter(floats)
            merged = [
                next(remaining) if f else leaf for leaf, f in zip(leaves, is_float, strict=True)
            ]
            operands = jax.tree.unflatten(structure, merged)
            return fn(jnp.where(column < width, column, 0), column < width, *operands)

        gradients = jax.vjp(call, *floats)[1](cotangent)
        return next_true(mask, column), jax.tree.map(jnp.add, total, list(gradients))

    gradients = iter(while_true(mask, body, [jnp.zeros_like(leaf) for leaf in floats]))
    # `jax.custom_vjp` wants gradients of dtype float0 for operands that are not floats.
    zeros = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    merged = [next(gradients) if f else zero for zero, f in zip(zeros, is_float, strict=True)]
    return np.zeros(mask.shape, jax.dtypes.float0), jax.tree.unflatten(structure, merged)


_sum_over_true.defvjp(_sum_over_true_forward, _sum_over_true_backward)
