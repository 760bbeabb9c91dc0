"""2-D convolution with gradients that are fast on CPUs.

XLA is slow on CPUs at four things, which the faster form computes in another way:

* 3-row kernels with stride 1 and many channels need half the products by minimal filtering
  (`winograd`).
* XLA computes the gradient of the kernel as a convolution whose window is as large as the feature
  map, at a tenth of the rate of its matrix products (`gradients.kernel_gradient`).
* XLA computes the gradient of the input of a strided convolution by spreading the map out with
  zeros (`gradients.input_gradient`).
* A convolution with one group per channel takes tens of times as long as its products
  (`depthwise`).

Other grouped convolutions and types other than float32 always take XLA's form.

`clipped_conv` also adds a bias and clips, in one function with one gradient: what backpropagation
needs of the result is in the result, so that the map before the clipping is not kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.kernels import depthwise, winograd
from dmljax.kernels.choice import check, choose
from dmljax.kernels.gradients import input_gradient, kernel_gradient
from dmljax.ops import Array


def conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    *,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
    impl: str = "auto",
) -> Float[jax.Array, "b y x o"]:
    """Convolves `x` with `padding` zeros on every side. `dmljax.kernels` explains `impl`."""
    check(impl)
    # XLA's form goes without the custom gradient, which would exclude forward mode.
    if _is_plain(x, kernel, groups, impl):
        return xla_conv(x, kernel, strides=strides, padding=padding, groups=groups)
    return _conv(x, kernel, strides, padding, groups, impl)


def clipped_conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    bias: Float[Array, " o"],
    *,
    limits: tuple[float, float] | None = None,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
    impl: str = "auto",
) -> Float[jax.Array, "b y x o"]:
    """Computes conv(x, kernel) + bias, clipped to `limits`. At a limit the gradient is 0."""
    options: dict[str, Any] = {"strides": strides, "padding": padding}
    options |= {"groups": groups, "impl": impl}
    if _is_plain(x, kernel, groups, impl):
        return clip(conv(x, kernel, **options) + bias.reshape(1, 1, 1, -1), limits)
    return _clipped_conv(x, kernel, bias, limits, strides, padding, groups, impl)


def _is_plain(x, kernel, groups, impl):
    is_depthwise = depthwise.is_depthwise(x.shape[3], kernel.shape, groups)
    is_float32 = x.dtype == kernel.dtype == jnp.float32
    return impl == "xla" or not is_float32 or (groups != 1 and not is_depthwise)


def clip(x: Float[Array, "*s"], limits: tuple[float, float] | None) -> Float[jax.Array, "*s"]:
    """Clips `x` to `limits`. At a limit the gradient is 0, as in PyTorch's ReLU6."""
    if limits is None:
        return jnp.asarray(x)
    return jnp.where(_is_inside(x, limits), x, jax.lax.stop_gradient(jnp.clip(x, *limits)))


def _is_inside(x, limits):
    return (x > limits[0]) & (x < limits[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def _clipped_conv(x, kernel, bias, limits, strides, padding, groups, impl):
    def finish_fn(y):
        return clip(y + bias.reshape(1, 1, 1, -1), limits)

    if groups == 1:
        return finish_fn(_conv(x, kernel, strides, padding, groups, impl))
    options = {"strides": strides, "padding": padding}
    cpu_fn = functools.partial(depthwise.conv, finish_fn=finish_fn, **options)

    def xla_fn(x, kernel):
        return finish_fn(xla_conv(x, kernel, groups=groups, **options))

    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(x, kernel)


def _clipped_conv_forward(x, kernel, bias, limits, *options):
    y = _clipped_conv(x, kernel, bias, limits, *options)
    return y, (x, kernel, y)


def _clipped_conv_backward(limits, strides, padding, groups, impl, residual, g):
    def start_fn(g, y):
        return g if limits is None else jnp.where(_is_inside(y, limits), g, 0)

    def plain(x, kernel, g, y):
        g = start_fn(g, y)
        return *_gradients(x, kernel, g, strides, padding, groups, impl), jnp.sum(g, axis=(0, 1, 2))

    x, kernel, y = residual
    if groups == 1:
        return plain(x, kernel, g, y)
    options = {"strides": strides, "padding": padding, "start_fn": start_fn}
    cpu_fn = functools.partial(depthwise.conv_gradients, **options)
    return choose(impl, cpu_fn=cpu_fn, xla_fn=plain)(x, kernel, g, y)


_clipped_conv.defvjp(_clipped_conv_forward, _clipped_conv_backward)


def xla_conv(
    x: Float[Array, "b h w i"],
    kernel: Float[Array, "kh kw j o"],
    *,
    strides: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Float[jax.Array, "b y x o"]:
    """Computes the plain form: XLA's convolution, with XLA's gradients."""
    return jax.lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(kernel),
        window_strides=(strides, strides),
        padding=[(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _conv(x, kernel, strides, padding, groups, impl):
    xla_fn = functools.partial(xla_conv, strides=strides, padding=padding, groups=groups)
    if groups > 1:
        cpu_fn = functools.partial(depthwise.conv, strides=strides, padding=padding)
    elif winograd.is_faster(x.shape, kernel.shape, strides, padding):
        cpu_fn = functools.partial(winograd.conv, padding=padding)
    else:
        return xla_fn(x, kernel)
    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(x, kernel)


def _forward(x, kernel, strides, padding, groups, impl):
    return _conv(x, kernel, strides, padding, groups, impl), (x, kernel)


def _backward(strides, padding, groups, impl, residual, g):
    return _gradients(*residual, g, strides, padding, groups, impl)


def _gradients(x, kernel, g, strides, padding, groups, impl):
    def xla_fn(x, kernel, g):
        forward = functools.partial(xla_conv, strides=strides, padding=padding, groups=groups)
        return jax.vjp(forward, x, kernel)[1](g)

    def cpu_fn(x, kernel, g):
        if groups > 1:
            return depthwise.conv_gradients(x, kernel, g, strides=strides, padding=padding)[:2]
        if winograd.is_faster(x.shape, kernel.shape, strides, padding):
            return winograd.conv_gradients(x, kernel, g, padding=padding)
        paddings = (padding, padding)
        of_kernel = kernel_gradient(x, kernel.shape, g, strides, paddings)
        return input_gradient(x.shape, kernel, g, strides, paddings), of_kernel

    return choose(impl, cpu_fn=cpu_fn, xla_fn=xla_fn)(x, kernel, g)


_conv.defvjp(_forward, _backward)
