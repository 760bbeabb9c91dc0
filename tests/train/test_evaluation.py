"""Scores of embeddings by the protocol of a split."""

import numpy as np

from dmljax import metrics
from dmljax.data.splits import Split
from dmljax.train import evaluation

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(4), 5)
X = RNG.normal(size=(20, 3)).astype(np.float32) + LABELS[:, None]


def _split(**fields):
    return Split([None] * 20, LABELS, tuple("abcd"), **fields)


def test_only_the_chosen_scores_are_computed():
    ranking_fns = {"MAP@R": metrics.map_at_r}
    scores = evaluation.score(X, _split(), ks=(), ranking_fns=ranking_fns, clustering_fns={})
    assert set(scores) == {"MAP@R", "lone"}
    everything = evaluation.score(X, _split(), ks=(1, 2), seeds=(0,))
    assert everything["MAP@R"] == scores["MAP@R"]
    assert list(everything)[:7] == ["R@1", "R@2", "P@1", "RP", "MAP@R", "mAP", "MRR"]


def test_a_k_beyond_the_images_is_left_out():
    scores = evaluation.score(X, _split(), ks=(1, 19, 20), clustering_fns={})
    assert "R@19" in scores and "R@20" not in scores


def test_unreadable_images_count_nowhere_but_are_counted():
    rows = np.arange(20) % 5 < 4
    broken = np.where(rows[:, None], X, np.nan)
    scores = evaluation.score(broken, _split(), seeds=(0,))
    kept = Split([None] * 16, LABELS[rows], tuple("abcd"))
    assert scores.pop("unreadable") == 4
    assert scores == evaluation.score(X[rows], kept, seeds=(0,))


def test_a_query_is_compared_with_the_gallery_alone():
    query = np.arange(20) % 2 == 0
    scores = evaluation.score(X, _split(query=query, gallery=~query), clustering_fns={})
    expected = metrics.retrieval(
        X[query], LABELS[query], gallery=X[~query], gallery_labels=LABELS[~query]
    )
    assert scores == expected
