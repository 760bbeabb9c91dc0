"""ABE against loops in float64, and its collapse without the divergence."""

import functools
import importlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from abe_cases import CUT, HEADS, B, abe_method, batch_of_patterns, initial_state, naive_contrastive
from one_step import Patches, jit

from dmljax import losses, methods, miners, nets
from dmljax.methods import base
from dmljax.methods.abe import contrastive, divergence
from dmljax.report import inside

ensembles = importlib.import_module("dmljax.methods.abe")


@functools.cache
def _vectors(heads=False):
    """The learners' vectors as the loss sees them, from the ensemble itself."""
    options = {"learners": 3, "features": 12, "net": Patches, "split": CUT["split"]}
    module = ensembles.MultiHead(**options)
    if not heads:
        module = ensembles.ABE(**options, attention=CUT["attention"])
    run = jit(lambda params, x: module.apply({"params": params}, x, train=True))
    return jax.device_get(
        run(initial_state(heads)[0]["net"], batch_of_patterns()["images"])["learners"]
    )


def _losses(method, *, heads=False, seeds=(0,), step=0):
    """The loss and its metrics, for each key."""
    state, batch = initial_state(heads), batch_of_patterns()
    run = jit(lambda key: method.loss(*state, batch, key=key, step=step))
    with mock.patch.object(base, "diagnostics", lambda *_: {}):  # most of the time to compile
        actual = [jax.device_get(run(jax.random.key(seed))) for seed in seeds]
    return [{"value": value, **metrics} for value, (_, metrics) in actual]


@pytest.mark.parametrize("heads", [False, True])
def test_loss_is_the_learners_and_lambda_times_the_divergence(heads):
    x, labels = _vectors(heads), batch_of_patterns()["labels"]
    divergence_fn = {"name": "divergence", "margin": 0.9}
    control = HEADS if heads else {}
    method = abe_method(lambda_div=0.7, divergence_fn=divergence_fn, **control)
    (actual,) = _losses(method, heads=heads)
    metric = sum(naive_contrastive(x[:, m], labels) for m in range(3))
    expected_divergence = float(divergence(x.astype(np.float64), margin=0.9))
    np.testing.assert_allclose(actual["metric"], metric, rtol=1e-4)
    np.testing.assert_allclose(actual["divergence"], expected_divergence, rtol=1e-4)
    np.testing.assert_allclose(actual["value"], metric + 0.7 * expected_divergence, rtol=1e-4)
    cosine = np.mean([np.sum(x[:, p] * x[:, q], axis=1) for p, q in ((0, 1), (0, 2), (1, 2))])
    np.testing.assert_allclose(actual["self_cosine"], cosine, atol=1e-5)


