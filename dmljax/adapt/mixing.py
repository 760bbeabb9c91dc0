"""Averages of the weights of two nets."""

from typing import Any

import jax
import jax.numpy as jnp


def interpolated(params: Any, others: Any, *, share: float) -> Any:
    """Computes `(1 - share) * params + share * others` for two trees of the same shapes.

    With the parameters before fine-tuning as `others`, this is WiSE-FT (Wortsman et al., CVPR
    2022). Arrays other than floats stay as in `params`.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, not {share}")

    def mix(a: Any, b: Any) -> Any:
        if not jnp.issubdtype(jnp.asarray(a).dtype, jnp.inexact):
            return a
        return (1 - share) * a + share * b

    return jax.tree.map(mix, params, others)
