"""DVML against loops in float64: its loss terms, its two phases, and what its gradients reach."""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_step import Patches, fill, jit

from dmljax import losses, miners, nets, recipes
from dmljax.config import registry
from dmljax.methods import base

RNG = np.random.default_rng(0)
B, CLASSES, DIM, T = 8, 4, 5, 3
AT = 10  # the step at which phase 2 begins
METHOD_MODULE = sys.modules["dmljax.methods.dvml"]
ENCODER = ("net", "heads")


def _spread(x, labels, *, margin=1.0):
    """A pair loss with a short formula."""
    same = labels[:, None] == labels[None, :]
    squares = jnp.sum((x[:, None, :] - x[None, :, :]) ** 2, axis=2)
    return jnp.mean(jnp.where(same, squares, jax.nn.relu(margin - squares)))


BATCH = {
    "images": RNG.normal(size=(B, 6, 6, 3)).astype(np.float32),
    "labels": np.arange(B, dtype=np.int32) % CLASSES,
}


def _method(loss_fn=_spread, mode="paper", mine_fn=None, **options):
    spec = recipes.dvml(mode=mode)["method"] | {"dim": DIM, "hidden": 7, "phase_at": AT}
    if mode == "paper":
        spec["samples"] = T
    method = registry.resolve("method", spec | options)
    return method(Patches(), loss_fn, classes=CLASSES, mine_fn=mine_fn)


@functools.cache
def _start(mode):
    method = _method(mode=mode)
    params, model_state = fill(jax.eval_shape(method.init, jax.random.key(0), BATCH))
    rng = np.random.default_rng(5)  # away from biases of 0 and scales of 1
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32) / 5, params)
    return params, model_state


def _compiled(*, slopes=True, **options):
    """(step, key=0) -> (loss, metrics, model_state, gradients), compiled once; and its traces."""
    method, traces = _method(**options), []
    params, model_state = _start(options.get("mode", "paper"))

    @jit
    def go(step, key):
        traces.append(step)

        def loss(params):
            return method.loss(params, model_state, BATCH, key=key, step=step)

        if not slopes:
            value, (after, metrics) = loss(params)
            return value, metrics, after, None
        (value, (after, metrics)), actual = jax.value_and_grad(loss, has_aux=True)(params)
        return value, metrics, after, actual

    def call(at, seed=0):
        with mock.patch.object(base, "diagnostics", lambda *_: {}):  # most of the time to compile
            return jax.device_get(go(jnp.asarray(at, jnp.int32), jax.random.key(seed)))

    return call, traces


_compiled = functools.cache(_compiled)
CODE = ("code_1600", "code_1200")
NOISE = np.random.default_rng(3).normal(size=(T, B, DIM)).astype(np.float32)


def _linear(params, x):
    return x @ params["kernel"].astype(np.float64) + params["bias"]


def _normed(params, x):
    normed = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-3)
    return normed * params["scale"] + params["bias"]


def _by_hand(mode, *, second, form):
    """The four terms in float64, with `NOISE`."""
    params, _ = _start(mode)
    run = jit(lambda p, x: Patches().apply({"params": p}, x, train=True)["pooled"])
    f = np.asarray(run(params["net"], BATCH["images"]), np.float64)
    heads, decoder = params["heads"], params["decoder"]
    x = {name: f for name in ("invariant", "mean", "log_variance")}
    if mode in CODE:
        shared = _normed(heads["norm"], f)
        x = {
            "invariant": shared,
            "mean": _normed(heads["norm_mean"], shared),
            "log_variance": _normed(heads["norm_log_variance"], shared),
        }
    z_i, mean, log_variance = (_linear(heads[name], x[name]) for name in x)
    noise = NOISE if mode == "paper" else NOISE[:1]
    z = z_i + mean + (log_variance if mode == "code_1600" else np.exp(log_variance / 2)) * noise
    hidden = _linear(decoder["fc1"], z)
    hidden = np.tanh(hidden) if mode == "paper" else np.maximum(hidden, 0)
    if mode in CODE and second:
        hidden = _normed(decoder["norm"], hidden[0])[None]
    elif mode in CODE:
        norm = decoder["norm"]
        hidden = hidden / np.sqrt(1 + 1e-3) * norm["scale"] + norm["bias"]
    gaps = _linear(decoder["fc2"], hidden) - f
    norms = np.linalg.norm(gaps, axis=2)
    return {
        "kl": np.mean(np.sum(np.exp(log_variance) + mean**2 - log_variance - 1, axis=1)) / 2,
        "reconstruction": norms.mean() if form == "norm" else np.sum(gaps[0] ** 2) / 2,
        "metric_variant": float(_spread(z[0], BATCH["labels"])),
        "metric_invariant": float(_spread(z_i, BATCH["labels"])),
    }, f