def test_drawn_pairs_are_rows_a_half_apart():
    x, labels = _vectors(), batch_of_patterns()["labels"]
    partner = (np.arange(B) + B // 2) % B
    expected = sum(naive_contrastive(x[:, m], labels, partner=partner) for m in range(3))
    (actual,) = _losses(abe_method(pairs_fn="drawn_pairs"))
    np.testing.assert_allclose(actual["metric"], expected, rtol=1e-4)


def test_learners_take_any_pair_loss_with_any_miner():
    x, labels = _vectors(), batch_of_patterns()["labels"]
    loss_fn = functools.partial(losses.triplet, margin=0.3)
    (actual,) = _losses(abe_method(loss_fn, mine_fn=miners.batch_hard))
    loss_of_learner = jit(lambda x: loss_fn(x, labels, mine_fn=miners.batch_hard))
    expected = sum(loss_of_learner(x[:, m]) for m in range(3))
    np.testing.assert_allclose(actual["metric"], expected, rtol=1e-4)
    drawing = base.RandomMiner(functools.partial(miners.distance_weighted, dim=4))
    a, b, c = _losses(abe_method(loss_fn, mine_fn=drawing), seeds=(0, 0, 1))
    assert a["metric"] == b["metric"] != c["metric"]


def test_embeddings_are_the_parts_side_by_side_and_masks_lie_in_0_to_1():
    method, images = abe_method(), batch_of_patterns()["images"]

    @jit
    def run_all(params, model_state, images):
        functions = method.embed, method.inspect.parts, method.inspect.spatial_masks
        return [function(params, model_state, images) for function in functions]

    embeddings, parts, maps = jax.device_get(run_all(*initial_state(), images))
    assert embeddings.shape == (B, 12) and embeddings.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    assert sorted(parts) == ["learner_0", "learner_1", "learner_2"]
    for m in range(3):
        np.testing.assert_allclose(
            parts[f"learner_{m}"] / 3**0.5, embeddings[:, 4 * m : 4 * m + 4], atol=1e-6
        )
    masks = maps["masks"]
    assert masks.shape == (B, 3, 4, 4, 10) and masks.min() > 0 and masks.max() < 1
    assert abe_method(**HEADS).inspect.spatial_masks is None
    assert abe_method(learners=1).inspect.parts is None


def test_min_max_masks_span_zero_to_one():
    masks = jit(abe_method(mask_fn="min_max").inspect.spatial_masks)(
        *initial_state(), batch_of_patterns()["images"]
    )["masks"]
    masks = jax.device_get(masks)
    np.testing.assert_allclose(masks.min(axis=(2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(masks.max(axis=(2, 3)), 1, atol=1e-6)


@functools.cache
def _trained(lambda_div):
    """(metrics of 120 steps, params, model_state)."""
    method, optimizer = abe_method(lambda_div=lambda_div), optax.adam(1e-2)

    @jit
    def step_fn(params, model_state, opt_state, batch, key):
        def loss(params):
            return method.loss(params, model_state, batch, key=key, step=jnp.zeros((), jnp.int32))

        (_, (model_state, metrics)), slopes = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(slopes, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state, metrics

    params, model_state = initial_state()
    opt_state, actual = optimizer.init(params), []
    with mock.patch.object(base, "diagnostics", lambda *_: {}):
        for i in range(120):
            params, model_state, opt_state, metrics = step_fn(
                params, model_state, opt_state, batch_of_patterns(i), jax.random.key(i)
            )
            actual.append({k: float(v) for k, v in metrics.items()})
    return actual, params, model_state


def test_without_the_divergence_all_learners_become_equal():
    """Table 2 and figure 5 of the paper: both learn the classes, one has a single learner."""
    without, with_divergence = _trained(0.0)[0], _trained(1.0)[0]
    assert without[0]["self_cosine"] == with_divergence[0]["self_cosine"] < 0.9
    assert without[-1]["self_cosine"] > 0.97
    assert with_divergence[-1]["self_cosine"] < 0.5
    last = max(without[-1]["metric"], with_divergence[-1]["metric"])
    assert last < 0.5 * without[0]["metric"]


@pytest.mark.parametrize("lambda_div", [0.0, 1.0])
def test_trained_learners_separate_the_classes(lambda_div):
    batch = batch_of_patterns(50)
    _, params, model_state = _trained(lambda_div)
    parts = jit(abe_method().inspect.parts)(params, model_state, batch["images"])
    cosines = inside.cosines_of_pairs(np.stack(list(parts.values()), axis=1), batch["labels"])
    assert np.mean(cosines["positive"]) > np.mean(cosines["negative"]) + 0.3


def test_a_net_without_stages_and_an_odd_batch_are_refused():
    with pytest.raises(ValueError, match=r"Lecun does not .* take googlenet"):
        methods.abe(nets.lecun(), contrastive, classes=3)
    odd = {k: v[:-1] for k, v in batch_of_patterns().items()}
    method = abe_method(pairs_fn="drawn_pairs")
    with pytest.raises(ValueError, match=r"an even number of rows, not 23"):
        method.loss(*initial_state(), odd, key=jax.random.key(0), step=0)
