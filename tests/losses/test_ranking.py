"""Ranking losses against double loops and pytorch-metric-learning (the peer)."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_ranking import LOSSES, each_kind, each_loss, naive, run_padded
from numeric import assert_near, gradient

from dmljax import losses, miners
from dmljax.losses import ranking

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "ranking.npz")


CASES = sorted(name.removesuffix(".values") for name in GOLDEN.files if name.endswith(".values"))


def test_every_loss_is_tested():
    assert {name.partition(":")[0] for name in LOSSES} == set(ranking.__all__)


@each_loss
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 9),
    labels=st.lists(st.sampled_from([-7, 0, 3, 2**31 - 1]), min_size=7, max_size=7),
    where=st.lists(st.booleans(), min_size=7, max_size=7),
    twin=st.booleans(),
    zero=st.booleans(),
)
def test_a_masked_batch_equals_the_loop_over_the_rows_that_count(
    name, seed, labels, where, twin, zero
):
    x, labels, where = np.random.default_rng(seed).normal(size=(7, 3)), np.array(labels), where
    x[4:6] = x[3] if twin else x[4:6]
    x[2] = 0 if zero else x[2]
    counting = np.flatnonzero(where)
    x[~np.array(where)] = np.nan  # a row that does not count may hold anything
    value, gradient = run_padded(name, x, labels, where, in_float64=True)
    np.testing.assert_allclose(
        value, naive(name, x[counting], labels[counting]), rtol=1e-9, atol=1e-9
    )
    assert np.isfinite(gradient).all()


@each_loss
def test_gradient_is_that_of_the_loop(name):
    x = np.random.default_rng(1).normal(size=(9, 4))
    labels = np.array([0, 2, 1, 0, 5, 2, 0, 0, 1])
    _, actual = run_padded(name, x, labels, in_float64=True)
    expected = gradient(lambda x: naive(name, x, labels), x)
    assert_near(actual, expected, 1e-6)
    assert np.abs(expected).max() > 1e-3


@each_kind
def test_a_loss_with_references_equals_the_loop(name):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(5, 4)), rng.normal(size=(8, 4))
    labels, others = np.array([0, 1, 2, 0, 9]), np.array([0, 0, 1, 1, 1, 2, 2, 3])
    with jax.enable_x64(True):
        value = jax.jit(LOSSES[name])(x, labels, references=y, reference_labels=others)
    np.testing.assert_allclose(value, naive(name, x, labels, y, others), rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_peer(case):
    # Padded to one shape with rows that do not count, because compiling takes longest.
    embeddings, b = GOLDEN[f"{case}.embeddings"], len(GOLDEN[f"{case}.labels"])
    x, labels, where = np.full((16, 6), np.nan), np.zeros(16, np.int32), np.arange(16) < b
    x[:b], labels[:b] = embeddings, GOLDEN[f"{case}.labels"]
    compared = 0
    for i, name in enumerate(GOLDEN["losses"]):
        expected, slope = GOLDEN[f"{case}.values"][i], GOLDEN[f"{case}.gradients"][i]
        # The peer's angular miner finds an angle between three points that are one.
        if np.isnan(expected) or (case == "duplicates" and name == "triplet+angular"):
            continue
        compared += 1
        with jax.enable_x64(True):
            value, gradient = _as_peer(str(name))(x, labels, where=where)
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9, err_msg=name)
        atol = 1e-5 * np.abs(slope).max() + 1e-9
        np.testing.assert_allclose(gradient[:b], slope, rtol=0, atol=atol, err_msg=name)
    assert compared >= 12


def test_wrong_arguments_are_named():
    x, labels = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
    for name in ("fast_ap", "histogram"):
        with pytest.raises(ValueError, match="num_bins must be at least 1, not 0"):
            getattr(losses, name)(x, labels, num_bins=0)
    for ks in ((), (0, 1)):
        with pytest.raises(ValueError, match="ks must be one or more numbers from 1"):
            losses.recall_at_k(x, labels, ks=ks)


@functools.cache
def _as_peer(name):
    """A loss of the peer's, by its name in the file: loss:argument+miner."""
    loss, _, mined = name.partition("+")
    loss, _, argument = loss.partition(":")
    if loss == "pnp":
        if argument == "warm":
            penalty_fn = functools.partial(losses.pnp_penalties.dq, alpha=2)
            keywords = {"temperature": 0.2, "penalty_fn": penalty_fn}
        else:
            keywords = {"penalty_fn": getattr(losses.pnp_penalties, argument.lower())}
    elif loss == "smooth_ap":
        keywords = {"temperature": float(argument or 0.01)}
    else:
        keywords = {"num_bins": int(argument)} if argument else {}
    mine_fns = {
        "all": miners.triplet_margin,
        "semihard": miners.semihard_triplets,
        "angular": miners.angular,
        "multi_similarity": miners.multi_similarity,
        "pair_margin": miners.pair_margin,
    }
    if mined:
        keywords["mine_fn"] = mine_fns[mined]
    return jax.jit(jax.value_and_grad(functools.partial(getattr(losses, loss), **keywords)))
