"""Distances, safe gradients, pair masks, reductions and the loop over True entries."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dmljax import losses, ops


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def points(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(("p", "power"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_euclidean_equals_its_formula_with_a_finite_gradient(p, power):
    x, y = points(0, 5, 4), points(1, 7, 4)
    y[2] = x[3]
    expected = (np.abs(x[:, None] - y[None]) ** p).sum(-1) ** (power / p)
    with jax.enable_x64(True):
        np.testing.assert_allclose(ops.euclidean(x, y, p=p, power=power), expected, rtol=1e-9)
        gradient = jax.grad(lambda y: ops.euclidean(x, y, p=p, power=power).sum())(y)
        moved = ops.euclidean(x, y + 1e-6 * np.eye(7, 4), p=p, power=power).sum()
        slope = (moved - expected.sum()) / 1e-6
    assert np.isfinite(gradient).all()
    if power == 2:  # smooth at the duplicate too
        assert float(np.trace(gradient[:4])) == pytest.approx(float(slope), rel=1e-3)


@given(
    hnp.arrays(np.float32, (6, 3), elements=st.floats(-100, 100, width=32)),
    st.sampled_from([1.0, 1e-3, 1e-6]),
)
@settings(max_examples=20, deadline=None)
def test_squared_euclidean_is_exact_for_near_pairs(x, spread):
    x[3:] = x[:3] + np.float32(spread) * x[3:] / 100
    wide = x.astype(np.float64)
    expected = ((wide[:, None] - wide[None]) ** 2).sum(-1)
    actual = np.asarray(ops.squared_euclidean(jnp.asarray(x), jnp.asarray(x)))
    scale = (wide**2).sum(-1).max()
    assert (np.abs(actual - expected) <= 1e-4 * expected + 1e-30 * (1 + scale)).all()
    batch = jnp.asarray(x)
    np.testing.assert_allclose(
        ops.squared_euclidean(batch, batch), actual, rtol=1e-4, atol=1e-30 * (1 + scale)
    )


def test_equal_rows_are_at_distance_zero():
    x = np.repeat(points(0, 3, 64).astype(np.float32), 2, axis=0)
    distances = ops.unit_euclidean(x, x.copy())
    assert (np.asarray(distances)[[0, 1, 2, 3], [1, 0, 3, 2]] == 0).all()


def test_cosine_dot_and_snr_equal_their_formulas():
    x, y = points(0, 4, 6), points(1, 3, 6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(ops.cosine(x, y), 1 - unit(x) @ unit(y).T, rtol=1e-9)
        np.testing.assert_allclose(ops.dot(x, y), -x @ y.T, rtol=1e-9)
        expected = (
            np.var(x[:, None] - y[None], axis=-1, ddof=1) / np.var(x, axis=-1, ddof=1)[:, None]
        )
        np.testing.assert_allclose(ops.snr(x, y), expected, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e35])
def test_normalize_neither_under_nor_overflows(scale):
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32) * np.float32(scale)
    actual, pull = jax.vjp(ops.normalize, jnp.asarray(x))
    np.testing.assert_allclose(actual, [[0.6, 0.8], [0, 0]], rtol=1e-6)
    assert np.isfinite(pull(jnp.ones((2, 2)))[0]).all() and not pull(jnp.ones((2, 2)))[0][1].any()


@pytest.mark.parametrize(("fn", "at"), [(ops.sqrt, 0.0), (ops.acos, 1.0), (ops.acos, -1.0)])
def test_gradients_are_0_where_the_slope_is_infinite(fn, at):
    at, half = jnp.asarray(at), jnp.asarray(0.5)
    assert jax.grad(fn)(at) == 0 and np.isfinite(fn(at))
    assert np.isnan(fn(jnp.asarray(np.nan)))
    plain = {ops.sqrt: jnp.sqrt, ops.acos: jnp.arccos}[fn]
    assert jax.grad(fn)(half) == pytest.approx(float(jax.grad(plain)(half)))


def test_logsumexp_counts_only_masked_entries():
    x = jnp.array([[1.0, 2.0, 1e4], [5.0, 5.0, 5.0], [-1e30, -1e30, 0.0]])
    where = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 0]], bool)
    value, gradient = jax.value_and_grad(lambda x: ops.logsumexp(x, where=where).sum())(x)
    np.testing.assert_allclose(
        ops.logsumexp(x, where=where), [np.logaddexp(1, 2), 0, -1e30], rtol=1e-6
    )
    np.testing.assert_allclose(gradient[0], [0.2689414, 0.7310586, 0], rtol=1e-5)
    assert not gradient[1].any() and np.isfinite(value)
    assert np.isnan(ops.logsumexp(x.at[0, 0].set(np.nan), where=where)[0])
    assert ops.logsumexp(x.at[0, 2].set(np.nan), where=where)[0] == pytest.approx(2.3132617)


def test_pairs_are_masks_of_equal_and_different_labels():
    labels, others = np.array([1, 1, 2]), np.array([2, 1])
    within = ops.pairs(labels)
    assert within.positives.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert within.negatives.tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    with_references = ops.pairs(
        labels, others, ids=np.array([7, 8, 9]), reference_ids=np.array([9, 8])
    )
    assert with_references.positives.tolist() == [[0, 1], [0, 0], [0, 0]]
    assert with_references.negatives.tolist() == [[1, 0], [1, 0], [0, 1]]
    masked = ops.pairs(labels, where=np.array([True, False, True]))
    assert masked.positives.sum() == 0 and masked.negatives.tolist() == [
        [0, 0, 1],
        [0, 0, 0],
        [1, 0, 0],
    ]
    narrowed = ops.pairs(labels, others, reference_where=np.array([False, True]))
    assert narrowed.positives.tolist() == [[0, 1], [0, 1], [0, 0]]


def test_multi_hot_rows_are_positives_if_they_share_a_class():
    labels = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]], bool)
    assert ops.pairs(labels).positives.tolist() == [
        [0, 1, 0, 0],
        [1, 0, 1, 0],
        [0, 1, 0, 0],
        [0, 0, 0, 0],
    ]


def test_large_labels_do_not_collide():
    labels = np.array([2**24, 2**24 + 1, 2**31 - 1, -(2**31)])
    assert ops.pairs(labels).positives.sum() == 0


@pytest.mark.parametrize("name", ["labels", "reference_labels", "ids", "reference_ids"])
def test_integers_that_32_bits_would_cut_are_refused(name, unchecked):
    codes = np.arange(4) % 2
    arguments = {"labels": codes, "reference_labels": codes, "ids": codes, "reference_ids": codes}
    wide = {**arguments, name: codes.astype(np.int64) * 2**32}
    with pytest.raises(ValueError, match=f"^{name} reach 4294967296, which int32 cannot hold"):
        ops.pairs(**wide)
    with pytest.raises(ValueError, match=rf"^{name} are <U1: give integers \(np.unique"):
        ops.pairs(**{**arguments, name: codes.astype("U1")})
    with jax.enable_x64(True):
        assert ops.pairs(**wide).positives.shape == (4, 4)


ENTRIES = np.array([[0.0, 1.0, 3.0], [-1.0, 5.0, 2.0]])
COUNTED = np.array([[True, True, True], [True, False, True]])


@pytest.mark.parametrize(
    ("reduce_fn", "expected"),
    [
        (ops.mean, 5 / 5),
        (ops.sum, 5),
        (ops.mean_of_active, 6 / 3),
        (ops.threshold(0.5, 3.0), 3 / 2),
        (ops.threshold(high=2.5), 2 / 4),
        (ops.weighted(np.array([1.0, 10.0])), (4 + 10) / 5),
        (ops.weighted(np.array([1.0, 10.0]), ops.mean_of_active), (4 + 20) / 3),
    ],
)
def test_a_reduction_counts_only_masked_entries_and_shows_nan(reduce_fn, expected):
    assert ops.reduce(reduce_fn, jnp.asarray(ENTRIES), COUNTED) == pytest.approx(expected)
    nothing = np.zeros_like(COUNTED)
    assert ops.reduce(reduce_fn, jnp.asarray(ENTRIES), nothing) == 0
    bad = jnp.asarray(ENTRIES).at[0, 0].set(np.nan)
    assert np.isnan(ops.reduce(reduce_fn, bad, COUNTED))
    hidden = jnp.asarray(ENTRIES).at[1, 1].set(np.nan)
    assert ops.reduce(reduce_fn, hidden, COUNTED) == pytest.approx(expected)


def test_without_reduction_masked_entries_are_zero():
    assert ops.reduce(None, jnp.asarray(ENTRIES), COUNTED).tolist() == [[0, 1, 3], [-1, 0, 2]]


@given(hnp.arrays(bool, st.sampled_from([(1, 1), (5, 3), (2, 6)])))  # a shape is a compilation
@settings(max_examples=25, deadline=None)
def test_sum_over_true_visits_each_entry_once(mask):
    weights = points(0, *mask.shape).astype(np.float32)

    def visit(column, valid, weights):
        rows = jnp.arange(len(column))
        return jnp.where(valid, jnp.sin(weights[rows, column]), 0)

    def total(weights):
        return ops.sum_over_true(visit, mask, weights).sum()

    value, gradient = jax.value_and_grad(total)(weights)
    np.testing.assert_allclose(value, np.sin(weights)[mask].sum(), atol=1e-5)
    np.testing.assert_allclose(gradient, np.where(mask, np.cos(weights), 0), atol=1e-6)


def test_triplets_become_the_pairs_that_they_use():
    rng = np.random.default_rng(0)
    d = rng.random((6, 6))
    pairs = ops.pairs(np.array([0, 0, 0, 1, 1, 2]))
    select = lambda ap, an, pn: (an - ap < 0.1) & (pn > 0.2)  # noqa: E731
    actual = ops.triplets_to_pairs(ops.Triplets(pairs, d, select))
    positives, negatives = np.zeros((2, 6, 6), bool)
    for a, p, n in np.ndindex(6, 6, 6):
        chosen = pairs.positives[a, p] and pairs.negatives[a, n]
        if chosen and d[a, n] - d[a, p] < 0.1 and d[p, n] > 0.2:
            positives[a, p] = negatives[a, n] = True
    assert (actual.positives == positives).all() and (actual.negatives == negatives).all()
    assert ops.triplets_to_pairs(pairs) is pairs


def test_loops_outside_of_jit_are_shared_only_by_functions_that_compute_the_same():
    mask, scale = np.eye(3, dtype=bool), [1.0]
    totals = []
    for scale[0] in (1.0, 2.0):  # what a function of the caller reads may change
        totals.append(ops.sum_over_true(lambda column, valid: scale[0] * valid, mask).tolist())
    assert totals == [[1.0] * 3, [2.0] * 3]
    x, y = np.eye(4, dtype=np.float32) + 0.1, np.array([0, 0, 1, 1])
    for margin in (0.1, 1, 1.0):
        for reduce_fn in (ops.mean, ops.sum):
            loss_fn = functools.partial(losses.triplet, margin=margin, reduce_fn=reduce_fn)
            np.testing.assert_allclose(loss_fn(x, y), jax.jit(loss_fn)(x, y), rtol=1e-6)
