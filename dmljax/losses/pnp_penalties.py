"""Penalties f(R) for R negatives ahead of a positive: values of `penalty_fn` of `losses.pnp`.

Names are as in Li et al., AAAI 2022, arXiv:2102.04640: PNP-O, PNP-Ds, PNP-Dq, PNP-Iu, PNP-Ib.
"""

import jax.numpy as jnp
from jaxtyping import Float

from dmljax.ops import Array

__all__ = ["dq", "ds", "ib", "iu", "o"]


def o(ahead: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Returns R: every negative counts the same."""
    return ahead


def ds(ahead: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Computes log(1 + R): the gradient falls with R, slowly."""
    return jnp.log1p(ahead)


def dq(ahead: Float[Array, "*b"], *, alpha: float = 1.0) -> Float[Array, "*b"]:
    """Computes 1 - (1 + R)^-alpha: the gradient falls with R, quickly."""
    return -jnp.expm1(-alpha * jnp.log1p(ahead))


def iu(ahead: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Computes (1 + R) log(1 + R): the gradient grows with R without bound."""
    return (1 + ahead) * jnp.log1p(ahead)


def ib(ahead: Float[Array, "*b"], *, b: float = 2.0) -> Float[Array, "*b"]:
    """Computes (b R - log(1 + b R)) / b^2: the gradient grows with R up to 1 / b."""
    return (b * ahead - jnp.log1p(b * ahead)) / b**2
