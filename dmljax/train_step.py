"""One pure train step, the same for every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dmljax.methods.base import Method

__all__ = ["TrainState", "init_state", "train_step"]


class TrainState(NamedTuple):
    """All that a run is, as arrays."""

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any


def init_state(
    params: Any, model_state: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    """Before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))


def train_step(
    method: Method, optimizer: optax.GradientTransformation, *, normalize_fn: Callable, seed: int
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """`step(state, batch) -> (state, metrics)`, to be jit-compiled with the state donated."""

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        batch = {**batch, "images": normalize_fn(batch["images"])}

        def loss(params):
            return method.loss(params, state.model_state, batch, key=key, step=state.step)

        gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        (value, (model_state, metrics)), gradients = gradients
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradients), **metrics}
        return TrainState(state.step + 1, params, model_state, opt_state), metrics

    return step
