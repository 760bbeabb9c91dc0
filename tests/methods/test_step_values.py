"""Losses and miners that take the step, and values of a config that change from step to step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import losses, miners
from dmljax.config import registry
from dmljax.methods import base
from dmljax.methods.proxies import published_init
from dmljax.train.schedules import ramp

X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
LABELS = np.arange(12) % 4
RAMP = {"name": "ramp", "first": 0.1, "last": 0.5, "at": [100, 200]}
PAIR_LOSSES = sorted(set(losses.pairs.__all__) | set(losses.triplets.__all__))
PROXY_LOSSES = sorted(set(losses.proxies.__all__) - {"label_smoothed_cross_entropy"})
PER_CLASS = {"subcenter_arcface": (4, 2, 5), "soft_triple": (4, 2, 5)}  # several proxies each
WHOLE = {"sphereface", "large_margin_softmax"}  # the margin counts angles, and is a whole number


def at(step, *, slope=1.0):
    """A margin of one's own."""
    return slope * step


def step_in_loss(embeddings, labels, *, step, mine_fn=None):
    return losses.triplet(embeddings, labels, margin=step, mine_fn=mine_fn)


def step_in_miner(distances, pairs, *, step):
    return pairs._replace(negatives=pairs.negatives & (distances < step))


def _value(loss_fn, mine_fn=None, *, step):
    stepped = base.with_miner(loss_fn, mine_fn)
    return jax.jit(lambda step: stepped(X, LABELS, key=jax.random.key(0), step=step))(step)


@pytest.mark.parametrize(("step", "margin"), [(0, 0.1), (150, 0.3), (900, 0.5)])
def test_a_margin_of_a_config_follows_the_step(step, margin):
    loss_fn = registry.resolve("loss", {"name": "triplet", "margin": RAMP})
    expected = losses.triplet(X, LABELS, margin=np.asarray(margin, np.float32))
    np.testing.assert_allclose(_value(loss_fn, step=step), expected, rtol=1e-6)


def own_loss(embeddings, labels, *, margin=0.2):
    return losses.triplet(embeddings, labels, margin=margin)


def own_loss_of_a_float(embeddings, labels, *, margin: float = 0.2, note: str = ""):
    return losses.triplet(embeddings, labels, margin=margin)


@pytest.mark.parametrize("name", ["own_loss", "own_loss_of_a_float"])
@pytest.mark.parametrize("margin", [RAMP, f"{__name__}:at"])
def test_a_loss_of_ones_own_has_schedules_too(name, margin):
    loss_fn = registry.resolve("loss", {"name": f"{__name__}:{name}", "margin": margin})
    value = 0.3 if margin is RAMP else 150.0
    expected = losses.triplet(X, LABELS, margin=np.asarray(value, np.float32))
    np.testing.assert_allclose(_value(loss_fn, step=150), expected, rtol=1e-6)
    text = {"name": f"{__name__}:own_loss_of_a_float", "note": "a:b"}
    value = _value(registry.resolve("loss", text), step=150)
    np.testing.assert_allclose(value, own_loss(X, LABELS), rtol=1e-6)


def test_losses_and_miners_that_take_the_step_get_it():
    expected = losses.triplet(X, LABELS, margin=2.0)
    np.testing.assert_allclose(_value(step_in_loss, step=2.0), expected, rtol=1e-6)
    mined = functools.partial(step_in_miner, step=1.2)
    expected = losses.triplet(X, LABELS, mine_fn=mined)
    np.testing.assert_allclose(_value(losses.triplet, step_in_miner, step=1.2), expected, rtol=1e-6)
    assert expected != losses.triplet(X, LABELS)


def test_a_miner_of_a_config_has_a_schedule_too():
    mine_fn = registry.resolve("miner", {"name": "triplet_margin", "margin": RAMP})
    expected = losses.triplet(
        X,
        LABELS,
        mine_fn=functools.partial(miners.triplet_margin, margin=np.asarray(0.5, np.float32)),
    )
    np.testing.assert_allclose(_value(losses.triplet, mine_fn, step=900), expected)


def test_a_proxy_loss_with_a_schedule_keeps_its_published_initial_values():
    loss_fn = registry.resolve("loss", {"name": "proxy_anchor", "margin": RAMP})
    assert published_init(loss_fn) is published_init(losses.proxy_anchor)
    proxies = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    value = base.with_miner(loss_fn, None)(X, LABELS, proxies, key=None, step=150)
    expected = losses.proxy_anchor(X, LABELS, proxies, margin=np.asarray(0.3, np.float32))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("name", PAIR_LOSSES + PROXY_LOSSES)
def test_every_margin_may_be_an_array(name, unchecked):
    function = getattr(losses, name)
    margins = {"margin": 0.3, "pos_margin": 0.2, "neg_margin": 0.7, "temperature": 0.2}
    margins |= {"alpha": 30.0, "scale": 8.0, "gamma": 8.0, "negative_temperature": 2.0}
    parameters = registry.inspect.signature(function).parameters
    left_out = {"margin"} if name in WHOLE else set()
    margins = {key: margins[key] for key in margins if key in parameters and key not in left_out}
    if not margins:
        return
    x = [X, LABELS]
    if name in PROXY_LOSSES:
        x.append(
            np.random.default_rng(1).normal(size=PER_CLASS.get(name, (4, 5))).astype(np.float32)
        )
    expected = function(*x, **margins)
    arrays = {key: jnp.float32(value) for key, value in margins.items()}
    value = jax.jit(lambda arrays: function(*x, **arrays))(arrays)
    np.testing.assert_allclose(value, expected, rtol=2e-5)


@pytest.mark.parametrize("at", [(5, 5), (5,), (), (1, 2, 3)])
def test_steps_of_a_ramp_that_are_no_two_steps_in_order(at):
    with pytest.raises(ValueError, match="of two steps, the second step must come after the first"):
        ramp(0, first=0.0, last=1.0, at=at)
