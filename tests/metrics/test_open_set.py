"""One threshold for all classes, and strangers, against loops over all pairs."""

import numpy as np
import pytest
from item_cases import case, every_kind, pairs

from dmljax import metrics, retrieval


@every_kind
@pytest.mark.parametrize("tile", [7, 1024])
def test_histograms_of_each_class(kind, tile):
    embeddings, labels, search = case(kind)
    histograms = metrics.class_histograms(embeddings, labels, bins=64, tile=tile, **search)
    similarities, is_same, counts = pairs(embeddings, labels, search)
    readable = ~np.isnan(embeddings).any(axis=1)
    np.testing.assert_array_equal(histograms.labels, np.unique(labels[readable]))
    for i, label in enumerate(histograms.labels):
        of_class = counts & (labels == label)[:, None]
        for found, where in (
            (histograms.positives[i], of_class & is_same),
            (histograms.negatives[i], of_class & ~is_same),
        ):
            expected = np.histogram(similarities[where], histograms.total.edges)[0]
            np.testing.assert_array_equal(found, expected)


def test_the_total_is_the_histogram_of_all_pairs():
    embeddings, labels, search = case("gallery and groups")
    total = metrics.class_histograms(embeddings, labels, bins=64, **search).total
    expected = metrics.similarity_histograms(embeddings, labels, bins=64, **search)
    for found, counts in zip(total, expected, strict=True):
        np.testing.assert_array_equal(found, counts)
    embeddings, labels, _ = case("within")  # each pair twice
    total = metrics.class_histograms(embeddings, labels, bins=64).total
    expected = metrics.similarity_histograms(embeddings, labels, bins=64)
    np.testing.assert_array_equal(total.negatives, 2 * expected.negatives)


def _utility(similarities, own, others, threshold):
    sensitivity = np.mean(similarities[own] >= threshold)
    specificity = np.mean(similarities[others] < threshold)
    both = sensitivity + specificity
    return 2 * sensitivity * specificity / both if both else 0.0


def test_opis_against_a_loop():
    embeddings, labels, _ = case("within", d=4)
    histograms = metrics.class_histograms(embeddings, labels)
    similarities, is_same, counts = pairs(embeddings, labels, {})
    negatives = np.sort(similarities[counts & ~is_same])[::-1]
    edges = histograms.total.edges
    low, high = (min(e for e in edges if np.mean(negatives >= e) <= fmr) for fmr in (0.3, 0.05))
    thresholds = [e for e in edges[::-1] if low <= e <= high]
    variances = []
    for threshold in thresholds:
        utilities = []
        for label in np.unique(labels):
            of_class = counts & (labels == label)[:, None]
            if (of_class & is_same).any():
                where = of_class & is_same, of_class & ~is_same
                utilities.append(_utility(similarities, *where, threshold))
        variances.append(np.mean((np.array(utilities) - np.mean(utilities)) ** 2))
    distances = [np.sqrt(2 - 2 * t) for t in thresholds]
    area = sum(
        (distances[i + 1] - distances[i]) * (variances[i] + variances[i + 1]) / 2
        for i in range(len(distances) - 1)
    )
    assert len(thresholds) > 50
    expected = area / (distances[-1] - distances[0])
    assert metrics.opis(histograms, fmrs=(0.05, 0.3)) == pytest.approx(expected, rel=1e-9)


def test_threshold_of_each_class():
    embeddings, labels, _ = case("within")
    histograms = metrics.class_histograms(embeddings, labels)
    similarities, is_same, counts = pairs(embeddings, labels, {})
    thresholds = metrics.class_thresholds(histograms, 0.1)
    for label, threshold in zip(histograms.labels, thresholds, strict=True):
        negatives = similarities[counts & ~is_same & (labels == label)[:, None]]
        passing = [np.mean(negatives >= threshold + shift) for shift in (2 / 1024, -2 / 1024)]
        assert passing[0] <= 0.1 <= passing[1]


@every_kind
def test_strangers(kind):
    embeddings, labels, search = case(kind)
    near = metrics.neighborhoods(embeddings, labels, similarity_fn=retrieval.cosine, **search)
    similarities, is_same, counts = pairs(embeddings, labels, search)
    known, right, strangers = [], [], []
    for row, same, counted in zip(similarities, is_same, counts, strict=True):
        own, other = row[same & counted], row[~same & counted]
        if len(own):
            known.append(max(row[counted]))
            right.append(not len(other) or own.max() >= other.max())
        if len(other):
            strangers.append(other.max())
    known, right, strangers = np.array(known), np.array(right), np.array(strangers)
    for share in (0.0, 0.05, 0.3):
        threshold = metrics.threshold_at_refusal(near, share)
        rates = metrics.stranger_rates(near, threshold)
        assert rates.known_refused <= share < np.mean(known <= threshold + 1e-6)
        near_it = threshold - 1e-6  # similarities of the search are float32
        assert rates.known_refused == pytest.approx(np.mean(known < near_it))
        assert rates.strangers_refused == pytest.approx(np.mean(strangers < near_it))
        assert rates.known_found == pytest.approx(np.mean((known >= near_it) & right))


def test_what_cannot_be_asked():
    histograms = metrics.class_histograms(*case("within")[:2])
    with pytest.raises(ValueError, match=r"fmrs=\(0.1, 0.01\) must be two rising rates"):
        metrics.opis(histograms, fmrs=(0.1, 0.01))
    with pytest.raises(ValueError, match="fmr=2 must lie between 0 and 1"):
        metrics.class_thresholds(histograms, 2)
    with pytest.raises(ValueError, match=r"`bins` must be a power of two, .*got 3"):
        metrics.class_histograms(*case("within")[:2], bins=3)
    assert np.isnan(metrics.opis(metrics.class_histograms(np.eye(9), np.arange(9))))
    near = metrics.neighborhoods(*case("within")[:2])
    with pytest.raises(ValueError, match="known_refused=1 must be at least 0 and below 1"):
        metrics.threshold_at_refusal(near, 1)
    alone = metrics.neighborhoods(np.eye(3), np.zeros(3, int))
    assert np.isnan(metrics.stranger_rates(alone, 0.1).strangers_refused)
    unrelated = metrics.neighborhoods(np.eye(3), np.arange(3))
    assert np.isnan(metrics.threshold_at_refusal(unrelated, 0.1))
