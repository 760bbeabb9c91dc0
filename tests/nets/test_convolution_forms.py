"""Both forms of a convolution have the same values and gradients, whatever the geometry."""

import functools
import importlib.metadata
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import python

from dmljax.nets.layers import depthwise
from dmljax.nets.layers import impl as forms
from dmljax.nets.layers.convolution import conv
from dmljax.nets.layers.depthwise import xla_conv


def value_and_gradients(conv_fn, x, kernel, weights):
    """The convolution and its gradients along `weights`."""

    @jax.jit
    def run(x, kernel, weights):
        y, backward = jax.vjp(conv_fn, x, kernel)
        return y, *backward(weights)

    return run(x, kernel, weights)


def assert_forms_agree(impl, x, kernel, weights, atol, **options):
    """`impl` in float32 against the plain form in float64."""
    singles = [a.astype(np.float32) for a in (x, kernel, weights)]
    results = value_and_gradients(lambda x, k: conv(x, k, impl=impl, **options), *singles)
    padding = options.pop("padding")
    zeros = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    with jax.enable_x64(True):
        # XLA 0.10's compiler ends the process at some gradients of convolutions that pad by
        # themselves, such as of one row with strides=2, padding=1 and a kernel of two rows.
        exact = value_and_gradients(
            lambda x, k: xla_conv(jnp.pad(x, zeros), k, **options),
            *(a.astype(np.float64) for a in singles),
        )
    for result, expected in zip(results, exact, strict=True):
        assert result.dtype == jnp.float32 and expected.dtype == jnp.float64
        np.testing.assert_allclose(
            result, expected, rtol=0, atol=atol * max(1, np.abs(expected).max())
        )


@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(0, 6), st.integers(0, 4)
)
def test_values_and_gradients_are_those_of_xla(size, strides, padding, extra_h, extra_w):
    rng = np.random.default_rng(size * 100 + strides * 10 + padding)
    h, w = (max(1, size - 2 * padding) + extra for extra in (extra_h, extra_w))
    x = rng.normal(size=(2, h, w, 3))
    kernel = rng.normal(size=(size, size, 3, 4))
    rows, columns = ((n + 2 * padding - size) // strides + 1 for n in (h, w))
    weights = rng.normal(size=(2, rows, columns, 4))
    assert_forms_agree("auto", x, kernel, weights, 1e-4, strides=strides, padding=padding)


@settings(deadline=None, max_examples=15)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.integers(1, 3),
    st.integers(0, 2),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.integers(1, 6),
)
def test_a_kernel_per_channel_is_the_same_convolution(size, strides, padding, extra, images):
    """Also in chunks of a few images: here a chunk has 2^5 numbers."""
    rng = np.random.default_rng(images)
    h, w = (max(1, n - 2 * padding) + more for n, more in zip(size, extra, strict=True))
    x, kernel = rng.normal(size=(images, h, w, 3)), rng.normal(size=(*size, 1, 3))
    rows, columns = (
        (n + 2 * padding - k) // strides + 1 for n, k in zip((h, w), size, strict=True)
    )
    weights = rng.normal(size=(images, rows, columns, 3))
    with mock.patch.object(depthwise, "_CHUNK_NUMBERS", 1 << 5):
        assert_forms_agree(
            "cpu", x, kernel, weights, 1e-5, strides=strides, padding=padding, groups=3
        )


@pytest.mark.parametrize(
    ("impl", "platform", "convolutions"),
    [
        ("auto", "cpu", 0),
        ("auto", "cuda", 2),
        ("auto", "tpu", 2),
        ("cpu", "cuda", 0),
        ("xla", "cpu", 2),
    ],
)
def test_impl_and_platform_choose_the_form(impl, platform, convolutions):
    x, kernel = jnp.ones((4, 8, 8, 6)), jnp.ones((3, 3, 1, 6))
    gradient_fn = jax.grad(lambda k: jnp.sum(conv(x, k, padding=1, groups=6, impl=impl) ** 2))
    text = jax.jit(gradient_fn).trace(kernel).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.convolution") == convolutions


def test_gradient_of_a_1x1_kernel_is_one_matrix_product():
    x, kernel = jnp.ones((4, 8, 8, 3)), jnp.ones((1, 1, 3, 5))
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(conv(x, k, impl="cpu") ** 2)))
    text = gradient.lower(kernel).as_text()
    assert text.count("stablehlo.convolution") == text.count("stablehlo.dot_general") == 1