@pytest.mark.parametrize("mode", ["paper", "code_1600", "code_1200", "report"])
def test_the_loss_is_the_weighted_sum_of_terms_computed_by_hand(mode):
    """The metrics are the terms, also times the lambdas of their phase; the loss is their sum."""
    form = "half_sum" if mode in CODE else "norm"
    lambdas = ((1.0, 0.5, 0.3, 2.0), (0.7, 0.2, 0.4, 0.8))
    params, _ = _start(mode)

    def noisy(mean, log_variance, *, samples, deviation_fn, key):
        return mean[None] + deviation_fn(log_variance)[None] * NOISE[:samples]

    with mock.patch.object(METHOD_MODULE, "sample_variations", noisy):
        call, _ = _compiled.__wrapped__(slopes=False, mode=mode, lambdas=lambdas)
        actual = {at: call(at)[:2] for at in (AT - 1, AT)}
    for at, weights in zip(actual, lambdas, strict=True):
        value, metrics = actual[at]
        terms, f = _by_hand(mode, second=at >= AT, form=form)
        for name, term in terms.items():
            np.testing.assert_allclose(metrics[name], term, rtol=1e-4, err_msg=name)
        weighted = [w * term for w, term in zip(weights, terms.values(), strict=True)]
        others = 0
        if mode in CODE:
            norms = ("norm", "norm_mean", "norm_log_variance")
            decayed = [params["net"], {k: v for k, v in params["heads"].items() if k not in norms}]
            squares = sum(np.sum(np.square(x, dtype=float)) for x in jax.tree.leaves(decayed))
            np.testing.assert_allclose(metrics["decay"], 5e-3 * squares / 2, rtol=1e-4)
            weighted[3] += weights[3] * metrics["decay"]
        if mode != "paper":
            logits = _linear(params["probe"], f)
            label_logits = logits[np.arange(B), BATCH["labels"]]
            probe = np.mean(np.log(np.sum(np.exp(logits), axis=1)) - label_logits)
            np.testing.assert_allclose(metrics["cross_entropy"], probe, rtol=1e-4)
            others = probe
        for i in range(4):
            np.testing.assert_allclose(metrics[f"weighted/L{i + 1}"], weighted[i], rtol=1e-4)
        np.testing.assert_allclose(value, sum(weighted) + others, rtol=1e-4)


def _reached(slopes):
    """The parts that get a gradient."""
    size = {k: max(np.abs(x).max() for x in jax.tree.leaves(v)) for k, v in slopes.items()}
    return {k for k, v in size.items() if v > 0}


ONLY_L2 = ((0, 1, 0, 0), (0, 1, 0, 0))
EVERYTHING = {*ENCODER, "decoder"}
REACH = {
    "paper": ({}, {"decoder"}, EVERYTHING),
    "always": ({"release": (True, True)}, EVERYTHING, EVERYTHING),
    "frozen decoder": ({"train_decoder": (False, True)}, set(), EVERYTHING),
    "code": ({"mode": "code_1200", "decay": 0.0}, {"decoder", "probe"}, {"decoder", "probe"}),
    "report": ({"mode": "report"}, {"probe"}, {*EVERYTHING, "probe"}),
}


@pytest.mark.parametrize("case", REACH)
def test_the_reconstruction_trains_the_parts_of_its_phase(case):
    options, first, second = REACH[case]
    call, traces = _compiled(lambdas=ONLY_L2, **options)
    assert _reached(call(AT - 1)[3]) == first
    assert _reached(call(AT)[3]) == second
    assert len(traces) == 1  # both phases are one program


