"""Primitives that XLA computes slowly on CPUs: a plain form and a faster one, side by side.

| module | primitive | plain form | faster form |
|---|---|---|---|
| `convolution` | convolution, with gradients | XLA's | `winograd`, `gradients`, `depthwise` |
| `pooling` | max pooling, with its gradient | XLA's | the forward pass keeps each window's argmax |

The argument `impl` of convolutions, of pooling, of the layers and of every backbone chooses a form:

* `"auto"` (default): the faster form where a program is compiled for a CPU, XLA's elsewhere. GPUs
  also take the gradient of max pooling, because XLA's is not deterministic there.
* `"cpu"`: the faster form on every platform.
* `"xla"`: XLA's form on every platform.

The two forms differ by rounding, about 1e-6 of the largest value; tests compare them. The faster
ones define their own gradients, which support reverse mode only: `jax.jvp` and `jax.jacfwd` need
`impl="xla"`. No flag and no environment variable is read, so a notebook and the command line trace
the same program. On CPUs the command line also makes XLA compile convolutions to its own kernels
(`dmljax.main.tune_cpu`); a notebook gets the same machine code with the same `XLA_FLAGS`, set
before `import jax`.
"""

from dmljax.kernels.choice import IMPLS, describe, portable

__all__ = ["IMPLS", "describe", "portable"]
