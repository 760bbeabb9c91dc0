"""Low-rank adapters (LoRA, Hu et al., ICLR 2022; DoRA) of the linear maps of any Flax module.

    adapters = adapt.lora(key, params, rank=8, targets="attn/qkv")
    outputs = net.apply({"params": adapt.merged(params, adapters, scale=2.0)}, images, train=True)

`merged` adds the products to the kernels, so that the module knows nothing of adapters, and what is
shipped is exactly what was trained. A gradient with respect to the adapters alone gives an
optimizer and a checkpoint of their size. It takes about as long as a gradient with respect to the
kernels.
"""

import contextlib
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from dmljax import ops
from dmljax.nets.initializers import fan_in_uniform


def lora(key: jax.Array, params: Any, *, rank: int = 8, targets: str | None = None) -> Any:
    """Draws adapters for the kernels whose paths match the regular expression `targets`.

    A kernel [i, o] gets "a" [i, rank], drawn as PyTorch draws a linear layer, and "b" [rank, o] of
    zeros, in the place of the kernel in the tree. Kernels of linear layers, projections of
    attention (q, k and v in one kernel too) and 1 x 1 convolutions can have adapters. Without
    `targets`, the kernels 'attn/qkv' have them, or all in a net without attention.
    """
    kernels = {
        path: x.shape[-2:]
        for path, x in traverse_util.flatten_dict(params).items()
        if path[-1] == "kernel" and (x.ndim == 2 or (x.ndim == 4 and x.shape[:2] == (1, 1)))
    }
    names = {"/".join(path): path for path in kernels}
    if targets is None:
        targets = r"attn/qkv/kernel$" if any("attn/qkv/" in name for name in names) else "."
    chosen: list[tuple[str, ...]] = []
    with contextlib.suppress(re.error):
        chosen = [names[name] for name in sorted(names) if re.search(targets, name)]
    if not chosen:
        raise ValueError(
            f"lora: targets={targets!r} matches no kernel of a linear layer or 1 x 1 convolution, "
            f"such as {', '.join(list(names)[:: max(1, len(names) // 4)]) or 'none here'}"
        )
    adapters = {}
    for i, path in enumerate(chosen):
        shape = kernels[path]
        if not 1 <= rank <= min(shape):
            raise ValueError(
                f"lora: rank={rank} must be 1 or more and not above the width {min(shape)} of "
                f"{'/'.join(path)}"
            )
        a = fan_in_uniform(shape[0])(jax.random.fold_in(key, i), (shape[0], rank))
        adapters[*path[:-1], "a"] = a
        adapters[*path[:-1], "b"] = jnp.zeros((rank, shape[1]))
    return traverse_util.unflatten_dict(adapters)


def lora_scale(*, rank: int, alpha: float, rslora: bool = False) -> float:
    """Computes alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski, 2023)."""
    if rank < 1 or alpha <= 0:
        raise ValueError(f"lora: rank={rank} must be 1 or more, and alpha={alpha:g} above 0")
    return alpha / (math.sqrt(rank) if rslora else rank)


def with_magnitudes(params: Any, adapters: Any) -> Any:
    """Adds a "magnitude" for the columns of each kernel (DoRA, Liu et al., ICML 2024).

    They are the norms of the columns in `params`, so that `merged` gives the same net at first.
    """
    flat, factors = map(traverse_util.flatten_dict, (params, adapters))
    for *folder, leaf in list(factors):
        if leaf == "a":
            kernel = flat[*folder, "kernel"]
            factors[*folder, "magnitude"] = _column_norms(kernel.reshape(-1, kernel.shape[-1]))
    return traverse_util.unflatten_dict(factors)


def merged(params: Any, adapters: Any, *, scale: float) -> Any:
    """Adds scale x a b to every kernel of `params` that has an adapter.

    Where the adapter has a "magnitude" m [o], the columns of the sum V get these norms: m V / |V|
    (DoRA). No gradient goes through |V|, as the paper proposes.
    """
    flat = dict(traverse_util.flatten_dict(params, keep_empty_nodes=True))
    factors = traverse_util.flatten_dict(adapters)
    for path in [path for path in factors if path[-1] == "a"]:
        a, b = factors[path], factors[*path[:-1], "b"]
        product = jnp.matmul(a, b, precision="highest")  # [i o]
        kernel = flat[*path[:-1], "kernel"]
        total = kernel + (scale * product).reshape(kernel.shape)
        if (magnitude := factors.get((*path[:-1], "magnitude"))) is not None:
            norms = _column_norms(total.reshape(-1, total.shape[-1]))
            ratios = ops.divide(jnp.asarray(magnitude), jax.lax.stop_gradient(norms))
            total = total * ratios.reshape((1,) * (total.ndim - 1) + (-1,))
        flat[*path[:-1], "kernel"] = total
    return traverse_util.unflatten_dict(flat)


def _column_norms(kernel: Any) -> jax.Array:
    """Computes the norms `[o]` of the columns of a kernel `[i o]`."""
    return jnp.sqrt(jnp.sum(jnp.square(kernel), axis=0))
