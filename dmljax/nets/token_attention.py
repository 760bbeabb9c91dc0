"""softmax(q k^T / sqrt(d)) v among the tokens of an image or a text, computed in several forms.

| form | by | takes |
|---|---|---|
| `plain` | dmljax: products of maps whose heads come before the tokens | all but `jax.jvp` |
| `xla` | `jax.nn.dot_product_attention(implementation="xla")` | everything |
| `cudnn` | cuDNN's flash attention, which keeps no [tokens tokens] array | bfloat16, NVIDIA GPUs |
| `tokamax` | the package tokamax, where it is installed | what it takes |

`auto` is `plain`, until a run replaces it: on an accelerator it measures all forms at the sizes
that it uses, and takes the fastest (`milliseconds`, `dmljax.train.attention_choice`).
"""

import functools
import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from dmljax.ops import Array

__all__ = ["FORMS", "attention", "check", "milliseconds"]

_ROUNDS, _CALLS = 5, 10
_TOLERANCE = 0.05  # of the largest value: a form that differs by more is refused


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b t h d"],
    v: Float[Array, "b t h d"],
    *,
    is_causal: bool = False,
    form: str = "auto",
) -> Float[jax.Array, "b q h d"]:
    """Computes softmax(q k^T / sqrt(d)) v for every head (Vaswani et al., 2017); the softmax is in
    float32.
    """
    check(form)
    return FORMS["plain" if form == "auto" else form](q, k, v, is_causal)


def check(form: str, platform: str = "gpu") -> None:
    """Raises unless `form` is one of `FORMS`, or 'auto', and can run on `platform`."""
    if form not in ("auto", *FORMS):
        names = ", ".join(map(repr, ("auto", *FORMS)))
        raise ValueError(f"attention is one of {names}, not {form!r}")
    if form == "cudnn" and platform != "gpu":
        raise ValueError(
            f"attention='cudnn' needs an NVIDIA GPU, and JAX runs on {platform}: take 'auto'"
        )
    if form == "tokamax" and importlib.util.find_spec("tokamax") is None:
        raise ValueError("attention='tokamax' needs the package: pip install tokamax")


def milliseconds(
    *, images: int, tokens: int, heads: int, width: int, dtype: Any, is_causal: bool = False
) -> dict[str, float | str]:
    """Measures, by form, the time of attention with its gradient on this device, or why it is
    refused.
    """
    shape = (images, tokens, heads, width // heads)
    arrays = [
        jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)
    ]
    results: dict[str, float | str] = {}
    expected = None
    for form in FORMS:
        try:
            check(form, jax.default_backend())
            function = _with_gradients(form, is_causal).lower(*arrays).compile()
            values = [np.asarray(x[-1], np.float32) for x in function(*arrays)]  # of one image
            expected = values if expected is None else expected
            results[form] = _refusal(values, expected) or _median(function, arrays)
        except Exception as error:  # whatever a form raises, the others remain
            results[form] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return results


def _with_gradients(form: str, is_causal: bool) -> Any:
    def outputs(q, k, v, g):
        y, pull_back = jax.vjp(lambda *x: attention(*x, is_causal=is_causal, form=form), q, k, v)
        return (y, *pull_back(g))

    return jax.jit(outputs)


def _refusal(values: list[np.ndarray], expected: list[np.ndarray]) -> str | None:
    for x, y in zip(values, expected, strict=True):
        if not np.max(np.abs(x - y)) <= _TOLERANCE * np.max(np.abs(y)):  # also of NaN
            return "its result differs from the result of plain"
    return None


def _median(function: Callable, arrays: list[jax.Array]) -> float:
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(_CALLS):  # queued, because the start of one takes as long as a small one
            results = function(*arrays)
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - start) / _CALLS)
    return 1000 * float(np.median(seconds))


def _plain(q, k, v, is_causal):
    """Places heads before tokens in memory. On CPUs XLA multiplies such maps directly, in two
    thirds of the time.
    """
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(_heads_first(q, k, v, is_causal), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _heads_first(q, k, v, is_causal):
    return _heads_first_forward(q, k, v, is_causal)[0]


def _heads_first_forward(q, k, v, is_causal):
    """Divides the result, [tokens, width], by the sum of the exponentials, instead of the weights,
    [tokens, tokens], which saves a third of the time on CPUs. In half precision it divides the
    weights, so that the result is rounded once.
    """
    weights, totals, results = [], [], []
    for rows in _parts(q.shape[2]):
        scores = _scores(q[:, :, rows], k)
        if is_causal:
            where = jnp.tril(jnp.ones((q.shape[2], k.shape[2]), bool))[rows]
            scores = jnp.where(where[None, None], scores, -jnp.inf)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        x = jnp.exp((scores - largest) / math.sqrt(q.shape[-1]))
        total = jnp.sum(x, axis=-1, keepdims=True)
        if x.dtype != v.dtype:
            x, total = (x / total).astype(v.dtype), 1
        results.append(jnp.einsum("bhqk,bhkd->bhqd", x, v) / total)
        weights.append(x)
        totals.append(total)
    y = jnp.concatenate(results, axis=2)
    return y, (q, k, v, weights, totals)


def _heads_first_backward(is_causal, arrays, g):
    del is_causal  # the weights are 0 where a token is not seen
    q, k, v, weights, totals = arrays
    of_q, of_k, of_v = [], [], []
    for rows, x, total in zip(_parts(q.shape[2]), weights, totals, strict=True):
        g_y = g[:, :, rows] / total
        g_x = _scores(g_y, v)
        # The mean by the rounded weights: the rows of the result sum to 0, also in half precision.
        x_32 = x.astype(g_x.dtype)
        mean = jnp.sum(x_32 * g_x, -1, keepdims=True) / jnp.sum(x_32, -1, keepdims=True)
        g_scores = (x * (g_x - mean) / math.sqrt(q.shape[-1])).astype(q.dtype)
        of_q.append(jnp.einsum("bhqk,bhkd->bhqd", g_scores, k))
        of_k.append(jnp.einsum("bhqk,bhqd->bhkd", g_scores, q[:, :, rows]))
        of_v.append(jnp.einsum("bhqk,bhqd->bhkd", x, g_y))
    return jnp.concatenate(of_q, axis=2), sum(of_k), sum(of_v)


_heads_first.defvjp(_heads_first_forward, _heads_first_backward)


def _parts(tokens):
    """Splits 257 queries into two halves. XLA on CPUs divides queries into blocks of 256, one core
    for each block, so that the second core would get one query.
    """
    half = -(-tokens // 2)
    return [slice(0, half), slice(half, tokens)] if 256 < tokens <= 512 else [slice(0, tokens)]


def _scores(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)


def _xla(q, k, v, is_causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="xla")


def _cudnn(q, k, v, is_causal, implementation="cudnn"):
    """Adds a masked token to odd lengths, for which cuDNN has no gradient."""
    lengths = [jnp.full(len(x), x.shape[1], jnp.int32) for x in (q, k)]
    is_odd = q.shape[1] % 2 or k.shape[1] % 2
    masks = dict(zip(("query_seq_lengths", "key_value_seq_lengths"), lengths, strict=True))
    y = jax.nn.dot_product_attention(
        *(jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v)),
        is_causal=is_causal,
        implementation=implementation,
        **(masks if is_odd else {}),
    )
    return y[:, : q.shape[1]]


def _tokamax(q, k, v, is_causal):
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=is_causal)


FORMS: Mapping[str, Callable] = {
    "plain": _plain,
    "xla": _xla,
    "cudnn": _cudnn,
    "tokamax": _tokamax,
}
