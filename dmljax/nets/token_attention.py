"""softmax(q k^T / sqrt(d)) v among the tokens of an image or a text, computed in several forms.

| form | by | takes |
|---|---|---|
| `plain` | dmljax: products of maps in which the heads come before the tokens | everything |
| `xla` | `jax.nn.dot_product_attention(implementation="xla")` | everything |
| `cudnn` | cuDNN's flash attention, which keeps no [tokens tokens] array | bfloat16, NVIDIA GPUs |
| `tokamax` | the package tokamax, where it is installed | what it takes |

`auto` is `plain`, until a run replaces it: on an accelerator it measures all forms at the sizes
that it uses, and takes the fastest (`milliseconds`, `dmljax.train.attention`).
"""

from __future__ import annotations

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

_ROUNDS = 5
_TOLERANCE = 0.05  # of the largest value: a form that differs by more is refused


def attention(
    q: Float[Array, "b q h d"],
    k: Float[Array, "b t h d"],
    v: Float[Array, "b t h d"],
    *,
    is_causal: bool = False,
    form: str = "auto",
) -> Float[jax.Array, "b q h d"]:
    """softmax(q k^T / sqrt(d)) v for every head (Vaswani et al., 2017); softmax in float32."""
    check(form)
    return FORMS["plain" if form == "auto" else form](q, k, v, is_causal)


def check(form: str) -> None:
    """Raises unless `form` is one of `FORMS`, or 'auto', and can run here."""
    if form not in ("auto", *FORMS):
        names = ", ".join(map(repr, ("auto", *FORMS)))
        raise ValueError(f"attention is one of {names}, not {form!r}")
    if form == "cudnn" and (platform := jax.default_backend()) != "gpu":
        raise ValueError(
            f"attention='cudnn' needs an NVIDIA GPU, and JAX runs on {platform}: take 'auto'"
        )
    if form == "tokamax" and importlib.util.find_spec("tokamax") is None:
        raise ValueError("attention='tokamax' needs the package: pip install tokamax")


def milliseconds(
    *, images: int, tokens: int, heads: int, width: int, dtype: Any, is_causal: bool = False
) -> dict[str, float | str]:
    """By form: the time of attention with its gradient on this device, or why it is refused."""
    shape = (images, tokens, heads, width // heads)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(4)]
    results: dict[str, float | str] = {}
    expected = None
    for form in FORMS:
        try:
            check(form)
            function = _with_gradients(form, is_causal).lower(*arrays).compile()
            values = [np.asarray(x, np.float32) for x in function(*arrays)]
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
        jax.block_until_ready(function(*arrays))
        seconds.append(time.perf_counter() - start)
    return 1000 * float(np.median(seconds))


def _plain(q, k, v, is_causal):
    """The heads come before the tokens in memory. On CPUs XLA multiplies such maps directly, and
    takes two thirds of the time."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    scores_fn = _half_scores if jnp.finfo(q.dtype).bits < 32 else _scores
    scores = scores_fn(q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        where = jnp.tril(jnp.ones(scores.shape[2:], bool))[None, None]
        scores = jnp.where(where, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.swapaxes(jnp.einsum("bhqk,bhkd->bhqd", weights, v), 1, 2)


def _scores(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)


# The scores are float32. Without this rule their gradient would be, too, and XLA would copy q and k
# to float32 and multiply in float32.
_half_scores = jax.custom_vjp(_scores)


def _half_scores_gradient(arrays, g):
    q, k = arrays
    g = g.astype(q.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", g, k), jnp.einsum("bhqk,bhqd->bhkd", g, q)


_half_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _half_scores_gradient)


def _xla(q, k, v, is_causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="xla")


def _cudnn(q, k, v, is_causal):
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")


def _tokamax(q, k, v, is_causal):
    import tokamax

    return tokamax.dot_product_attention(q, k, v, is_causal=is_causal)


FORMS: Mapping[str, Callable] = {
    "plain": _plain,
    "xla": _xla,
    "cudnn": _cudnn,
    "tokamax": _tokamax,
}
