"""Sums of losses, and statistics against a triple loop."""

import jax
import numpy as np
import pytest

from dmljax import losses, miners, ops


def _data(b=9):
    rng = np.random.default_rng(13)
    return rng.normal(size=(b, 4)).astype(np.float32), rng.integers(0, 3, size=b)


def test_a_weighted_sum_has_the_weighted_value_and_gradient(unchecked):
    x, y = _data()
    weighted = losses.weighted_sum({"a": (0.5, losses.contrastive), "b": (2.0, losses.ntxent)})
    where = np.arange(9) < 7
    (total, values), slope = jax.jit(jax.value_and_grad(weighted, has_aux=True))(x, y, where=where)
    assert set(values) == {"a", "b"}
    a, slope_a = jax.jit(jax.value_and_grad(losses.contrastive))(x, y, where=where)
    b, slope_b = jax.jit(jax.value_and_grad(losses.ntxent))(x, y, where=where)
    np.testing.assert_allclose([values["a"], values["b"]], [a, b], rtol=1e-6)
    np.testing.assert_allclose(total, 0.5 * a + 2 * b, rtol=1e-6)
    np.testing.assert_allclose(slope, 0.5 * slope_a + 2 * slope_b, rtol=1e-4, atol=1e-6)
    with pytest.raises(TypeError, match=r"`losses` must be .*, got \{\}"):
        losses.weighted_sum({})


@jax.jit
def _stats(x, y, where, margin):
    return losses.stats(x, y, where=where, margin=margin)


@jax.jit
def _stats_with_references(x, pairs, references, margin):
    return losses.stats(x, pairs, references=references, margin=margin)


def _naive(x, y, margin):
    x = x / np.sqrt((x * x).sum(1, keepdims=True))
    b = range(len(x))
    d = np.array([[np.sqrt(((x[i] - x[j]) ** 2).sum()) for j in b] for i in b])
    positives = {(i, j) for i in b for j in b if i != j and y[i] == y[j]}
    negatives = {(i, j) for i in b for j in b if y[i] != y[j]}
    triplets = [(a, p, n) for a, p in positives for i, n in negatives if i == a]
    active = [(a, p, n) for a, p, n in triplets if d[a, p] - d[a, n] + margin > 0]

    def share(hits, of):
        return len(set(hits)) / max(len(set(of)), 1)

    return {
        "positive_distance": np.mean([d[pair] for pair in positives]) if positives else 0,
        "negative_distance": np.mean([d[pair] for pair in negatives]) if negatives else 0,
        "active_triplets": share(active, triplets),
        "active_positives": share([t[:2] for t in active], [t[:2] for t in triplets]),
        "active_negatives": share([t[::2] for t in active], [t[::2] for t in triplets]),
    }


@pytest.mark.parametrize("margin", [0.0, 0.2, 0.7])
def test_statistics_are_those_of_a_triple_loop(margin):
    x, y = _data()
    expected = _naive(x.astype(np.float64), y, margin)
    assert margin or 0 < expected["active_triplets"] < 1
    stats = _stats(x, y, np.ones(9, bool), margin)
    assert set(stats) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name], value, rtol=1e-5, err_msg=name)
    where = np.arange(9) != 4
    masked = _stats(np.where(where[:, None], x, np.nan), y, where, margin)
    for name, value in _naive(x[where].astype(np.float64), y[where], margin).items():
        np.testing.assert_allclose(masked[name], value, rtol=1e-5, err_msg=name)
    # The batch as its own references gives the same, if ids exclude each row from its pairs.
    pairs = ops.pairs(y, y, ids=np.arange(9), reference_ids=np.arange(9))
    with_references = _stats_with_references(x, pairs, x.copy(), margin)
    for name, value in expected.items():
        np.testing.assert_allclose(with_references[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("y", [[0, 0, 0], [0, 1, 2]])
def test_statistics_of_a_batch_without_triplets_are_finite(y):
    x = np.random.default_rng(14).normal(size=(3, 4)).astype(np.float32)
    stats = jax.jit(losses.stats)(x, np.array(y))
    assert np.isfinite(list(stats.values())).all()
    assert stats["active_triplets"] == stats["active_positives"] == stats["active_negatives"] == 0


def test_statistics_have_no_gradient():
    x, y = _data()
    assert not np.any(jax.jit(jax.grad(lambda x: losses.stats(x, y)["positive_distance"]))(x))


def _cut(x, dim):
    x = np.asarray(x, np.float64)[..., :dim]
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def test_prefixes_of_pairs_are_a_loop_over_cut_vectors_with_their_miner_and_references():
    x, y = _data()
    references, reference_labels = _data(b=6)[0] + 1, np.arange(6) % 3
    where = np.arange(9) < 7
    for loss_fn, options in (
        (losses.contrastive, {"mine_fn": miners.batch_hard}),
        (losses.ntxent, {}),
        (losses.supcon, {"references": references, "reference_labels": reference_labels}),
    ):
        nested = losses.prefixes(loss_fn, dims=(1, 3, 4), weights=(0.5, 2.0, 1.0))
        total = 0
        for dim, weight in ((1, 0.5), (3, 2.0), (4, 1.0)):
            cut = dict(options)
            if "references" in cut:
                cut["references"] = _cut(references, dim)
            total += weight * loss_fn(_cut(x, dim), y, where=where, **cut)
        np.testing.assert_allclose(nested(x, y, where=where, **options), total, rtol=1e-5)


@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple"])
def test_prefixes_of_proxies_share_their_leading_numbers(name):
    x, y = _data()
    shape = (3, 2, 4) if name == "soft_triple" else (3, 4)
    proxies = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    cut = {dim: _cut(proxies, dim) for dim in (2, 4)}
    loss_fn = getattr(losses, name)

    @jax.jit
    def both_ways(proxies):
        nested = losses.prefixes(loss_fn, dims=(2, 4))
        value, slope = jax.value_and_grad(nested, argnums=2)(x, y, proxies)
        rest = jax.grad(losses.prefixes(loss_fn, dims=(2,)), argnums=2)(x, y, proxies)
        return value, slope, rest, sum(loss_fn(_cut(x, d), y, w) for d, w in cut.items())

    value, slope, rest, expected = both_ways(proxies)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.any(slope[..., 2:]) and not np.any(rest[..., 2:])


def test_prefixes_of_two_views_and_of_a_memory():
    x, y = _data()
    other = x + np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    expected = sum(losses.clip(_cut(x, dim), _cut(other, dim)) for dim in (2, 4))
    nested = losses.prefixes(losses.clip, dims=(2, 4))
    np.testing.assert_allclose(nested(x, other), expected, rtol=1e-5)
    xbm = losses.cross_batch_memory(losses.prefixes(losses.contrastive, dims=(2, 4)), size=16)
    value, memory = xbm.loss(xbm.init(4), x, y)
    assert memory.embeddings.shape == (16, 4)
    parts = [losses.cross_batch_memory(losses.contrastive, size=16) for _ in range(2)]
    expected = sum(
        part.loss(part.init(dim), _cut(x, dim), y)[0]
        for part, dim in zip(parts, (2, 4), strict=True)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": ()}, "ascending numbers of dimensions, such as .64, 128., not .."),
        ({"dims": (2, 2)}, "ascending numbers"),
        ({"dims": (0, 2)}, "ascending numbers"),
        ({"dims": (2, 4), "weights": (1,)}, "2 prefixes need 2 weights"),
        ({"dims": (2, 5)}, "at most the width 4 of the embeddings, not"),
    ],
)
def test_prefixes_that_cannot_be_are_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        losses.prefixes(losses.contrastive, **options)(*_data())
