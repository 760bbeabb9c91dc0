"""2-D convolution with gradients that are fast on CPUs.

XLA is slow on CPUs at three things, which the faster form computes in another way:

* 3-row kernels with stride 1 and many channels need half the products by minimal filtering
  (`winograd`).
* XLA computes the gradient of the kernel as a convolution whose window is as large as the feature
  map, at a tenth of the rate of its matrix products (`gradients.kernel_gradient`).
* XLA computes the gradient of the input of a strided convolution by spreading the map out with
  zeros (`gradients.input_gradient`).

Grouped convolutions and types other than float32 always take XLA's form.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.kernels import winograd
from dmljax.kernels.choice import check, choose
from dmljax.kernels.gradients import input_gradient, kernel_gradient
from dmljax.ops import Array

__all__ = ["conv", "xla_conv"]


def conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    *,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
    impl: str = "auto",
) -> Float[jax.Array, "b y x o"]:
    """Convolution of `x` with `padding` zeros on every side. `dmljax.kernels` explains `impl`."""
    check(impl)
    # XLA's form goes without the custom gradient, which would exclude forward mode.
    if impl == "xla" or groups != 1 or not x.dtype == kernel.dtype == jnp.float32:
        return xla_conv(x, kernel, strides=strides, padding=padding, groups=groups)
    return _conv(x, kernel, strides, padding, impl)


def xla_conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    *,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Float[jax.Array, "b y x o"]:
    """The plain form: XLA's convolution, with XLA's gradients."""
    return jax.lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(kernel),
        window_strides=(strides, strides),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _conv(x, kernel, strides, padding, impl):
    xla_fn = functools.partial(xla_conv, strides=strides, padding=padding)
    if not winograd.is_faster(x.shape, kernel.shape, strides, padding):
        return xla_fn(x, kernel)
    cpu_fn = functools.partial(winograd.conv, padding=padding)
    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(x, kernel)


def _forward(x, kernel, strides, padding, impl):
    return _conv(x, kernel, strides, padding, impl), (x, kernel)


def _backward(strides, padding, impl, residual, g):
    def xla_fn(x, kernel, g):
        forward = functools.partial(xla_conv, strides=strides, padding=padding)
        return jax.vjp(forward, x, kernel)[1](g)

    def cpu_fn(x, kernel, g):
        if winograd.is_faster(x.shape, kernel.shape, strides, padding):
            return winograd.conv_gradients(x, kernel, g, padding=padding)
        paddings = (padding, padding)
        of_kernel = kernel_gradient(x, kernel.shape, g, strides, paddings)
        return input_gradient(x.shape, kernel, g, strides, paddings), of_kernel

    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(*residual, g)


_conv.defvjp(_forward, _backward)
