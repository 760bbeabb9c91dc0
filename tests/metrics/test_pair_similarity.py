"""Histograms of pairs and what is read off them, against loops over all pairs."""

import math

import numpy as np
import pytest
from item_cases import case, every_kind, pairs

from dmljax import metrics


def _values(kind):
    """The cosines of all positive and of all negative pairs."""
    embeddings, labels, search = case(kind)
    similarities, is_same, counts = pairs(embeddings, labels, search)
    if "gallery" not in kind:
        counts = np.triu(counts)
    return similarities[counts & is_same], similarities[counts & ~is_same]


@every_kind
@pytest.mark.parametrize("tile", [7, 1024])
def test_histograms(kind, tile):
    embeddings, labels, search = case(kind)
    histograms = metrics.similarity_histograms(embeddings, labels, bins=64, tile=tile, **search)
    for counts, values in zip(histograms, _values(kind), strict=True):
        np.testing.assert_array_equal(counts, np.histogram(values, histograms.edges)[0])


@pytest.fixture(scope="module", params=["within", "gallery and groups"])
def fine(request):
    embeddings, labels, search = case(request.param)
    histograms = metrics.similarity_histograms(embeddings, labels, **search)
    return histograms, *_values(request.param)


def test_rates_at_a_threshold(fine):
    histograms, positives, negatives = fine
    for threshold in (-1, -0.5, 0.0, 0.25, 0.875, 1):
        assert metrics.fmr_at(histograms, threshold) == np.mean(negatives >= threshold)
        assert metrics.fnmr_at(histograms, threshold) == pytest.approx(
            np.mean(positives < threshold)
        )
    middle = histograms.edges[1500] - 1e-4  # rounded up
    assert metrics.fmr_at(histograms, middle) == np.mean(negatives >= histograms.edges[1500])


def test_threshold_is_the_smallest_edge_that_holds_the_rate(fine):
    histograms, _, negatives = fine
    for fmr in (0.5, 0.1, 0.03):
        threshold = metrics.threshold_at_fmr(histograms, fmr)
        assert np.mean(negatives >= threshold) <= fmr < np.mean(negatives >= threshold - 2 / 2048)


def test_only_rates_with_ten_expected_pairs_are_offered(fine):
    histograms, _, negatives = fine
    expected = tuple(f for f in (0.1, 0.01, 0.001) if f * len(negatives) >= 10)
    assert metrics.offered_fmrs(histograms, (0.1, 0.01, 0.001)) == expected and expected
    with pytest.raises(ValueError, match=r"fmr=1e-05 needs 1,000,000 pairs of different classes"):
        metrics.threshold_at_fmr(histograms, 1e-5)


def test_collapsed_embeddings_have_no_threshold():
    histograms = metrics.similarity_histograms(np.ones((40, 3)), np.arange(40) // 2)
    assert metrics.offered_fmrs(histograms) == ()
    with pytest.raises(ValueError, match="1 of the pairs of different classes have a cosine of 1"):
        metrics.threshold_at_fmr(histograms, 0.1)
    assert metrics.alignment(histograms) == pytest.approx(0, abs=2e-3)
    assert metrics.uniformity(histograms) == pytest.approx(0, abs=4e-3)


def test_similarity_that_a_share_reaches(fine):
    histograms, _, negatives = fine
    shares = np.array([0.9, 0.5, 0.1, 0.02])
    for share, value in zip(
        shares, metrics.pair_similarity.similarity_at_share(histograms, shares), strict=True
    ):
        low, high = (np.mean(negatives >= value + shift) for shift in (2 / 2048, -2 / 2048))
        assert low <= share <= high
    tiny = metrics.pair_similarity.similarity_at_share(histograms, np.array([1e-9, 0.0]))
    np.testing.assert_allclose(tiny, negatives.max(), atol=2 / 2048)


def test_alignment_and_uniformity(fine):
    histograms, positives, negatives = fine
    expected = np.mean([2 - 2 * s for s in positives])
    assert metrics.alignment(histograms) == pytest.approx(expected, abs=2e-3)
    everything = [*positives, *negatives]
    expected = math.log(sum(math.exp(-2 * (2 - 2 * s)) for s in everything) / len(everything))
    assert metrics.uniformity(histograms) == pytest.approx(expected, abs=4e-3)


def test_nothing_to_count():
    histograms = metrics.similarity_histograms(np.full((3, 2), np.nan), np.arange(3))
    assert not histograms.positives.any() and not histograms.negatives.any()
    assert math.isnan(metrics.alignment(histograms)) and math.isnan(metrics.uniformity(histograms))
    assert math.isnan(metrics.fmr_at(histograms, 0)) and metrics.offered_fmrs(histograms) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bins": 100}, "`bins` must be a power of two, .*got 100"),
        ({"tile": 0}, "`tile` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        metrics.similarity_histograms(np.ones((4, 2)), np.arange(4), **options)