@pytest.mark.parametrize("mode", ["paper", "code_1200"])
def test_the_baseline_lacks_only_the_variational_part(mode):
    """With the other three weights at 0, DVML and its baseline are one and the same."""
    lambdas = ((0, 0, 0, 1.0), (0, 0, 0, 0.8))
    full, _ = _compiled(mode=mode, lambdas=lambdas)
    params, model_state = _start(mode)
    method = _method(mode=mode, lambdas=lambdas, variational=False)
    shapes, state_shapes = jax.eval_shape(method.init, jax.random.key(0), BATCH)
    baseline_params = {name: {k: params[name][k] for k in tree} for name, tree in shapes.items()}
    statistics = {
        name: {k: model_state["batch_stats"][name][k] for k in tree}
        for name, tree in state_shapes.get("batch_stats", {}).items()
    }
    assert set(baseline_params) == {"net", "heads", *(["probe"] if mode != "paper" else [])}
    assert set(baseline_params["heads"]) == {"invariant", *(["norm"] if mode in CODE else [])}
    # Decay of the layers that the baseline has not, which is in the other loss.
    extra = sum(
        np.sum(np.square(leaf, dtype=float))
        for name in ("mean", "log_variance")
        for leaf in params["heads"][name].values()
    )
    decay = 5e-3 if mode in CODE else 0.0

    @jit
    def baseline_step(params, step):
        def loss(params):
            state = {"batch_stats": statistics} if statistics else {}
            return method.loss(params, state, BATCH, key=jax.random.key(0), step=step)

        return jax.value_and_grad(loss, has_aux=True)(params)

    for at, weight in ((AT - 1, 1.0), (AT, 0.8)):
        value, metrics, after, slopes = full(at)
        with mock.patch.object(base, "diagnostics", lambda *_: {}):
            (actual, (new_state, new_metrics)), actual_slopes = baseline_step(
                baseline_params, jnp.asarray(at)
            )
        np.testing.assert_allclose(actual, value - weight * decay / 2 * extra, rtol=1e-5)
        left_out = {"kl", "reconstruction", "metric_variant"}
        left_out |= {f"weighted/L{i}" for i in (1, 2, 3)}
        assert set(metrics) - set(new_metrics) == left_out
        for name, tree in actual_slopes.items():
            for k, leaf in tree.items():
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
                    leaf,
                    slopes[name][k],
                )
        if mode in CODE:
            moved = new_state["batch_stats"]["heads"]["norm"]["mean"]
            np.testing.assert_allclose(moved, after["batch_stats"]["heads"]["norm"]["mean"], 1e-5)


def test_features_learn_to_be_reconstructed_only_with_learn_target():
    """In phase 2 the net is reached through z alone, unless `learn_target`."""
    plain, learning = (_compiled(lambdas=ONLY_L2, learn_target=learn)[0] for learn in (False, True))
    np.testing.assert_array_equal(plain(AT - 1)[3]["net"]["one"], 0)
    np.testing.assert_array_equal(learning(AT - 1)[3]["net"]["one"], 0)
    gap = np.abs(plain(AT)[3]["net"]["one"] - learning(AT)[3]["net"]["one"]).max()
    assert gap > 1e-4
    heads = [call(AT)[3]["heads"]["invariant"]["kernel"] for call in (plain, learning)]
    np.testing.assert_allclose(*heads, rtol=1e-4, atol=1e-6)


def test_the_metric_loss_trains_mean_and_variance_through_the_samples():
    """By the metric loss of z alone; without reparameterization only the KL does."""
    only_l3 = ((0, 0, 1, 0), (0, 0, 1, 0))
    for trained in (True, False):
        call, _ = _compiled(lambdas=only_l3, reparameterized=trained)
        heads = call(0)[3]["heads"]
        assert np.any(heads["invariant"]["kernel"])
        for name in ("mean", "log_variance"):
            assert np.any(heads[name]["kernel"]) == trained