@pytest.mark.parametrize(
    ("dtype", "groups", "shape"),
    [
        ("bfloat16", 1, (3, 3, 32, 32)),
        ("bfloat16", 32, (3, 3, 1, 32)),
        ("float32", 16, (3, 3, 2, 32)),
        ("float32", 32, (3, 3, 1, 64)),  # two kernels per channel
    ],
)
def test_other_types_and_groups_take_the_form_of_xla(dtype, groups, shape):
    x, kernel = jnp.ones((1, 8, 8, 32), dtype), jnp.ones(shape, dtype)
    plain, chosen = (
        str(jax.make_jaxpr(functools.partial(f, padding=1, groups=groups, **options))(x, kernel))
        for f, options in ((xla_conv, {}), (conv, {"impl": "cpu"}))
    )
    assert chosen == plain


def test_forward_mode_needs_the_plain_form():
    x, kernel = jnp.ones((1, 4, 4, 3)), jnp.ones((3, 3, 3, 2))
    y, tangent = jax.jvp(lambda x: conv(x, kernel, impl="xla"), (x,), (x,))
    np.testing.assert_allclose(tangent, y)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: conv(x, kernel), (x,), (x,))


def test_unknown_forms_are_refused():
    x, kernel = jnp.ones((1, 4, 4, 2)), jnp.ones((1, 1, 1, 2))
    for run in (
        lambda: conv(x, kernel, groups=2, impl="fast"),
        lambda: forms.describe("", "cpu"),
    ):
        with pytest.raises(ValueError, match="impl must be one of 'auto', 'cpu', 'xla', not"):
            run()


def run_python(code, **variables):
    return json.loads(python(code, **{"XLA_FLAGS": None} | variables).stdout)


STEP = """
import jax, jax.numpy as jnp
from dmljax.nets.layers.convolution import conv
x, kernel = jnp.ones((4, 8, 8, 32)), jnp.ones((3, 3, 32, 64))
gradient = jax.jit(jax.grad(lambda k: jnp.sum(conv(x, k, padding=1) ** 2)))
"""


def test_the_command_line_compiles_convolutions_to_xlas_own_kernels():
    code = """
import json, os
from dmljax import main
main.tune_cpu()
assert os.environ["XLA_FLAGS"].count("individual_convolution") == 1, os.environ["XLA_FLAGS"]
"""
    code += STEP + "text = gradient.lower(kernel).compile().as_text()\n"
    code += 'print(json.dumps([text.count(s) for s in (" convolution(", "ynn_fusion", " while(")]))'
    # The gradient of the kernel, and the convolution that it is computed from; `_batch_last` loops.
    assert run_python(code) == [2, 0, 1]


def test_the_command_line_keeps_flags_that_are_set():
    code = "import json, os\nfrom dmljax import main\nmain.tune_cpu()\n"
    code += 'print(json.dumps(os.environ["XLA_FLAGS"]))'
    flags = "--xla_cpu_use_fusion_emitters=true --xla_cpu_experimental_ynn_fusion_type=-dot"
    assert run_python(code, XLA_FLAGS=flags) == flags
    knows_emitters = importlib.metadata.version("jaxlib").startswith("0.10.")
    assert ("--xla_cpu_use_fusion_emitters=false" in run_python(code)) == knows_emitters


@pytest.mark.parametrize("platforms", ["tpu", "cuda,cpu"])
def test_the_command_line_sets_no_flag_of_cpus_for_an_accelerator(platforms):
    """libtpu ends the process at a flag that it does not know."""
    code = "import json, os\nfrom dmljax import main\nmain.tune_cpu()\n"
    code += 'print(json.dumps(os.environ.get("XLA_FLAGS", "")))'
    assert run_python(code, JAX_PLATFORMS=platforms, XLA_FLAGS="") == ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets options of glibc")
def test_the_command_line_keeps_the_memory_of_large_steps():
    """Every page of a block of 2.5 GB comes from the system once."""
    code = """
import ctypes, json, resource
from dmljax import main
main.tune_cpu()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def count_new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2500 << 20)
    for i in range(2500):
        ctypes.memset(block + (i << 20), 1, 1)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(json.dumps([count_new_pages(), count_new_pages()]))
"""
    first, second = run_python(code)
    assert first > 500 and second < 100, (first, second)
