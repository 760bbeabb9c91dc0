"""One pure train step, the same for every method."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval

from dmljax import adapt
from dmljax.methods.base import Method, with_params
from dmljax.train.devices import with_rows

__all__ = ["TrainState", "check_chunks", "init_state", "train_step"]


class TrainState(NamedTuple):
    """Everything that training changes, as arrays."""

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any


def init_state(
    params: Any, model_state: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params))


def train_step(
    method: Method,
    optimizer: optax.GradientTransformation,
    *,
    normalize_fn: Callable,
    seed: int,
    batch_size: int | None = None,
    chunk: int | None = None,
    gather_fn: Callable | None = None,
    params_fn: Callable = lambda params: params,
    frozen: Collection[str] = (),
) -> Callable[[TrainState, dict], tuple[TrainState, dict]]:
    """Returns `step(state, batch) -> (state, metrics)`, for `jax.jit` with the state donated.

    * `normalize_fn(images uint8) -> images` runs on the device.
    * `batch_size`: rows of the batch after these are padding (`devices`), and are cut off.
    * `chunk`: the net sees this many images of the batch at a time; the loss sees all of them.
    * `gather_fn(tree)` is applied to what the criterion of a split loss receives, outputs and
      labels. It can set their sharding.
    * `params_fn(params)` are the parameters that the method gets.
    * `frozen`: the paths of parameters that do not learn. Nothing is differentiated with respect to
      them, so the backward pass ends at the first layer that learns.
    """

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        images = batch["images"]
        batch = {name: with_rows(rows, batch_size) for name, rows in batch.items()}
        learned, fixed = adapt.split(state.params, frozen)
        of_learned = with_params(method, lambda learned: params_fn(adapt.joined(learned, fixed)))
        common = (of_learned, state._replace(params=learned), batch, normalize_fn, gather_fn, key)
        (value, (model_state, metrics)), gradients = (
            _in_chunks(*common, images, chunk) if chunk else _at_once(*common)
        )
        updates, opt_state = optimizer.update(gradients, state.opt_state, learned)
        params = adapt.joined(optax.apply_updates(learned, updates), fixed)
        metrics = {"loss": value, "gradient_norm": optax.tree.norm(gradients), **metrics}
        return TrainState(state.step + 1, params, model_state, opt_state), metrics

    return step


def _at_once(method, state, batch, normalize_fn, gather_fn, key):
    batch = {**batch, "images": normalize_fn(batch["images"])}

    def loss(params):
        if gather_fn is None:
            return method.loss(params, state.model_state, batch, key=key, step=state.step)
        forward, criterion = method.split_loss
        outputs, model_state = forward(params, state.model_state, batch["images"], key=key)
        outputs, labels = gather_fn((outputs, _without_images(batch)))
        return criterion(params, model_state, outputs, labels, key=key, step=state.step)

    return jax.value_and_grad(loss, has_aux=True)(state.params)


def _in_chunks(method, state, batch, normalize_fn, gather_fn, key, padded_images, chunk):
    """Computes the gradient of a batch in the memory of a chunk (Gao et al., 2021, `GradCache`).

    First the net runs over the chunks, and only its outputs are kept. The criterion sees all
    outputs and gives the gradient with respect to them. Then each chunk runs again and
    back-propagates its rows of that gradient. So there is a second forward pass. Each chunk draws
    its own dropout, the same in both passes.

    If `chunk` does not divide the batch, the last chunks are filled up with black images. Their
    outputs are cut off, so that they have no gradient.
    """
    b = len(batch["labels"])
    chunk = min(chunk, b)
    count = -(-b // chunk)
    # A chunk takes every count-th row. A device holds neighboring rows, so every chunk has rows on
    # every device, and no row moves to another device.
    width = max(chunk, -(-len(padded_images) // count))
    images = with_rows(padded_images, width * count)
    images = images.reshape(width, count, *images.shape[1:])

    def forward(params, i):
        chunk_images = jax.lax.dynamic_index_in_dim(images, i, axis=1, keepdims=False)
        chunk_images = with_rows(chunk_images, chunk)
        chunk_key = jax.random.fold_in(key, i)
        return method.split_loss.forward(
            params, state.model_state, normalize_fn(chunk_images), key=chunk_key
        )[0]

    def criterion(params, outputs):
        visible = outputs, _without_images(batch)
        outputs, labels = visible if gather_fn is None else gather_fn(visible)
        return method.split_loss.criterion(
            params, state.model_state, outputs, labels, key=key, step=state.step
        )

    outputs = jax.lax.map(lambda i: forward(state.params, i), jnp.arange(count))
    outputs = jax.tree.map(lambda x: with_rows(_joined(x), b), outputs)
    criterion_gradient = jax.value_and_grad(criterion, argnums=(0, 1), has_aux=True)
    value, (gradients, output_gradients) = criterion_gradient(state.params, outputs)
    output_gradients = jax.tree.map(lambda x: _split(x, chunk, count), output_gradients)

    def add_chunk(total, chunk_and_gradient):
        i, output_gradient = chunk_and_gradient
        _, pull_back = jax.vjp(lambda params: forward(params, i), state.params)
        return jax.tree.map(jnp.add, total, *pull_back(output_gradient)), None

    return value, jax.lax.scan(add_chunk, gradients, (jnp.arange(count), output_gradients))[0]


def _split(rows, chunk, count):
    """Returns `[chunks rows ...]`, where chunk i has every count-th row from row i on."""
    rows = with_rows(rows, chunk * count)
    return rows.reshape(chunk, count, *rows.shape[1:]).swapaxes(0, 1)


def _joined(chunks):
    """Returns the rows of `_split` in their order."""
    rows = chunks.swapaxes(0, 1)
    return rows.reshape(-1, *rows.shape[2:])


def _without_images(batch):
    return {k: v for k, v in batch.items() if k != "images"}


def check_chunks(
    method: Method,
    shapes: TrainState,
    images: Any,
    *,
    chunk: int | None,
) -> None:
    """Raises a one-line error if `chunk` would change the gradient.

    `images` has the shape of a few normalized images.
    """
    if chunk is None:
        return
    if method.split_loss is None:
        raise ValueError(
            "chunk needs a method with a split loss, which this one has not: in its net, images "
            "depend on each other. Take pairs or proxies, or leave chunk out"
        )

    def statistics(params, model_state, images):
        key = jax.random.key(0)
        return method.split_loss.forward(params, model_state, images, key=key)[1]

    traced = jax.make_jaxpr(statistics)(shapes.params, shapes.model_state, images).jaxpr
    # Keep only the equations that produce the new statistics; fail if they read the images.
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    if used[-1]:
        raise ValueError(
            f"chunk={chunk}: batch norm takes the statistics of the batch, which chunks would "
            "change. Set net.norm=frozen_batch_norm, take a net without batch norm, or leave "
            "chunk out"
        )