def test_the_norm_of_the_decoder_learns_in_phase_2():
    call, _ = _compiled(lambdas=ONLY_L2, mode="code_1200", decay=0.0)
    before = _start("code_1200")[1]["batch_stats"]
    for at, moves in ((AT - 1, False), (AT, True)):
        after = call(at)[2]["batch_stats"]
        assert (
            np.any(after["decoder"]["norm"]["mean"] != before["decoder"]["norm"]["mean"]) == moves
        )
        assert np.any(after["heads"]["norm"]["mean"] != before["heads"]["norm"]["mean"])
    assert sorted(after) == ["decoder", "heads"]


def test_the_noise_depends_on_the_key_and_not_on_the_step():
    call, _ = _compiled(lambdas=ONLY_L2)
    values = [call(at, seed)[0] for at, seed in ((0, 0), (0, 0), (3, 0), (0, 1), (AT, 0))]
    assert values[0] == values[1] == values[2] == values[4] != values[3]


def test_the_metric_loss_is_the_mean_over_its_samples():
    """One, or the mean over several; a random miner gets its own keys."""
    variants = {}
    for n in (1, T):
        shapes = []

        def spy(x, labels, shapes=shapes):
            shapes.append(x.shape)
            return _spread(x, labels)

        call, _ = _compiled.__wrapped__(slopes=False, loss_fn=spy, metric_samples=n)
        variants[n] = call(0)[1]["metric_variant"]
        assert set(shapes) == {(B, DIM)}
    assert variants[1] != variants[T]
    mine_fn = functools.partial(miners.distance_weighted, dim=DIM, nonzero_loss_cutoff=2.0)
    mine_fn = base.RandomMiner(mine_fn)
    drawing = {"loss_fn": functools.partial(losses.triplet, margin=0.5), "mine_fn": mine_fn}
    call, _ = _compiled.__wrapped__(slopes=False, **drawing)
    a, b, c = (call(0, seed)[1]["metric_invariant"] for seed in (0, 0, 1))
    assert a == b != c  # z_I has no noise, so only the miner draws


@pytest.mark.parametrize("mode", ["paper", "code_1200"])
def test_embeddings_are_the_invariant_part(mode):
    method = _method(mode=mode)
    embed = jit(lambda params, state, x: method.embed(params, state, x))
    params, model_state = _start(mode)
    actual = embed(params, model_state, BATCH["images"])
    assert actual.shape == (B, DIM) and actual.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-6)
    noisy = jax.tree.map(lambda x: x + 1, {k: params["heads"][k] for k in ("mean", "log_variance")})
    other = params | {"heads": params["heads"] | noisy}
    np.testing.assert_array_equal(embed(other, model_state, BATCH["images"]), actual)
    # The embedding of an image does not depend on the batch.
    repeated = embed(params, model_state, BATCH["images"][:1].repeat(B, axis=0))
    np.testing.assert_allclose(repeated[0], actual[0], atol=1e-5)


def test_the_pool_sets_the_width_of_the_features():
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    actual = {}
    for pool in (None, "flatten", "learned_gem"):
        spec = {"name": "dvml", "dim": 8, "pool_fn": pool}
        method = registry.resolve("method", spec)(nets.convnet(), _spread, classes=5)
        params, state = jax.eval_shape(method.init, jax.random.key(0), {"images": images})
        assert jax.eval_shape(method.embed, params, state, images).shape == (2, 8)
        width = params["heads"]["invariant"]["kernel"].shape[0]
        actual[pool] = width, len(jax.tree.leaves(params.get("pool")))
    assert list(actual.values()) == [(128, 0), (4 * 4 * 128, 0), (128, 1)]


BAD = {
    "mode": ({"mode": "both"}, "mode is paper, code_1600, code_1200 or report, not 'both'"),
    "release": ({"release": (True,)}, r"release=.* have one value for each phase"),
    "activation": ({"activation_fn": "erf"}, "there is no activation 'erf'.*relu"),
    "form": ({"reconstruction_fn": "sum"}, "no reconstruction 'sum'.*reconstruction_half_sum"),
    "lambdas": ({"lambdas": ((1, 1, 1),)}, "four weights for phase 1 and four for phase 2"),
    "samples": ({"metric_samples": 4}, "metric_samples=4 must be from 1 to samples=3"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_arguments_are_refused_in_one_line(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        _method(**options)
    assert "\n" not in str(caught.value)
