"""One pure train step, the same for every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval

from dmljax.methods.base import Method

__all__ = ["TrainState", "check_parts", "init_state", "train_step"]


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
    method: Method,
    optimizer: optax.GradientTransformation,
    *,
    normalize_fn: Callable,
    seed: int,
    chunk: int | None = None,
    gather_fn: Callable | None = None,
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """`step(state, batch) -> (state, metrics)`, to be jit-compiled with the state donated.

    With `chunk`, the net sees so many images of the batch at a time: see `_in_chunks`. `gather_fn`
    is applied to what the criterion sees of a batch (outputs and labels), such as a constraint of
    where that has to be.
    """
    whole = _at_once if not chunk else _in_chunks

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        (value, (model_state, metrics)), gradients = whole(
            method, state, batch, normalize_fn, gather_fn, key, chunk
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradients), **metrics}
        return TrainState(state.step + 1, params, model_state, opt_state), metrics

    return step


def _at_once(method, state, batch, normalize_fn, gather_fn, key, chunk):
    del chunk
    batch = {**batch, "images": normalize_fn(batch["images"])}

    def loss(params):
        if gather_fn is None:
            return method.loss(params, state.model_state, batch, key=key, step=state.step)
        forward, criterion = method.split_loss
        outputs, model_state = forward(params, state.model_state, batch["images"], key=key)
        seen = gather_fn((outputs, _without_images(batch)))
        return criterion(params, model_state, *seen, key=key, step=state.step)

    return jax.value_and_grad(loss, has_aux=True)(state.params)


def _in_chunks(method, state, batch, normalize_fn, gather_fn, key, chunk):
    """The gradient of the whole batch in the memory of a chunk (Gao et al., 2021, `GradCache`).

    The net runs over the chunks and only its outputs are kept; the criterion sees all of them, and
    says the gradient at the outputs; then each chunk is run again and pulls its part back. Costs a
    second forward pass. Each chunk draws its own dropout, the same in both passes.
    """
    b = len(batch["labels"])
    if b % chunk:
        raise ValueError(f"chunk={chunk} does not divide the batch of {b}: choose a divisor")
    count, split_loss = b // chunk, method.split_loss
    # A chunk is every count-th row: rows that lie together on a device are shared by all chunks,
    # so that each of them occupies every device, and nothing moves between devices.
    images = batch["images"].reshape(chunk, count, *batch["images"].shape[1:])

    def forward(params, i):
        part = jax.lax.dynamic_index_in_dim(images, i, axis=1, keepdims=False)
        own = jax.random.fold_in(key, i)
        return split_loss.forward(params, state.model_state, normalize_fn(part), key=own)[0]

    def criterion(params, outputs):
        seen = outputs, _without_images(batch)
        seen = seen if gather_fn is None else gather_fn(seen)
        return split_loss.criterion(params, state.model_state, *seen, key=key, step=state.step)

    outputs = jax.lax.map(lambda i: forward(state.params, i), jnp.arange(count))
    outputs = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(b, *x.shape[2:]), outputs)
    both = jax.value_and_grad(criterion, argnums=(0, 1), has_aux=True)
    value, (gradients, slopes) = both(state.params, outputs)
    slopes = jax.tree.map(lambda x: x.reshape(chunk, count, *x.shape[1:]).swapaxes(0, 1), slopes)

    def back(total, seen):
        i, slope = seen
        _, pull = jax.vjp(lambda params: forward(params, i), state.params)
        return jax.tree.map(jnp.add, total, *pull(slope)), None

    return value, jax.lax.scan(back, gradients, (jnp.arange(count), slopes))[0]


def _without_images(batch):
    return {k: v for k, v in batch.items() if k != "images"}


_WHOLE = (
    "runtime.{} needs a split loss, which this method does not have: images meet inside "
    "its net, or it draws for all of them together. Take pairs or proxies, or leave {} out"
)


def check_parts(
    method: Method,
    shapes: TrainState,
    images: Any,
    *,
    chunk: int | None,
    sharded: Any = (),
    batch: int,
    devices: int = 1,
) -> None:
    """Raises one line where a step in parts would not be the step of the whole.

    `images` has the shape of a few normalised ones. Computes nothing.
    """
    for name, value in (("chunk", chunk), ("sharded", sharded)):
        if value and method.split_loss is None:
            raise ValueError(_WHOLE.format(name, name))
    if chunk is None:
        return
    if chunk < 1 or batch % chunk or chunk % devices:
        raise ValueError(
            f"runtime.chunk={chunk} must divide the batch of {batch} and be a multiple of the "
            f"{devices} devices"
        )

    def statistics(params, model_state, images):
        forward = method.split_loss.forward
        return forward(params, model_state, images, key=jax.random.key(0))[1]

    args = shapes.params, shapes.model_state, images
    traced = jax.make_jaxpr(statistics)(*args).jaxpr
    # What is left when nothing but the new statistics is wanted: do they look at the images?
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    if used[-1]:
        raise ValueError(
            f"runtime.chunk={chunk}: batch norm takes the statistics of the batch, which chunks "
            "would change. Set net.frozen=True, take a net without batch norm, or leave chunk out"
        )
