"""Functions of ranks against a double loop over ranked lists of hits."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked_lists import naive_scores

from dmljax import metrics

RANKING_FNS = {
    "R@1": functools.partial(metrics.recall_at_k, k=1),
    "R@3": functools.partial(metrics.recall_at_k, k=3),
    "P@1": metrics.precision_at_1,
    "RP": metrics.r_precision,
    "MAP@R": metrics.map_at_r,
    "mAP": metrics.average_precision,
    "MRR": metrics.reciprocal_rank,
    "mAP@3": functools.partial(metrics.map_at_k, k=3),
    "MRR@3": functools.partial(metrics.reciprocal_rank_at_k, k=3),
}


def _ranks(lists_of_hits):
    rows = [np.flatnonzero(hits) + 1 for hits in lists_of_hits]
    ranks = np.zeros((len(rows), max([1, *map(len, rows)])), int)
    for row, values in zip(ranks, rows, strict=True):
        row[: len(values)] = values
    return ranks


def test_all_public_functions_of_ranks_are_tested():
    tested = {getattr(f, "func", f).__name__ for f in RANKING_FNS.values()}
    assert tested == set(metrics.ranking.__all__)


@pytest.mark.parametrize("name", RANKING_FNS)
@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=6))
def test_scores_are_those_of_ranked_lists(name, lists_of_hits):
    scores = RANKING_FNS[name](_ranks(lists_of_hits))
    expected = [naive_scores(hits, (1, 3))[name] for hits in lists_of_hits]
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, expected, rtol=1e-12)


@pytest.mark.parametrize("name", RANKING_FNS)
def test_a_score_is_a_share_that_negatives_ahead_never_raise(name):
    rng = np.random.default_rng(0)
    score_fn = RANKING_FNS[name]
    for width in (0, 1, 4):  # without a positive
        assert np.isnan(score_fn(np.zeros((3, width), int))).tolist() == [True] * 3
    ranks = _ranks(rng.random((40, 30)) < rng.random((40, 1)))
    scores = score_fn(ranks)
    scored = ranks[:, 0] > 0
    assert ((scores[scored] >= 0) & (scores[scored] <= 1)).all()
    # More padding changes nothing, and a query does not see the others.
    padded = np.pad(ranks, ((0, 0), (0, 5)))
    np.testing.assert_allclose(score_fn(padded), scores, rtol=1e-14)  # numpy sums in blocks
    order = rng.permutation(40)
    np.testing.assert_array_equal(score_fn(ranks[order]), scores[order])
    # Positives in front are perfect; one more negative in front never helps.
    perfect = np.where(ranks > 0, np.arange(1, ranks.shape[1] + 1), 0)
    counts = (ranks > 0).sum(axis=1)[scored]
    best = np.minimum(3 / counts, 1) if name == "mAP@3" else 1.0  # of more positives than the depth
    np.testing.assert_allclose(score_fn(perfect)[scored], best, rtol=1e-14)
    assert (score_fn(np.where(ranks > 0, ranks + 1, 0)) <= scores)[scored].all()


@pytest.mark.parametrize(
    "function", [metrics.recall_at_k, metrics.map_at_k, metrics.reciprocal_rank_at_k]
)
def test_k_is_checked(function):
    with pytest.raises(ValueError, match="k=0 must be at least 1"):
        function(np.ones((2, 1), int), k=0)
