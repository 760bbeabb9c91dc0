"""Forms of primitives that XLA computes slowly on CPUs: gradients and depthwise convolutions, and
max pooling.

The argument `impl` of layers and backbones chooses a form:

* `"auto"` (default): the faster form where a program is compiled for a CPU, XLA's elsewhere. GPUs
  also take the gradient of max pooling, because XLA's is not deterministic there.
* `"cpu"`: the faster form on every platform.
* `"xla"`: XLA's form on every platform.

The two forms differ by rounding, about 1e-6 of the largest value; tests compare them. The faster
ones define their own gradients, which support reverse mode only: `jax.jvp` and `jax.jacfwd` need
`impl="xla"`. No flag and no environment variable is read, so a notebook and the command line trace
the same program.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator

import jax

__all__ = ["IMPLS", "describe", "portable"]

IMPLS = ("auto", "cpu", "xla")
_portable = contextvars.ContextVar("portable", default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Traces programs within the block with operations that ONNX has, whatever `impl` says.

    The values are the same up to rounding. JAX may reuse a trace from outside the block: enter it
    in a process that has traced nothing before.
    """
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def is_portable() -> bool:
    """Returns whether the caller runs within a block of `portable`."""
    return _portable.get()


def choose(
    impl: str, *, cpu_fn: Callable, xla_fn: Callable, gpu_fn: Callable | None = None
) -> Callable:
    """Returns the form that `impl` names. For "auto", JAX chooses when it compiles for a platform.

    Without `gpu_fn`, GPUs take XLA's form.
    """
    check(impl)
    if is_portable():
        return xla_fn
    if impl == "auto":
        forms = {"cpu": cpu_fn, "default": xla_fn}
        forms |= {} if gpu_fn is None else {"cuda": gpu_fn, "rocm": gpu_fn}
        return functools.partial(jax.lax.platform_dependent, **forms)
    return cpu_fn if impl == "cpu" else xla_fn


def describe(impl: str, platform: str) -> str:
    """Describes for the header of a run what computes convolutions and max pooling.

    >>> describe("auto", "cpu")
    "convolutions by dmljax (impl='auto')"
    """
    check(impl)
    author = "dmljax" if impl == "cpu" or (impl, platform) == ("auto", "cpu") else "XLA"
    return f"convolutions by {author} (impl={impl!r})"


def check(impl: str) -> None:
    """Raises unless `impl` is one of `IMPLS`."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, not {impl!r}")
