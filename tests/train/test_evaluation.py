"""Scores of embeddings by the protocol of a split."""

import dataclasses

import numpy as np
import pytest
from system import METHODS, tiny

from dmljax import metrics
from dmljax.config.build import build
from dmljax.data.splits import Split
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train import evaluation, features, journal

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(4), 5)
X = RNG.normal(size=(20, 3)).astype(np.float32) + LABELS[:, None]


def _split(**fields):
    return Split([None] * 20, LABELS, tuple("abcd"), **fields)


def test_only_the_chosen_scores_are_computed():
    ranking_fns = {"MAP@R": metrics.map_at_r}
    scores = evaluation.score(X, _split(), ks=(), ranking_fns=ranking_fns, clustering_fns={})
    assert set(scores) == {"MAP@R", "without_positive"}
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
    readable = Split([None] * 16, LABELS[rows], tuple("abcd"))
    assert scores.pop("unreadable") == 4
    assert scores == evaluation.score(X[rows], readable, seeds=(0,))


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


def _cut_scores(x, labels, *, depth, marks=None):
    """mAP and MRR as pytorch-metric-learning defines them, by a plain loop over ranked lists."""
    query = np.ones(len(x), bool) if marks is None else marks["query"]
    gallery = query if marks is None else marks["gallery"]
    precisions, reciprocals = [], []
    for i in np.flatnonzero(query):
        items = [j for j in np.flatnonzero(gallery) if marks is not None or j != i]
        distances = [((x[i] - x[j]) ** 2).sum() for j in items]
        hits = [labels[items[j]] == labels[i] for j in np.argsort(distances, kind="stable")]
        if not any(hits):
            continue
        at_hits = [sum(hits[: j + 1]) / (j + 1) for j in range(min(depth, len(hits))) if hits[j]]
        precisions.append(sum(at_hits) / sum(hits))
        reciprocals.append(1 / (1 + hits.index(True)) if True in hits[:depth] else 0.0)
    return np.mean(precisions), np.mean(reciprocals)


@pytest.mark.parametrize("depth", [1, 4, "max_bin_count"])
@pytest.mark.parametrize(("sizes", "protocol"), [([5, 5, 5, 5], False), ([2, 3, 7, 8, 1], True)])
def test_scores_cut_at_a_depth_are_those_of_a_loop(depth, sizes, protocol):
    rng = np.random.default_rng(len(sizes))
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    x = (rng.normal(size=(len(labels), 3)) + labels[:, None] / 2).astype(np.float32)
    marks = None
    if protocol:
        query = np.arange(len(labels)) % 3 == 0
        marks = {"query": query, "gallery": ~query}
    split = Split([None] * len(labels), labels, tuple("abcde"[: len(sizes)]), **marks or {})
    scores = evaluation.score(x, split, clustering_fns={}, depth=depth)
    k = depth
    if depth == "max_bin_count":
        if marks is None:
            k = max(sizes) - 1
        else:
            k = max(np.sum(labels[~query] == label) for label in labels[query])
    expected = _cut_scores(x, labels, depth=k, marks=marks)
    np.testing.assert_allclose([scores[f"mAP@{depth}"], scores[f"MRR@{depth}"]], expected)
    if not protocol and len(set(sizes)) == 1 and k == sizes[0] - 1:  # R of every query
        assert scores[f"mAP@{depth}"] == pytest.approx(scores["MAP@R"])


def test_learners_are_scored_at_every_k_and_their_mean(tmp_path, capsys):
    config = tiny(tmp_path, **METHODS["abe"], select="test/learners/R@2")
    config["evaluate"] |= {"ks": [1, 2, 4]}
    scores = training.run(config, tmp_path / "run")
    for k in (1, 2, 4):
        learners = [scores[f"learner_{m}/R@{k}"] for m in (0, 1)]
        assert scores[f"learners/R@{k}"] == pytest.approx(np.mean(learners))
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if " learner_" in f" {line.strip()}"]
    assert [row[0] for row in rows] == ["learner_0", "learner_1"] and len(rows[0]) == 4
    (mean,) = (line.split() for line in printed.splitlines() if line.split()[:1] == ["learners"])
    assert mean[1:] == [f"{100 * scores[f'learners/R@{k}']:.1f}" for k in (1, 2, 4)]
    with pytest.raises(ValueError, match=r"no score 'learner_2/R@1'"):
        build(config | {"select": "test/learner_2/R@1"})


def test_clusters_of_the_end_are_not_computed_before(tmp_path, capsys):
    config = tiny(tmp_path)
    config["evaluate"] |= {"clustering": {"only_last": True, "starts": 3, "seeds": [4]}}
    scores = training.run(config, tmp_path / "run")
    assert "NMI" in scores and scores["NMI_std"] == 0
    rows = journal.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "test/NMI" in row] == [6]
    assert [row["step"] for row in rows if "test/R@1" in row] == [3, 6]
    line = "NMI, AMI, ARI, F1: k-means, the best of 3 by inertia, seed 4"
    assert line in capsys.readouterr().out
    again, lines = run_folder.evaluate(tmp_path / "run")
    assert again["NMI"] == scores["NMI"] and any(line in text for text in lines)
    with pytest.raises(ValueError, match=r"no score 'NMI'"):
        build(config | {"select": "test/NMI"})


def test_the_next_batch_is_in_the_queue_when_results_are_fetched(tmp_path):
    """So that a device does not wait while the host takes what it has computed."""
    run, calls = build(tiny(tmp_path)), []
    results = features.embedded_batches(
        lambda images: calls.append(len(images)) or images.mean(axis=(1, 2)),
        run.test,
        transform_fn=run.eval_transform_fn,
        batch_size=8,
        shards=run.shards,
    )
    seen = [(len(calls), rows[where].tolist()) for _, where, rows in results]
    assert [count for count, _ in seen] == [2, 3, 4, 4] and len(calls) == 4
    assert [row for _, rows in seen for row in rows] == list(range(32))
