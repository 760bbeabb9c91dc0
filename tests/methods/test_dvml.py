"""DVML against loops in float64: its loss terms, its two phases, and what its gradients reach."""

import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_step import Patches, fill, jit

from dmljax import losses, miners, nets
from dmljax.methods import base
from dmljax.train import named_methods

RNG = np.random.default_rng(0)


B, CLASSES, DIM, T = 8, 4, 5, 3


AT = 10  # where phase 2 begins


METHOD_MODULE = sys.modules["dmljax.methods.dvml.method"]


ENCODER = ("net", "heads")


def _spread(x, labels, *, margin=1.0):
    """A pair loss that any test here can write down."""
    same = labels[:, None] == labels[None, :]
    squares = jnp.sum((x[:, None, :] - x[None, :, :]) ** 2, axis=2)
    return jnp.mean(jnp.where(same, squares, jax.nn.relu(margin - squares)))


BATCH = {
    "images": RNG.normal(size=(B, 6, 6, 3)).astype(np.float32),
    "labels": np.arange(B, dtype=np.int32) % CLASSES,
}


def _method(loss_fn=_spread, **options):
    small = {"dim": DIM, "hidden": 7, "phase_at": AT}
    if options.get("mode", "paper") == "paper":
        small["samples"] = T
    return named_methods.dvml(Patches(), loss_fn, classes=CLASSES, **{**small, **options})


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
    if mode == "seed":
        shared = _normed(heads["norm"], f)
        x = {
            "invariant": shared,
            "mean": _normed(heads["norm_mean"], shared),
            "log_variance": _normed(heads["norm_log_variance"], shared),
        }
    z_i, mean, log_variance = (_linear(heads[name], x[name]) for name in x)
    noise = NOISE if mode == "paper" else NOISE[:1]
    z = z_i + mean + np.exp(log_variance / 2) * noise
    hidden = _linear(decoder["fc1"], z)
    if mode == "paper":
        hidden = np.tanh(hidden)
    else:
        hidden = np.maximum(hidden, 0)
        if second:
            hidden = _normed(decoder["norm"], hidden[0])[None]
        else:
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


@pytest.mark.parametrize("mode", ["paper", "seed"])
def test_terms_and_their_weights(mode):
    """Each by a loop over numpy, unweighted in the log; the lambdas of both phases in the loss."""
    form = "norm" if mode == "paper" else "half_sum"
    lambdas = ((1.0, 0.5, 0.3, 2.0), (0.7, 0.2, 0.4, 0.8))
    params, _ = _start(mode)

    def noisy(mean, log_variance, *, samples, key):
        return mean[None] + jnp.exp(log_variance / 2)[None] * NOISE[:samples]

    with mock.patch.object(METHOD_MODULE, "sample_variations", noisy):
        call, _ = _compiled.__wrapped__(slopes=False, mode=mode, lambdas=lambdas)
        actual = {at: call(at)[:2] for at in (AT - 1, AT)}
    for at, weights in zip(actual, lambdas, strict=True):
        value, metrics = actual[at]
        terms, f = _by_hand(mode, second=at >= AT, form=form)
        for name, term in terms.items():
            np.testing.assert_allclose(metrics[name], term, rtol=1e-4, err_msg=name)
        expected = sum(w * term for w, term in zip(weights, terms.values(), strict=True))
        if mode == "seed":
            norms = ("norm", "norm_mean", "norm_log_variance")
            kept = [params["net"], {k: v for k, v in params["heads"].items() if k not in norms}]
            squares = sum(np.sum(np.square(x, dtype=float)) for x in jax.tree.leaves(kept))
            np.testing.assert_allclose(metrics["decay"], 5e-3 * squares / 2, rtol=1e-4)
            logits = _linear(params["probe"], f)
            label_logits = logits[np.arange(B), BATCH["labels"]]
            probe = np.mean(np.log(np.sum(np.exp(logits), axis=1)) - label_logits)
            np.testing.assert_allclose(metrics["probe"], probe, rtol=1e-4)
            expected += weights[3] * metrics["decay"] + probe
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def _reached(slopes):
    """The parts that get a gradient."""
    size = {k: max(np.abs(x).max() for x in jax.tree.leaves(v)) for k, v in slopes.items()}
    return {k for k, v in size.items() if v > 0}


ONLY_L2 = ((0, 1, 0, 0), (0, 1, 0, 0))


EVERYTHING = {*ENCODER, "decoder"}


REACH = {
    "paper": ({}, {"decoder"}, EVERYTHING),
    "always": ({"release": "always"}, EVERYTHING, EVERYTHING),
    "frozen decoder": ({"frozen_decoder": True}, set(), EVERYTHING),
    "seed": ({"mode": "seed", "decay": 0.0}, {"decoder", "probe"}, {"decoder", "probe"}),
}


@pytest.mark.parametrize("case", REACH)
def test_what_the_reconstruction_moves(case):
    options, first, second = REACH[case]
    call, traces = _compiled(lambdas=ONLY_L2, **options)
    assert _reached(call(AT - 1)[3]) == first
    assert _reached(call(AT)[3]) == second
    assert len(traces) == 1  # both phases are one program


