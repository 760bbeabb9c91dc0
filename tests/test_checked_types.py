"""While testing, calls are checked against the annotations of functions."""

import jax.numpy as jnp
import jaxtyping
import pytest
import typechecker
from jaxtyping import Array, Float

from dmljax import losses, ops
from dmljax.nets import initializers


def test_a_call_with_another_shape_or_type_is_an_error():
    x, labels = jnp.ones((4, 2)), jnp.array([0, 0, 1, 1])
    losses.contrastive(x, labels)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"losses\._common\.prepare"):
        losses.contrastive(x, labels[:3])
    with pytest.raises(jaxtyping.TypeCheckError, match=r"losses\._common\.prepare"):
        losses.contrastive(x, labels, reduce_fn="mean")
    with pytest.raises(jaxtyping.TypeCheckError, match=r"ops\.\w+\.squared_euclidean"):
        ops.squared_euclidean(x, jnp.ones((4, 3)))


def test_a_result_is_checked_and_every_call_has_its_own_axes():
    @typechecker.checked
    def first(x: Float[Array, "b d"], count: int) -> Float[Array, "b d"]:
        return x[:count]

    @typechecker.checked
    def first_of_half(x: Float[Array, "b d"]) -> Float[Array, "b d"]:
        first(x[: len(x) // 2], len(x) // 2)
        return x

    assert first_of_half(jnp.ones((4, 2))).shape == (4, 2)
    with pytest.raises(jaxtyping.TypeCheckError, match="first"):
        first(jnp.ones((4, 2)), 3)


def test_functions_without_annotations_are_not_wrapped():
    assert hasattr(initializers.normal, "__wrapped__")
    assert not hasattr(initializers.normal(0.1), "__wrapped__")
