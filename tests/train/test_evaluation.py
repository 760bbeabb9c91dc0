"""Scores of embeddings by the protocol of a split."""

import dataclasses

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


def test_the_groups_of_a_split_reach_its_scores():
    x = np.array([[0, 0], [1, 0], [0, 9], [3, 0]], np.float32)
    split = Split(np.zeros((4, 2, 2, 3), np.uint8), [0, 1, 0, 0], ("a", "b"))
    marks = {"query": np.array([1, 0, 0, 0], bool), "gallery": np.array([0, 1, 1, 1], bool)}
    split = dataclasses.replace(split, **marks)
    assert evaluation.score(x, split, ks=(1, 2), clustering_fns={})["mAP"] == (1 / 2 + 2 / 3) / 2
    # The negative is in the group of the query, so it no longer counts.
    split = dataclasses.replace(split, groups=np.array([7, 7, -1, -1]))
    assert evaluation.score(x, split, ks=(1, 2), clustering_fns={})["mAP"] == 1