def test_the_target_is_learned_only_if_asked():
    """In phase 2 the net is reached through z alone, unless `learn_target`."""
    plain, asked = (_compiled(lambdas=ONLY_L2, learn_target=learn)[0] for learn in (False, True))
    np.testing.assert_array_equal(plain(AT - 1)[3]["net"]["one"], 0)
    np.testing.assert_array_equal(asked(AT - 1)[3]["net"]["one"], 0)
    gap = np.abs(plain(AT)[3]["net"]["one"] - asked(AT)[3]["net"]["one"]).max()
    assert gap > 1e-4
    heads = [call(AT)[3]["heads"]["invariant"]["kernel"] for call in (plain, asked)]
    np.testing.assert_allclose(*heads, rtol=1e-4, atol=1e-6)


def test_samples_move_mean_and_variance():
    """By the metric loss of z alone; without reparameterization only the KL does."""
    only_l3 = ((0, 0, 1, 0), (0, 0, 1, 0))
    for trained in (True, False):
        call, _ = _compiled(lambdas=only_l3, reparameterized=trained)
        heads = call(0)[3]["heads"]
        assert np.any(heads["invariant"]["kernel"])
        for name in ("mean", "log_variance"):
            assert np.any(heads[name]["kernel"]) == trained


def test_the_norm_of_the_decoder_learns_in_phase_2():
    call, _ = _compiled(lambdas=ONLY_L2, mode="seed", decay=0.0)
    before = _start("seed")[1]["batch_stats"]
    for at, moves in ((AT - 1, False), (AT, True)):
        after = call(at)[2]["batch_stats"]
        assert (
            np.any(after["decoder"]["norm"]["mean"] != before["decoder"]["norm"]["mean"]) == moves
        )
        assert np.any(after["heads"]["norm"]["mean"] != before["heads"]["norm"]["mean"])
    assert sorted(after) == ["decoder", "heads"]


def test_keys_and_steps():
    """Noise is of the key alone; the step chooses the phase and nothing else."""
    call, _ = _compiled(lambdas=ONLY_L2)
    values = [call(at, seed)[0] for at, seed in ((0, 0), (0, 0), (3, 0), (0, 1), (AT, 0))]
    assert values[0] == values[1] == values[2] == values[4] != values[3]


def test_samples_of_the_metric_loss():
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


@pytest.mark.parametrize("mode", ["paper", "seed"])
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
    one = embed(params, model_state, BATCH["images"][:1].repeat(B, axis=0))  # not of the batch
    np.testing.assert_allclose(one[0], actual[0], atol=1e-5)


def test_a_pool_says_what_the_features_are():
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    actual = {}
    for pool in ("mean", "flatten", "gem"):
        method = named_methods.dvml(nets.convnet(), _spread, classes=5, dim=8, pool=pool)
        params, state = jax.eval_shape(method.init, jax.random.key(0), {"images": images})
        assert jax.eval_shape(method.embed, params, state, images).shape == (2, 8)
        width = params["heads"]["invariant"]["kernel"].shape[0]
        actual[pool] = width, len(jax.tree.leaves(params.get("pool")))
    assert actual == {"mean": (128, 0), "flatten": (4 * 4 * 128, 0), "gem": (128, 1)}


HEADS = {"paper": 3 * (1024 * 512 + 512), "seed": 3 * (1024 * 128 + 128) + 3 * 2 * 1024}


DECODER = {
    "paper": 512 * 512 + 512 + 512 * 1024 + 1024,
    "seed": 128 * 512 + 512 + 2 * 512 + 512 * 1024 + 1024,
}


@pytest.mark.parametrize("mode", ["paper", "seed"])
def test_published_sizes(mode):
    method = named_methods.dvml(nets.googlenet(), _spread, classes=98, mode=mode)
    batch = {"images": jax.ShapeDtypeStruct((2, 227, 227, 3), jnp.float32)}
    params, _ = jax.eval_shape(method.init, jax.random.key(0), batch)
    count = {k: sum(x.size for x in jax.tree.leaves(v)) for k, v in params.items()}
    expected = {"net": 5_973_552, "heads": HEADS[mode], "decoder": DECODER[mode]}
    assert count == expected | ({"probe": 1024 * 98 + 98} if mode == "seed" else {})


BAD = {
    "mode": ({"mode": "both"}, "there is no mode 'both'. It has: paper, seed"),
    "release": ({"release": "first"}, "there is no release 'first'. It has: always, never, second"),
    "activation": ({"activation": "elu"}, "there is no activation 'elu'.*relu, tanh"),
    "form": ({"form": "sum"}, "there is no form 'sum'.* It has: half_sum, mean_square, norm"),
    "norms": ({"norms": "both"}, "there is no norms 'both'.*nested, none, shared"),
    "lambdas": ({"lambdas": ((1, 1, 1),)}, "four weights for phase 1 and four for phase 2"),
    "samples": ({"metric_samples": 4}, "metric_samples=4 must be from 1 to samples=3"),
}


@pytest.mark.parametrize("case", BAD)
def test_says_what_and_how(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        _method(**options)
    assert "\n" not in str(caught.value)
