"""The gradient of a batch in chunks is that of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train.pixels import (
    EXACT,
    SIDE,
    C,
    Pixels,
    as_float64,
    batch_of,
    distance,
    first_state,
    jit,
    refusal,
    run_on,
    scaled,
)

from dmljax import losses, methods, miners, nets
from dmljax.nets import layers
from dmljax.train.step import check_chunks, init_state, train_step

IN_CHUNKS = {
    "mined": (methods.pairs, losses.triplet, {"mine_fn": miners.batch_hard}),
    "memory": (methods.pairs, losses.multi_similarity, {"memory": 32, "normalized": False}),
    "proxies": (methods.proxies, losses.proxy_anchor, {}),
    "centers": (methods.proxies, losses.soft_triple, {"centers": 2, "sparsity": 0.2}),
}


@pytest.mark.parametrize("name", IN_CHUNKS)
def test_gradient_in_chunks_is_that_of_the_batch(name, without_diagnostics):
    factory, loss_fn, options = IN_CHUNKS[name]
    method = factory(Pixels(), loss_fn, classes=C, dim=5, **options)
    optimizer = optax.trace(0.0)  # whose state is the gradient
    state, batch = as_float64(first_state(method, optimizer)), batch_of(16)
    results = []
    for chunk, devices in ((None, 1), (4, 1), (7, 3)):
        step = train_step(method, optimizer, normalize_fn=scaled, seed=0, chunk=chunk)
        with jax.enable_x64(True):
            results.append(run_on(devices, step, state, batch))
    (direct, metrics), *others = results
    assert metrics["gradient_norm"] > 1e-3
    for after, chunk_metrics in others:
        assert distance(after.opt_state, direct.opt_state) < EXACT
        np.testing.assert_allclose(chunk_metrics["loss"], metrics["loss"], rtol=EXACT)
        if name == "memory":
            assert distance(after.model_state["memory"], direct.model_state["memory"]) < EXACT
            assert int(after.model_state["memory"].filled) == 16


@pytest.mark.parametrize("chunk", [None, 3])
def test_every_step_and_every_chunk_draws_anew(chunk):
    """A chunk draws the same in both passes: otherwise the gradient is not that of the loss."""

    def forward(params, model_state, images, *, key):
        draws = jax.random.uniform(key, (len(images),))
        return {"embeddings": params["w"] * draws}, model_state

    def criterion(params, model_state, outputs, batch, *, key, step):
        draws = outputs["embeddings"]
        return draws.sum(), (model_state, {"draws": draws})

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = forward(params, model_state, batch["images"], key=key)
        return criterion(params, model_state, outputs, batch, key=key, step=step)

    method = methods.base.Method(None, loss, None, methods.base.SplitLoss(forward, criterion))
    optimizer, batch = optax.sgd(0.0), batch_of(8)  # `w` stays 1
    step = jit(train_step(method, optimizer, normalize_fn=scaled, seed=0, chunk=chunk))
    state, draws = init_state({"w": jnp.ones(())}, {}, optimizer), []
    for _ in range(2):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["gradient_norm"], metrics["loss"], rtol=1e-6)
        draws += metrics["draws"].tolist()
    assert len(set(draws)) == 16


def test_a_large_batch_takes_the_memory_of_a_chunk():
    b, chunk = 2048, 64
    net = Pixels(widths=(64, 64))
    method = methods.proxies(net, losses.proxy_anchor, classes=C, dim=5)
    optimizer = optax.trace(0.0)
    state = first_state(method, optimizer)

    def memory(b, chunk):
        step = train_step(method, optimizer, normalize_fn=scaled, seed=0, chunk=chunk)
        compiled = jit(step).lower(state, batch_of(b)).compile()
        return compiled, compiled.memory_analysis().temp_size_in_bytes

    direct, direct_bytes = memory(b, None)
    chunked, chunked_bytes = memory(b, chunk)
    # Beside a chunk, the outputs of all images, the arrays of the loss, and pairs of 1,024 rows for
    # the log need memory. None of it grows with the net.
    chunk_bytes, fixed_bytes = direct_bytes * chunk // b, 4 * (b * 64 + 8 * 1024**2)
    print(f"at once {direct_bytes:,}, a chunk {chunk_bytes:,}, in chunks {chunked_bytes:,} bytes")
    assert chunked_bytes < 2 * chunk_bytes + fixed_bytes and chunked_bytes < direct_bytes / 7
    batch = batch_of(b)
    (expected, _), (actual, _) = direct(state, batch), chunked(state, batch)
    assert distance(actual.opt_state, expected.opt_state) < 1e-6


def test_chunks_are_refused_where_they_would_change_the_gradient(tmp_path):
    fields = {"chunk": 4, "runtime": {"devices": 1}}
    assert "batch norm" in refusal(tmp_path, **fields)
    dvml = {"name": "dvml", "dim": 4, "samples": 2}
    assert "split loss" in refusal(tmp_path, method=dvml, **fields)
    assert "chunk must be at least 1" in refusal(tmp_path, chunk=0, runtime={"devices": 1})


NORMS = {True: layers.frozen_batch_norm, False: layers.batch_norm}


@pytest.mark.parametrize("frozen, remat", [(True, False), (True, True), (False, True)])
def test_chunks_are_allowed_with_a_frozen_norm_only(frozen, remat):
    net = nets.convnet(widths=(4,), strides=(2,), norm=NORMS[frozen], remat=remat)
    method = methods.pairs(net, losses.triplet, classes=C, dim=5)
    images = jax.ShapeDtypeStruct((2, SIDE, SIDE, 3), jnp.float32)
    batch = {"images": images, "labels": jax.ShapeDtypeStruct((2,), jnp.int32)}
    shapes = init_state(*jax.eval_shape(method.init, jax.random.key(0), batch), optax.identity())
    if frozen:
        check_chunks(method, shapes, images, chunk=4)
    else:
        with pytest.raises(ValueError, match="norm=frozen_batch_norm"):
            check_chunks(method, shapes, images, chunk=4)
