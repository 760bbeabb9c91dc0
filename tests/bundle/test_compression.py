"""Smaller embeddings: sizes, errors, and their figures against naive loops."""

import numpy as np
import pytest

from dmljax import bundle, metrics
from dmljax.bundle import compression, figures
from dmljax.data.splits import Split

RNG = np.random.default_rng(0)


def _vectors(classes=12, each=6, d=16, noise=0.4, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.linspace(2, 0.2, d)
    centers = np.repeat(rng.normal(size=(classes, d)) * scale, each, axis=0)
    x = centers + noise * rng.normal(size=centers.shape) * scale
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x.astype(np.float32), np.repeat(np.arange(classes), each).astype(np.int32)


TRAIN, _ = _vectors(seed=1)
TEST, LABELS = _vectors(seed=2)
FITTED = compression.fit(TRAIN)
CODECS = compression.codecs(FITTED)


def test_bytes_are_those_that_are_stored():
    for name, codec in CODECS.items():
        assert codec.encode(TEST).nbytes == codec.bytes_per_item * len(TEST), name
    assert {"float16", "int8", "binary", "first_8", "pca_4"} <= set(CODECS)


def test_similarities_are_near_the_cosine():
    exact = TEST @ TEST.T
    errors = {
        name: np.abs(codec.similarities(TEST, codec.encode(TEST)) - exact).max()
        for name, codec in CODECS.items()
    }
    assert errors["float32"] < 1e-6 and errors["float16"] < 1e-3 and errors["int8"] < 0.03
    assert errors["pca_8"] < errors["first_2"]
    all_directions = compression.codec("pca_16", FITTED)
    rotated = all_directions.similarities(TEST, all_directions.encode(TEST))
    np.testing.assert_allclose(rotated, exact, atol=1e-5)


def test_int8_covers_the_training_range_and_clips_beyond():
    codec, low, high = CODECS["int8"], FITTED["low"], FITTED["high"]
    assert np.mean(np.clip(TRAIN, low, high) == TRAIN) > 0.999
    edges = codec.encode(np.stack([low, high, low - 9, high + 9]))
    assert (edges[0] == -128).all() and (edges[1] == 127).all()
    np.testing.assert_array_equal(edges[:2], edges[2:])


def test_binary_counts_equal_bits():
    codes = CODECS["binary"].encode(TEST)
    similarities = CODECS["binary"].similarities(TEST[:5], codes)
    bits = np.median(TRAIN, axis=0) < TEST
    for i in range(5):
        for j in range(len(TEST)):
            assert similarities[i, j] == pytest.approx(2 * (bits[i] == bits[j]).mean() - 1)


def test_main_directions_are_orthogonal_and_sorted():
    directions = FITTED["directions"]
    np.testing.assert_allclose(directions.T @ directions, np.eye(16), atol=1e-6)
    energy = ((TRAIN @ directions) ** 2).sum(axis=0)
    assert (np.diff(energy) < 1e-4).all()


def test_an_unknown_codec():
    with pytest.raises(ValueError, match="there is no codec 'pca_17' of 16 dimensions"):
        compression.codec("pca_17", FITTED)


@pytest.mark.parametrize("name", CODECS)
def test_vectors_without_a_code_are_refused(name):
    codec, vectors = CODECS[name], TEST.copy()
    vectors[[3, 5], 2] = np.nan, np.inf
    for call in (codec.encode, lambda x: codec.similarities(x, codec.encode(TEST))):
        with pytest.raises(ValueError, match="vector number 3 contains NaN or infinity"):
            call(vectors)
        with pytest.raises(ValueError, match=r"shape \(72, 8\): codes need whole ones, \[n, 16\]"):
            call(TEST[:, :8])


def test_rescoring_orders_the_candidates_above_all_others():
    rough, exact = RNG.uniform(-1, 1, (4, 30)), RNG.uniform(-1, 1, (4, 30))
    order = np.argsort(-compression.rescored(rough, exact, candidates=7), axis=1)
    for row in range(4):
        best = np.argsort(-rough[row])[:7]
        assert set(order[row, :7]) == set(best)
        assert list(order[row, :7]) == sorted(best, key=lambda i: -exact[row, i])
        assert list(order[row, 7:]) == list(np.argsort(-rough[row])[7:])


def _naive(similarities):
    """R@1, MAP@R and the ten nearest, one query at a time."""
    recall, maps, nearest = [], [], []
    for i in range(len(LABELS)):
        order = sorted((j for j in range(len(LABELS)) if j != i), key=lambda j: -similarities[i, j])
        hits = [LABELS[j] == LABELS[i] for j in order]
        r = sum(hits)
        recall.append(hits[0])
        maps.append(sum(sum(hits[: k + 1]) / (k + 1) for k in range(r) if hits[k]) / r)
        nearest.append(set(order[:10]))
    return np.mean(recall), np.mean(maps), nearest


@pytest.mark.parametrize("name", ["float32", "int8", "pca_4"])
def test_figures_against_a_loop(name):
    table = figures.compression_table(FITTED, figures.Labeled(TEST, LABELS))
    codec = CODECS[name]
    recall, maps, nearest = _naive(codec.similarities(TEST, codec.encode(TEST)))
    exact = _naive(TEST @ TEST.T)[2]
    common = np.mean([len(a & b) / 10 for a, b in zip(nearest, exact, strict=True)])
    assert table[name]["R@1"] == pytest.approx(recall)
    assert table[name]["MAP@R"] == pytest.approx(maps)
    assert table[name]["recall@10"] == pytest.approx(common)
    assert table["float32"]["recall@10"] == 1
    rescored = table["binary, rescored by int8"]
    assert table["binary"]["recall@10"] < rescored["recall@10"] <= 1
    assert rescored["bytes"] == 2 + 16


def test_scores_are_those_of_the_metrics():
    split = Split(
        records=tuple(range(len(LABELS))), labels=LABELS, names=tuple(map(str, range(12)))
    )
    result = figures.scores(TEST, split)
    expected = metrics.retrieval(TEST, LABELS, ks=(1,))
    for name in ("R@1", "RP", "MAP@R"):
        assert result[name]["value"] == pytest.approx(expected[name])
        low, high = result[name]["interval"]
        assert low <= result[name]["value"] <= high and result[name]["queries"] == len(LABELS)


def test_thresholds_need_classes():
    x, labels = _vectors(classes=16, each=20, noise=0.8, seed=3)
    halves = figures.halves(figures.Labeled(x, labels))
    classes = [set(half.labels.tolist()) for half in halves]
    assert [len(c) for c in classes] == [8, 8] and classes[0] | classes[1] == set(range(16))
    assert all(np.array_equal(half.embeddings, x[np.isin(labels, half.labels)]) for half in halves)
    assert figures.thresholds(*halves, split="test")
    few = figures.halves(figures.Labeled(x[labels < 15], labels[labels < 15]))
    assert figures.thresholds(*few, split="test") == {}


def test_thresholds_against_a_loop_over_pairs():
    x, labels = _vectors(classes=30, each=8, noise=0.8, seed=3)
    test, test_labels = _vectors(classes=20, each=5, noise=0.8, seed=4)
    result = figures.thresholds(
        figures.Labeled(x, labels), figures.Labeled(test, test_labels), split="val"
    )
    assert list(result) == ["fmr=1e-2", "fmr=1e-3"]  # 27,840 pairs are too few for the third
    for name, rate in (("fmr=1e-2", 1e-2), ("fmr=1e-3", 1e-3)):
        entry = result[name]
        different = [x[i] @ x[j] for i in range(len(x)) for j in range(i) if labels[i] != labels[j]]
        assert entry["pairs"] == len(different) and entry["chosen_on"] == "val"
        assert np.mean(np.array(different) >= entry["cosine"]) <= rate
        matches = {True: [], False: []}
        for i in range(len(test)):
            for j in range(i):
                same = bool(test_labels[i] == test_labels[j])
                matches[same].append(test[i] @ test[j] >= entry["cosine"])
        assert entry["test"]["fmr"] == pytest.approx(np.mean(matches[False]))
        assert entry["test"]["fnmr"] == pytest.approx(1 - np.mean(matches[True]))
        assert entry["test"]["different_pairs"] == len(matches[False])
        assert entry["test"]["same_pairs"] == len(matches[True])
        best = {True: [], False: []}  # with the image's own class in the collection, and without
        for i, label in enumerate(test_labels):
            for is_known in best:
                others = [j for j in range(len(test)) if j != i]
                items = [j for j in others if is_known or test_labels[j] != label]
                best[is_known].append(max(test[i] @ test[j] for j in items))
        for refused, is_known in (("known_refused", True), ("strangers_refused", False)):
            assert entry["test"][refused] == np.mean(np.array(best[is_known]) < entry["cosine"])
        assert entry["test"]["known_refused"] < entry["test"]["strangers_refused"]
        for rate_name in ("fmr", "fnmr"):
            low, high = entry["test"][f"{rate_name}_interval"]
            assert low <= entry["test"][rate_name] <= high and low < high


def test_a_bundle_has_codecs(bundle_folder):
    model = bundle.load(bundle_folder)
    images = RNG.integers(0, 256, (6, 12, 12, 3), np.uint8)
    vectors = model.embed_prepared(images)
    codec = model.codec("float16")
    np.testing.assert_allclose(
        codec.similarities(vectors, codec.encode(vectors)), vectors @ vectors.T, atol=1e-3
    )
