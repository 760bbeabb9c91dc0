"""Reports of embeddings against loops over ranked lists, and against a peer."""

import functools

import numpy as np
import pytest
from ranked_lists import NAMES, search_scores

from dmljax import metrics, retrieval


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("n, classes", [(60, 25), (150, 3), (150, 50)])
def test_retrieval_scores_are_those_of_ranked_lists(n, classes, split):
    rng = np.random.default_rng(n + classes)
    ks = (1, 2, 7, 50)
    x, y = rng.integers(0, 4, (n, 3)).astype(np.float32), rng.integers(0, classes, n)
    items, item_labels = (x[5:] + 1, y[5:][::-1]) if split else (x, y)
    expected = search_scores(x, y, items, item_labels, ks, within=not split)
    gallery = {"gallery": items, "gallery_labels": item_labels} if split else {}
    values = metrics.per_query(x, y, ks=ks, **gallery)
    scores = metrics.retrieval(x, y, ks=ks, per_class=True, tile=128, **gallery)
    by_class = scores.pop("per_class")
    is_scored = ~np.isnan(expected["mAP"])
    assert scores.pop("without_positive") == (~is_scored).sum()
    assert list(scores) == list(values) == [*(f"R@{k}" for k in ks), *NAMES]
    for name in values:
        value = expected[name]
        np.testing.assert_allclose(values[name], value, atol=1e-12)
        np.testing.assert_allclose(scores[name], np.mean(value[is_scored]), atol=1e-12)
        assert set(by_class[name]) == set(y[is_scored].tolist())
        for label, mean in by_class[name].items():
            np.testing.assert_allclose(mean, np.nanmean(value[y == label]), atol=1e-12)


def test_without_positives_scores_are_nan_with_a_warning():
    x, y = np.eye(4), np.arange(4)
    with pytest.warns(UserWarning, match="none of the 4 queries has an item of its label"):
        scores = metrics.retrieval(x, y, ks=(1,))
    assert scores.pop("without_positive") == 4
    assert scores and np.isnan(list(scores.values())).all()


def test_clustering_is_the_mean_over_seeds():
    rng = np.random.default_rng(4)
    y = rng.integers(0, 12, 400)
    x = rng.standard_normal((12, 5))[y] + 0.5 * rng.standard_normal((400, 5))
    scores = metrics.clustering(x, y, seeds=(3, 4))
    assignments = [retrieval.kmeans(x, k=12, seed=s).assignment for s in (3, 4)]
    names = {"NMI": metrics.nmi, "AMI": metrics.ami, "ARI": metrics.ari, "F1": metrics.pairwise_f1}
    assert list(scores) == [f"{name}{end}" for name in names for end in ("", "_std")]
    for name, score_fn in names.items():
        values = [score_fn(y, assignment) for assignment in assignments]
        np.testing.assert_allclose(
            [scores[name], scores[f"{name}_std"]], [np.mean(values), np.std(values)]
        )
    assert scores["NMI"] > 0.5 and scores["NMI_std"] > 0


