"""Pair and triplet losses against plain loops (`naive.py`), and properties of single losses."""

import functools
import inspect

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest

from dmljax import losses, ops

EXTRA = {"ranked_list": {"margin": 0.4, "negative_temperature": 3.0}}
CASES = [(name, EXTRA.get(name, {})) for name in losses.pairs.__all__ + losses.triplets.__all__]
CASES += [
    ("triplet", {"margin": 0.5}),
    ("swap_triplet", {"margin": 0.5}),
    ("smooth_triplet", {"margin": 0.0}),
    ("contrastive", {"pos_margin": 0.4, "neg_margin": 1.3, "power": 2}),
    ("contrastive", {"pos_weight": 0.3, "neg_weight": 1.7}),
    ("margin", {"beta": 1.0, "margin": 0.4}),
    ("ntxent", {"temperature": 0.5}),
    ("circle", {"margin": 0.25, "gamma": 8.0}),
    ("semihard_triplet", {"margin": 5.0}),
    ("angular", {"alpha": 30.0}),
    ("generalized_lifted_structure", {"neg_margin": 1.4, "pos_margin": 0.3}),
    ("intra_pair_variance", {"pos_eps": 0.3, "neg_eps": 0.1}),
    ("lifted_structure", {"neg_margin": 1.4, "pos_margin": 0.3}),
    ("multi_similarity", {"alpha": 3.0, "beta": 10.0, "base": 0.3}),
    ("n_pairs", {"l2_weight": 0.3}),
    ("nca", {"scale": 3.0}),
    ("ranked_list", {"margin": 0.3, "negative_temperature": 2.0, "alpha": 1.3, "imbalance": 0.3}),
    ("ranked_list", {"margin": 0.6, "negative_temperature": 0.0, "positive_temperature": 1.5}),
    ("snr_contrastive", {"pos_margin": 0.8, "neg_margin": 2.5}),
    ("supcon", {"temperature": 0.5}),
    (
        "threshold_consistent_margin",
        {"pos_weight": 0.3, "neg_weight": 1.7, "pos_margin": 0.7, "neg_margin": 0.1},
    ),
    ("tuplet_margin", {"margin": 20.0, "scale": 8.0}),
]


def test_every_option_has_a_case():
    for name in {name for name, _ in CASES}:
        parameters = inspect.signature(getattr(losses, name)).parameters.values()
        options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        options -= {"references", "reference_labels", "where", "tile"}
        options = {option for option in options if not option.endswith("_fn")}
        assert options == {option for n, keywords in CASES if n == name for option in keywords}


def reference_value(name, x, y, positives, negatives, within_batch, labels, **keywords):
    s, d = naive.measures(x, y)
    P, N = ([list(np.flatnonzero(row)) for row in mask] for mask in (positives, negatives))
    between = naive.measures(y, y)[1]
    return getattr(naive, name)(
        s, d, P, N, x=x, y=y, within_batch=within_batch, labels=labels, between=between, **keywords
    )


def batch(seed, b=11, d=4, classes=4):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(b, d)), rng.integers(0, classes, b)


@pytest.mark.parametrize(("name", "keywords"), CASES, ids=lambda v: str(v))
def test_a_loss_equals_the_loop_within_a_batch_and_with_references(name, keywords):
    (x, labels), (y, reference_labels) = batch(2), batch(3, b=7, classes=5)
    same = labels[:, None] == labels[None, :]
    pairs = same & ~np.eye(len(x), dtype=bool), ~same
    positives = labels[:, None] == reference_labels[None, :]
    expected = [
        reference_value(name, x, x, *pairs, True, labels, **keywords),
        reference_value(name, x, y, positives, ~positives, False, labels, **keywords),
    ]
    loss = functools.partial(getattr(losses, name), **keywords)

    @jax.jit
    def within_and_against(x, y):
        against = {"references": y, "reference_labels": reference_labels}
        return loss(x, labels), loss(x, labels, **against)

    with jax.enable_x64(True):
        np.testing.assert_allclose(within_and_against(x, y), expected, rtol=1e-9, atol=1e-12)


def test_margin_learns_beta_per_class():
    x, labels = batch(4)
    beta = np.linspace(0.9, 1.4, 4)
    same = labels[:, None] == labels[None, :]
    _, d = naive.measures(x, x)
    terms = [
        term
        for i, p in zip(*np.nonzero(same & ~np.eye(len(x), dtype=bool)), strict=True)
        for n in np.flatnonzero(~same[i])
        for term in (d[i, p] - beta[labels[i]] + 0.2, beta[labels[i]] - d[i, n] + 0.2)
    ]
    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(lambda b: losses.margin(x, labels, beta=b))(beta)
        moved = losses.margin(x, labels, beta=beta + 1e-6 * np.eye(4)[2])
    assert value == pytest.approx(np.mean([t for t in terms if t > 0]), rel=1e-9)
    assert slope[2] == pytest.approx(float(moved - value) / 1e-6, rel=1e-4)


