"""Hubs by counting in loops; the spectrum by the singular values of the whole matrix."""

import math

import numpy as np
import pytest
from item_cases import case, every_kind
from scipy import stats

from dmljax import metrics
from dmljax.report import findings


@every_kind
def test_hubs(kind):
    embeddings, labels, search = case(kind)
    gallery_labels = search.get("gallery_labels", labels)
    nearest = metrics.neighborhoods(embeddings, labels, k=4, **search).nearest
    item_labels = search.get("gallery_labels")
    counts, wrong = findings.hub_counts(nearest, labels, gallery_labels=item_labels)
    for j in range(len(gallery_labels)):
        finders = [i for i in range(len(labels)) if j in nearest[i]]
        assert counts[j] == len(finders)
        assert wrong[j] == sum(labels[i] != gallery_labels[j] for i in finders)
    assert findings.skewness(counts) == pytest.approx(stats.skew(counts))
    assert findings.skewness(np.ones(3, int)) == 0  # even counts


def test_spectrum(monkeypatch):
    monkeypatch.setattr(metrics.spread, "_BLOCK", 7)
    embeddings, _, _ = case("within")
    units = embeddings[~np.isnan(embeddings).any(axis=1)]
    units = units / np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-30)
    values = np.linalg.svd(units - units.mean(axis=0), compute_uv=False) ** 2
    shares = metrics.spectrum(embeddings)
    np.testing.assert_allclose(shares, values / values.sum(), atol=1e-6)
    entropy = -sum(p * math.log(p) for p in shares)
    assert metrics.effective_rank(shares) == pytest.approx(math.exp(entropy))
    assert metrics.participation(shares) == pytest.approx(1 / sum(p * p for p in shares))
    singular = np.linalg.svd(units, compute_uv=False)
    for mode in (1, 2):
        s = singular[mode - 1 :] / singular[mode - 1 :].sum()
        expected = stats.entropy(np.full(len(s), 1 / len(s)), s)
        assert metrics.rho_spectrum(embeddings, mode=mode) == pytest.approx(expected, abs=1e-6)


def test_collapsed_and_flat_embeddings():
    shares = metrics.spectrum(np.ones((9, 3)))
    assert shares.tolist() == [0, 0, 0]
    assert metrics.effective_rank(shares) == metrics.participation(shares) == 0
    assert metrics.rho_spectrum(np.ones((9, 3))) == math.inf
    assert metrics.rho_spectrum(np.full((9, 3), np.nan)) == math.inf
    line = np.outer(np.arange(1, 6), [1.0, 0, 0]) * np.array([1, -1, 1, -1, 1])[:, None]
    assert metrics.effective_rank(metrics.spectrum(line)) == pytest.approx(1)
    with pytest.raises(ValueError, match="mode=4 must lie between 1 and the 3 dimensions"):
        metrics.rho_spectrum(np.eye(3), mode=4)
