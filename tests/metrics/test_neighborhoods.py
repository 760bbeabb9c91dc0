"""Neighborhoods and worst queries against loops over sorted lists."""

import numpy as np
import pytest
from item_cases import case, every_kind, pairs

from dmljax import metrics, retrieval
from dmljax.report import findings


@every_kind
@pytest.mark.parametrize(("name", "k"), [("cosine", 1), ("euclidean", 4), ("cosine", 70)])
def test_neighborhoods(kind, name, k):
    embeddings, labels, search = case(kind)
    similarities, is_same, counts = pairs(embeddings, labels, search)
    if name == "euclidean":
        gallery = search.get("gallery", embeddings)
        similarities = -0.5 * ((embeddings[:, None] - gallery[None]) ** 2).sum(axis=2)
    similarity_fn = getattr(retrieval, name)
    near = metrics.neighborhoods(embeddings, labels, k=k, similarity_fn=similarity_fn, **search)
    for i in range(len(embeddings)):
        order = [j for j in np.argsort(-similarities[i], kind="stable") if counts[i, j]]
        own, other = ([j for j in order if is_same[i, j] == same] for same in (True, False))
        listed = order[:k]
        assert near.nearest[i].tolist() == listed + [-1] * (k - len(listed))
        np.testing.assert_allclose(
            near.similarities[i, : len(listed)], similarities[i, listed], atol=1e-5
        )
        assert np.isnan(near.similarities[i, len(listed) :]).all()
        assert near.positives[i] == len(own)
        for item, similarity, expected in (
            (near.own[i], near.own_similarity[i], own),
            (near.other[i], near.other_similarity[i], other),
        ):
            assert item == (expected[0] if expected else -1)
            if expected:
                np.testing.assert_allclose(similarity, similarities[i, item], atol=1e-5)
            else:
                assert np.isnan(similarity)


def test_a_large_class_comes_in_blocks(monkeypatch):
    from dmljax.metrics import neighbors

    embeddings, labels, search = case("groups")
    expected = metrics.neighborhoods(embeddings, labels // 50, **search)
    monkeypatch.setattr(neighbors, "_BLOCK", 100)
    for a, b in zip(
        metrics.neighborhoods(embeddings, labels // 50, **search), expected, strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_one_class_has_no_other():
    near = metrics.neighborhoods(np.eye(4), np.zeros(4, int))
    assert (near.other == -1).all() and np.isnan(near.other_similarity).all()
    assert near.positives.tolist() == [3] * 4
    near = metrics.neighborhoods(np.full((4, 2), np.nan), np.zeros(4, int))
    assert (near.nearest == -1).all() and (near.own == -1).all() and not near.positives.any()


def test_worst_queries():
    rng = np.random.default_rng(0)
    first = rng.integers(0, 6, 80)
    map_at_r = np.where(first > 0, rng.integers(0, 4, 80) / 4, np.nan)
    order = sorted((i for i in range(80) if first[i]), key=lambda i: (-first[i], map_at_r[i], i))
    assert findings.worst_queries(first, map_at_r).tolist() == order