def test_margin_refuses_a_label_without_a_beta(unchecked):
    x, labels = batch(4)
    beta = np.linspace(0.9, 1.4, 4, dtype=np.float32)
    jitted = jax.jit(lambda labels: losses.margin(x, labels, beta=beta))
    assert jitted(labels) == pytest.approx(float(losses.margin(x, labels, beta=beta)), rel=1e-5)
    for bad in (4, -1):
        labels[[2, 4]] = bad
        with pytest.raises(ValueError, match=f"label {bad} in row 2 is none of the 4 classes"):
            losses.margin(x, labels, beta=beta)
        assert np.isnan(jitted(labels))
        where = labels != bad
        without_row = losses.margin(x[where], labels[where], beta=beta)
        masked = losses.margin(x, labels, beta=beta, where=where)
        np.testing.assert_allclose(masked, without_row, rtol=1e-5)
    of_all = losses.margin(x, labels, beta=beta[:1])  # one element needs no classes
    np.testing.assert_allclose(of_all, losses.margin(x, labels, beta=float(beta[0])), rtol=1e-6)
    with pytest.raises(ValueError, match=r"one per class \[c\] .*, not \[4, 1\]"):
        losses.margin(x, labels, beta=beta[:, None])


@pytest.mark.parametrize("spread", [1e-3, 1e-4])
@pytest.mark.parametrize("name", ["contrastive", "triplet"])
def test_gradients_of_close_pairs_are_exact_in_float32(name, spread):
    """A product form of the distance is 7 % off at 1e-3 and 73 % at 1e-4; differences are not."""
    rng = np.random.default_rng(0)
    x = np.repeat(naive.unit(rng.normal(size=(16, 64))), 4, axis=0)
    x = naive.unit(x + spread * rng.normal(size=x.shape) / 8).astype(np.float32)
    labels = np.repeat(np.arange(16), 4)
    loss = functools.partial(getattr(losses, name), reduce_fn=ops.sum)
    if name == "triplet":
        loss = functools.partial(loss, margin=2.0)  # every triplet pulls
    actual = jax.grad(loss)(jnp.asarray(x), labels)
    with jax.enable_x64(True):
        expected = jax.grad(loss)(jnp.asarray(x, jnp.float64), labels)
        expected = np.asarray(expected)
    assert np.linalg.norm(actual - expected) / np.linalg.norm(expected) < 1e-3


def test_n_pairs_on_dot_products_is_the_formula_of_the_paper():
    x, labels = batch(5)
    first = {label: np.flatnonzero(labels == label)[:2] for label in set(labels)}
    rows = np.array([pair for pair in first.values() if len(pair) == 2])
    logits = x[rows[:, 0]] @ x[rows[:, 1]].T
    expected = np.mean(np.logaddexp.reduce(logits, axis=1) - np.diag(logits))
    expected += 0.003 / 4 * ((x[rows] ** 2).sum(-1).mean(0)).sum()
    with jax.enable_x64(True):
        actual = losses.n_pairs(x, labels, distance_fn=ops.dot, l2_weight=0.003)
    assert actual == pytest.approx(expected, rel=1e-9)


def test_n_pairs_takes_the_first_row_of_a_class_that_a_miner_leaves_a_positive():
    x, labels = batch(5)
    same, rows = labels[:, None] == labels[None, :], np.arange(len(x))
    mined = ops.Pairs(same & (rows[:, None] != rows) & (rows[:, None] > 2), ~same)
    expected = reference_value("n_pairs", x, x, *mined, True, labels)
    with jax.enable_x64(True):
        actual = losses.n_pairs(x, labels, mine_fn=lambda distances, pairs: mined)
    assert actual == pytest.approx(expected, rel=1e-9)


def test_ntxent_keeps_its_gradient_when_far_off():
    """The peer adds 1e-38 inside the log: it stops at 87.3, and so does learning."""
    x = np.array([[1.0, 0.0], [-0.8, 0.6], [1.0, 0.01]], np.float32)
    loss = functools.partial(losses.ntxent, labels=np.array([0, 0, 1]), temperature=0.005)
    value, gradient = jax.value_and_grad(loss)(x)
    assert value > 150 and np.abs(gradient).max() > 10


def test_nca_keeps_far_anchors():
    """The peer drops anchors whose softmax underflows: the very ones that need a gradient."""
    x = np.array([[1.0, 0.0], [-0.8, 0.6], [1.0, 0.01]], np.float32)
    value, gradient = jax.value_and_grad(lambda x: losses.nca(x, np.array([0, 0, 1]), scale=60.0))(
        x
    )
    assert value > 100 and np.abs(gradient).max() > 10


def test_ranked_list_pushes_duplicates_apart():
    """The peer gives a negative at distance 0 the weight 0: its hardest negatives go unseen."""
    x, labels = np.repeat(np.eye(2, 4), 2, axis=0), np.arange(4)
    assert losses.ranked_list(x, labels, margin=0.4, negative_temperature=1.0) > 0.5
