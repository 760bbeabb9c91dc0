"""Scores and thresholds of the card against naive loops."""

import numpy as np
import pytest

from dmljax import metrics
from dmljax.bundle import card
from dmljax.data.splits import Split


def _vectors(classes=12, each=6, d=16, noise=0.4, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.linspace(2, 0.2, d)
    centers = np.repeat(rng.normal(size=(classes, d)) * scale, each, axis=0)
    x = centers + noise * rng.normal(size=centers.shape) * scale
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32), np.repeat(np.arange(classes), each).astype(np.int32)


TEST, LABELS = _vectors(seed=2)


def test_scores_are_those_of_the_metrics():
    split = Split(
        records=tuple(range(len(LABELS))), labels=LABELS, names=tuple(map(str, range(12)))
    )
    result = card.scores_of(TEST, split)
    expected = metrics.retrieval(TEST, LABELS, ks=(1,))
    for name in ("R@1", "RP", "MAP@R"):
        assert result[name]["value"] == pytest.approx(expected[name])
        low, high = result[name]["interval"]
        assert low <= result[name]["value"] <= high and result[name]["queries"] == len(LABELS)


def test_thresholds_need_classes():
    x, labels = _vectors(classes=16, each=20, noise=0.8, seed=3)
    halves = card.halves(card.Labeled(x, labels))
    classes = [set(half.labels.tolist()) for half in halves]
    assert [len(c) for c in classes] == [8, 8] and classes[0] | classes[1] == set(range(16))
    assert all(np.array_equal(half.embeddings, x[np.isin(labels, half.labels)]) for half in halves)
    assert card.thresholds(*halves, split="test")
    few = card.halves(card.Labeled(x[labels < 15], labels[labels < 15]))
    assert card.thresholds(*few, split="test") == {}


def test_thresholds_against_a_loop_over_pairs():
    x, labels = _vectors(classes=30, each=8, noise=0.8, seed=3)
    test, test_labels = _vectors(classes=20, each=5, noise=0.8, seed=4)
    result = card.thresholds(card.Labeled(x, labels), card.Labeled(test, test_labels), split="val")
    assert list(result) == ["fmr=1e-2", "fmr=1e-3"]  # 27,840 pairs are too few for the third
    for name, rate in (("fmr=1e-2", 1e-2), ("fmr=1e-3", 1e-3)):
        entry = result[name]
        different = [x[i] @ x[j] for i in range(len(x)) for j in range(i) if labels[i] != labels[j]]
        assert entry.pairs == len(different) and entry.chosen_on == "val"
        assert np.mean(np.array(different) >= entry.cosine) <= rate
        matches = {True: [], False: []}
        for i in range(len(test)):
            for j in range(i):
                same = bool(test_labels[i] == test_labels[j])
                matches[same].append(test[i] @ test[j] >= entry.cosine)
        assert entry.test.fmr == pytest.approx(np.mean(matches[False]))
        assert entry.test.fnmr == pytest.approx(1 - np.mean(matches[True]))
        assert entry.test.different_pairs == len(matches[False])
        assert entry.test.same_pairs == len(matches[True])
        best = {True: [], False: []}  # with the image's own class in the collection, and without
        for i, label in enumerate(test_labels):
            for is_known in best:
                others = [j for j in range(len(test)) if j != i]
                items = [j for j in others if is_known or test_labels[j] != label]
                best[is_known].append(max(test[i] @ test[j] for j in items))
        for refused, is_known in (("known_refused", True), ("strangers_refused", False)):
            assert getattr(entry.test, refused) == np.mean(np.array(best[is_known]) < entry.cosine)
        assert entry.test.known_refused < entry.test.strangers_refused
        for rate_name in ("fmr", "fnmr"):
            low, high = getattr(entry.test, f"{rate_name}_interval")
            assert low <= getattr(entry.test, rate_name) <= high and low < high
