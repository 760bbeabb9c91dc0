"""How many operations a program has."""

from __future__ import annotations

import math
from typing import Any

import jax.extend.core


def multiply_adds(jaxpr: Any) -> int:
    """The multiply-adds of all convolutions and products; of a condition, its largest branch.

    A loop counts as often as it runs, if that is known before (a `scan`), and otherwise once. What
    every device computes counts for all devices.
    Convolutions choose by platform: the default branch is the convolution as it is written.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out = equation.params["dimension_numbers"].rhs_spec[0]
            total += equation.outvars[0].aval.size * math.prod(kernel) // kernel[out]
        elif equation.primitive.name == "dot_general":
            (axes, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * math.prod(shape[axis] for axis in axes)
        inner = [multiply_adds(j) for j in jax.extend.core.jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inner, default=0)
        else:
            total += sum(inner) * _rounds(equation)
    return total


def _rounds(equation: Any) -> int:
    """How often the inner programs of an equation run, on all devices together."""
    if equation.primitive.name == "scan":
        return equation.params["length"]
    if equation.primitive.name == "shard_map":
        return equation.params["mesh"].size
    return 1
