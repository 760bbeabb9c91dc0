"""Classes and confusions against loops over all pairs."""

import math

import numpy as np
import pytest
from item_cases import case, every_kind, pairs

from dmljax import metrics
from dmljax.report import findings


def _scores(kind, d=5):
    """R@1 and MAP@R of every query, NaN where the protocol scores none."""
    embeddings, labels, search = case(kind, d=d)
    _, is_same, counts = pairs(embeddings, labels, search)
    rng = np.random.default_rng(3)
    has_positive = (is_same & counts).any(axis=1)
    recalls = np.where(has_positive, rng.integers(0, 2, len(labels)), np.nan)
    return recalls, np.where(has_positive, rng.random(len(labels)), np.nan)


@every_kind
def test_class_table(kind):
    embeddings, labels, search = case(kind)
    recalls, precisions = _scores(kind)
    similarities, is_same, counts = pairs(embeddings, labels, search)
    gallery = search.get("gallery", embeddings)
    gallery_labels = search.get("gallery_labels", labels)
    sides = [
        (x[~np.isnan(x).any(axis=1)], y[~np.isnan(x).any(axis=1)])
        for x, y in ((embeddings, labels), (gallery, gallery_labels))
    ]
    units = [x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x, _ in sides]
    means = [
        {c: unit[y == c].mean(axis=0) for c in set(y.tolist())}
        for unit, (_, y) in zip(units, sides, strict=True)
    ]
    count = int(max(*labels, *gallery_labels)) + 2
    table = findings.class_table(embeddings, labels, recalls, precisions, count=count, **search)
    for label in range(count):
        scored = (labels == label) & ~np.isnan(recalls)
        assert table["queries"][label] == scored.sum()
        expected = (
            [recalls[scored].mean(), precisions[scored].mean()] if scored.any() else [np.nan] * 2
        )
        np.testing.assert_allclose([table["recall"][label], table["map_at_r"][label]], expected)
        of_class = is_same & counts & (labels == label)[:, None]
        expected = similarities[of_class].mean() if of_class.any() else np.nan
        np.testing.assert_allclose(table["inside"][label], expected, atol=1e-6)
        cosines = {
            c: means[0][label] @ m / (np.linalg.norm(means[0][label]) * np.linalg.norm(m))
            for c, m in means[1].items()
            if c != label and label in means[0] and np.linalg.norm(means[0][label]) > 0
        }
        following, similarity = table["next"][label], table["next_similarity"][label]
        if cosines:
            best = max(cosines, key=cosines.get)
            assert following == best
            np.testing.assert_allclose(similarity, cosines[best], atol=1e-6)
        elif label not in means[0]:
            assert following == count and np.isnan(similarity)
    upper = table["upper"][table["order"]]
    assert sorted(table["order"]) == list(range(count))
    assert (np.diff(upper[~np.isnan(upper)]) >= 0).all()
    assert np.isnan(upper[(~np.isnan(upper)).sum() :]).all()  # classes without queries come last


def test_wilson_limit_solves_its_equation():
    """The limit u is the largest share with (p - u)^2 = z^2 u (1 - u) / n."""
    for successes, trials in ((0, 2), (0, 50), (7, 10), (40, 40)):
        u = float(findings.wilson_upper(np.array([successes]), np.array([trials]))[0])
        p = successes / trials
        assert (p - u) ** 2 == pytest.approx(1.959964**2 * u * (1 - u) / trials, abs=1e-7)
        assert p - 1e-12 <= u <= 1 + 1e-12
    assert np.isnan(findings.wilson_upper(np.array([0]), np.array([0])))[0]


@every_kind
def test_confusions(kind):
    embeddings, labels, search = case(kind, d=2)
    recalls, _ = _scores(kind, d=2)
    gallery_labels = search.get("gallery_labels", labels)
    other = metrics.neighborhoods(embeddings, labels, **search).other
    queries = {}
    for i, label in enumerate(labels.tolist()):
        if recalls[i] == 0 and other[i] >= 0:
            queries.setdefault((label, int(gallery_labels[other[i]])), []).append(i)
    count = {pair: len(rows) for pair, rows in queries.items()}
    listed = sorted(queries, key=lambda pair: (-count[pair], -count.get(pair[::-1], 0), pair))
    item_labels = search.get("gallery_labels")
    confused = findings.confusions(labels, recalls, other, gallery_labels=item_labels)
    assert listed and list(confused.items()) == [(pair, queries[pair]) for pair in listed]


def test_density():
    embeddings, labels, _ = case("within")
    readable = ~np.isnan(embeddings).any(axis=1)
    embeddings, labels = embeddings[readable], labels[readable]
    similarities, _, _ = pairs(embeddings, labels, {})
    inside, means = [], []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        distances = [1 - similarities[i, j] for i in rows for j in rows if i < j]
        if distances:
            inside.append(np.mean(distances))
        norms = np.maximum(np.linalg.norm(embeddings[rows], axis=1, keepdims=True), 1e-30)
        mean = (embeddings[rows] / norms).mean(axis=0)
        means.append(mean / np.linalg.norm(mean))
    between = [1 - a @ b for i, a in enumerate(means) for b in means[:i]]
    expected = np.mean(inside) / np.mean(between)
    with_nan, with_labels, _ = case("within")
    assert metrics.density(with_nan, with_labels) == pytest.approx(expected, rel=1e-5)


def test_density_of_one_class_or_of_single_items_is_nan():
    assert math.isnan(metrics.density(np.eye(3), np.zeros(3, int)))
    assert math.isnan(metrics.density(np.eye(3), np.arange(3)))