X, Y = np.eye(6), np.array([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: metrics.retrieval(X, Y),
            "K of R@K must be an integer from 1 to 5 items",
        ),
        (lambda: metrics.retrieval(X, Y, gallery=X, gallery_labels=Y, ks=(7,)), "6 items to find"),
        (lambda: metrics.retrieval(X, Y, ks=(0,)), "to find, got 0"),
        (lambda: metrics.retrieval(X * np.nan, Y, ks=(1,)), r"embeddings\[0\] is not finite"),
        (lambda: metrics.retrieval(X[:0], Y[:0], ks=()), "not empty"),
        (lambda: metrics.clustering(X, Y, seeds=()), r"got seeds=\(\)"),
        (lambda: metrics.clustering(X, Y[:4]), r"each of the 6 .*labels of shape \(4,\)"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def spread(ranks, *, scale=1.0):
    """A metric of a user: rank of the last positive."""
    return scale * ranks.max(axis=1)


def first_of_even_classes(ranks, *, labels):
    """A metric of a user that sees the labels of its queries."""
    return np.where(labels % 2 == 0, ranks[:, 0] == 1, 0.0)


def test_a_metric_of_a_user_is_one_function():
    x = np.array([0.0, 1.0, 2.1, 3.3, 4.6, 20.0])[:, None]
    y = np.array([0, 1, 0, 0, 1, 2])
    fns = {"spread": spread, "R@2": functools.partial(metrics.recall_at_k, k=2)}
    values = metrics.per_query(x, y, ks=(), metric_fns=fns)
    np.testing.assert_array_equal(values["spread"], [3, 4, 3, 4, 3, np.nan])
    scores = metrics.retrieval(x, y, ks=(1,), metric_fns=fns)
    assert scores == {"R@1": 1 / 5, "spread": 17 / 5, "R@2": 3 / 5, "without_positive": 1}
    even = metrics.per_query(x, y, ks=(), metric_fns={"even": first_of_even_classes})["even"]
    np.testing.assert_array_equal(even, [0, 0, 0, 1, 0, np.nan])
    beside = metrics.retrieval(x, y, ks=(1,), metric_fns={**metrics.RANKING_FNS, "spread": spread})
    plain = metrics.retrieval(x, y, ks=(1,))
    assert beside.pop("spread") == 17 / 5 and beside == plain


def purity(labels, assignment):
    """A metric of a user: share of items whose label is the most frequent of their cluster."""
    largest = [np.bincount(labels[assignment == c]).max() for c in np.unique(assignment)]
    return sum(largest) / len(labels)


def test_a_clustering_metric_of_a_user_is_one_function():
    rng = np.random.default_rng(6)
    x, y = rng.standard_normal((60, 3)), rng.integers(0, 4, 60)
    scores = metrics.clustering(x, y, seeds=(0, 1), metric_fns={"purity": purity})
    runs = [purity(y, retrieval.kmeans(x, k=4, seed=s).assignment) for s in (0, 1)]
    assert scores == {"purity": np.mean(runs), "purity_std": np.std(runs)}


def test_a_metric_with_the_wrong_shape_is_named():
    with pytest.raises(ValueError, match=r"metric 'bad' gave an array of shape \(\) for ranks"):
        metrics.retrieval(X, Y, ks=(), metric_fns={"bad": lambda ranks: ranks.mean()})


def test_the_display_name_of_a_metric():
    assert metrics.display_name("recall_at_k", {"k": 10}) == "R@10"
    assert metrics.display_name("pairwise_f1") == "F1"
    assert metrics.display_name("package.module:nmi", {"scale": 2.0}) == "nmi"
    with pytest.raises(ValueError, match="recall_at_k needs 'k'"):
        metrics.display_name("recall_at_k")


def test_shares_of_several_processes_have_the_scores_of_one(shares=3):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 3)), rng.integers(0, 40, 90)
    options = {"ks": (1, 4)}
    expected = metrics.retrieval(x, y, **options)
    assert expected["without_positive"] > 0
    with pytest.raises(ValueError, match="go together"):
        metrics.retrieval(x, y, **options, share=(0, shares))
    sent = []
    for i in range(shares):
        metrics.retrieval(x, y, **options, share=(i, shares), sum_fn=lambda a: sent.append(a) or a)
    total = np.sum(sent, axis=0)
    for i in range(shares):
        scores = metrics.retrieval(x, y, **options, share=(i, shares), sum_fn=lambda a: total)
        assert scores == expected  # bit for bit


def test_a_class_average_weighs_small_classes_as_large_ones():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), rng.integers(2, 9, 10))
    x = rng.standard_normal((10, 4))[labels] + rng.standard_normal((len(labels), 4))
    values = metrics.per_query(x, labels, ks=(1,))
    scores = metrics.retrieval(x, labels, ks=(1,), average="classes")
    plain = metrics.retrieval(x, labels, ks=(1,))
    for name, value in values.items():
        of_class = [value[labels == c] for c in np.unique(labels)]
        means = [float(np.mean(v)) for v in of_class if not np.isnan(v).all()]
        assert scores[name] == pytest.approx(np.mean(means), rel=1e-12)
    assert scores["R@1"] != plain["R@1"] and scores["without_positive"] == plain["without_positive"]
    with pytest.raises(ValueError, match="average 'images' is not known"):
        metrics.retrieval(x, labels, average="images")
