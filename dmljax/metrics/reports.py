"""Reports: every score of embeddings at once, as a dict from the display name to the value.

The arguments of a search (`gallery`, `gallery_labels`, `similarity_fn`, `tile`, `devices`) are as
in `dmljax.retrieval`. A query without a positive counts in no score.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dmljax import retrieval as _retrieval
from dmljax.metrics import clusters, ranking, significance
from dmljax.retrieval.inputs import Embeddings, Labels, check_k, check_share, counts_of
from dmljax.retrieval.ranking import Ranks

__all__ = [
    "CLUSTERING_FNS",
    "KS",
    "LESS_IS_BETTER",
    "RANKING_FNS",
    "SCIKIT_LEARN_KMEANS",
    "clustering",
    "display_name",
    "per_query",
    "retrieval",
]

# ranks [q r] (and, if it takes them, `labels=[q]`) -> one value per query [q]
RankingFn = Callable[..., np.ndarray]
ClusteringFn = Callable[..., float]  # (labels [b], assignment [b]) -> one number


class Score(NamedTuple):
    """A function of this package, its display name, and a sentence for tables of scores."""

    fn: Callable
    name: str
    meaning: str = ""
    in_reports: bool = True
    less_is_better: bool = False


SCORES = (
    Score(
        ranking.recall_at_k,
        "R@{k}",
        "fraction of queries whose nearest image has their class",  # of R@1
        in_reports=False,  # except by the argument `ks`
    ),
    Score(ranking.precision_at_1, "P@1", "precision of the nearest image"),
    Score(ranking.r_precision, "RP", "fraction of the R nearest images that have the class"),
    Score(
        ranking.map_at_r,
        "MAP@R",
        "average precision over the R nearest, with R images of the class",
    ),
    Score(ranking.average_precision, "mAP", "average precision over the whole ranking"),
    Score(ranking.reciprocal_rank, "MRR", "mean of 1 / rank of the first right image"),
    Score(ranking.map_at_k, "mAP@{k}", in_reports=False),
    Score(ranking.reciprocal_rank_at_k, "MRR@{k}", in_reports=False),
    Score(clusters.nmi, "NMI", "agreement of k-means with the classes"),
    Score(clusters.ami, "AMI", "NMI corrected for chance"),
    Score(clusters.ari, "ARI", "agreement of pairs, corrected for chance"),
    Score(
        clusters.pairwise_f1, "F1", "agreement of the pairs of k-means with those of the classes"
    ),
    Score(clusters.class_deviation, "class_deviation", in_reports=False, less_is_better=True),
)


def _in_reports(module: ModuleType) -> Mapping[str, Callable]:
    scores = (x for x in SCORES if x.in_reports and x.fn.__module__ == module.__name__)
    return MappingProxyType({score.name: score.fn for score in scores})


RANKING_FNS: Mapping[str, RankingFn] = _in_reports(ranking)
CLUSTERING_FNS: Mapping[str, ClusteringFn] = _in_reports(clusters)
LESS_IS_BETTER = frozenset(score.name for score in SCORES if score.less_is_better)
MEANINGS = {score.name.format(k=1): score.meaning for score in SCORES if score.meaning}
MEANINGS["knn"] = "accuracy of the vote of the nearest training images"
KS = (1, 2, 4, 8)  # the default K of R@K
# The default options of k-means in scikit-learn, for comparison with published scores.
SCIKIT_LEARN_KMEANS: Mapping[str, Any] = MappingProxyType(
    {"trials": None, "iterations": 300, "tolerance": 1e-4}
)
_SCORED = "is scored"  # not a display name: NaN for a query without a positive


def display_name(name: str, options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Returns the display name of a function of this package, given its keyword arguments.

    The display name of another function ('my_package.my_module:my_metric') is its name.
    """
    names = {score.fn.__name__: score.name for score in SCORES}
    _, colon, function = name.rpartition(":")
    if colon or name not in names:
        return function
    try:
        return names[name].format(**options)
    except KeyError as missing:
        raise ValueError(f"{name} needs {missing}, such as {name}(k=1)") from None


def retrieval(
    embeddings: Embeddings,
    labels: Labels,
    *,
    metric_fns: Mapping[str, RankingFn] = RANKING_FNS,
    average: str = "queries",
    per_class: bool = False,
    share: tuple[int, int] | None = None,
    sum_fn: Callable[[np.ndarray], np.ndarray] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Computes the means of `per_query` over the queries that have a positive.

    'without_positive' is the count of the other queries.

    With `average="classes"`, the mean over classes of the mean of each class's queries: a large
    class weighs as much as a small one. `per_class` adds 'per_class': {score: {label: mean over
    the queries of that label}}. With `share=(i, n)` only the i-th of n parts of the queries is
    ranked here. It needs `sum_fn`, which returns the sum of an array over the n processes that rank
    the parts; all of them get the same scores, bitwise as in one process. All other arguments are
    explained in `per_query`.

    >>> embeddings = np.array([[0.0], [1.0], [2.5], [9.0]])
    >>> scores = metrics.retrieval(embeddings, np.array([0, 0, 1, 1]), ks=(1, 2))
    >>> scores["R@1"], scores["R@2"], scores["without_positive"]
    (0.75, 0.75, 0)
    """
    check_share(share, sum_fn)
    significance.check_average(average)
    metric_fns = {**metric_fns, _SCORED: ranking.reciprocal_rank}
    values = per_query(embeddings, labels, metric_fns=metric_fns, share=share, **options)
    is_scored = ~np.isnan(values.pop(_SCORED))
    if sum_fn is not None:
        rows = np.stack([is_scored, *values.values()]).astype(np.float64)
        total = sum_fn(np.where(is_scored, rows, 0))
        is_scored = total[0] > 0
        values = dict(zip(values, np.where(is_scored, total[1:], np.nan), strict=True))
    if not is_scored.any():
        warnings.warn(
            f"none of the {len(is_scored)} queries has an item of its label to find, so that every "
            "retrieval score is NaN: check the labels of the queries and of the gallery",
            stacklevel=2,
        )
    scores: dict[str, Any] = {
        name: significance.average(value, np.asarray(labels), over=average)
        for name, value in values.items()
    }
    scores["without_positive"] = int((~is_scored).sum())
    if per_class:
        classes, codes = np.unique(np.asarray(labels)[is_scored], return_inverse=True)
        scores["per_class"] = {}
        for name, value in values.items():
            means = np.bincount(codes, value[is_scored]) / np.bincount(codes)
            scores["per_class"][name] = dict(zip(classes.tolist(), means.tolist(), strict=True))
    return scores


def per_query(
    embeddings: Embeddings,
    labels: Labels,
    *,
    gallery: Embeddings | None = None,
    ks: Sequence[int] = KS,
    metric_fns: Mapping[str, RankingFn] = RANKING_FNS,
    **search: Any,
) -> dict[str, Float[np.ndarray, "q"]]:
    """Computes the retrieval scores of every query, NaN for a query without a positive.

    `ks` are the K of R@K. `metric_fns` are the other scores: display name -> function of `ranks
    [q r]`, called once for every block of queries. A function with a keyword argument `labels` also
    gets the labels `[q]` of these queries. All other arguments are those of `retrieval.ranks`, such
    as `gallery_labels`, `similarity_fn` and `groups`. With `share=(i, n)` only the i-th of n parts
    of the queries is ranked, and the others are NaN.

    >>> embeddings = np.array([[0.0], [1.0], [2.5], [9.0]])
    >>> metrics.per_query(embeddings, np.array([0, 0, 1, 1]), ks=(1,))["MRR"]
    array([1.        , 1.        , 0.33333333, 1.        ])
    """
    candidates = counts_of(embeddings, gallery).candidates
    for k in ks:
        check_k(k, candidates, of="items to find", name="K of R@K")
    score_fns: dict[str, RankingFn] = {
        display_name("recall_at_k", {"k": k}): partial(ranking.recall_at_k, k=k) for k in ks
    }
    score_fns |= metric_fns
    blocks = _retrieval.ranks(embeddings, labels, gallery=gallery, **search)
    return values_of_queries(blocks, np.asarray(labels), score_fns)


def values_of_queries(
    blocks: Iterable[Ranks], labels: Int[np.ndarray, "q"], score_fns: Mapping[str, RankingFn]
) -> dict[str, Float[np.ndarray, "q"]]:
    """Computes functions of ranks, NaN for a query without a positive, which is in no block."""
    sees_labels = {
        name for name, fn in score_fns.items() if "labels" in inspect.signature(fn).parameters
    }
    values = {name: np.full(np.shape(labels), np.nan) for name in score_fns}
    for block in blocks:
        for name, score_fn in score_fns.items():
            options = {"labels": labels[block.queries]} if name in sees_labels else {}
            scores = np.asarray(score_fn(block.ranks, **options))
            if scores.shape != block.queries.shape:
                raise ValueError(
                    f"metric {name!r} gave an array of shape {scores.shape} for ranks of shape "
                    f"{block.ranks.shape}: return one value per query, {block.queries.shape}"
                )
            values[name][block.queries] = scores
    return values


def clustering(
    embeddings: Embeddings,
    labels: Labels,
    *,
    metric_fns: Mapping[str, ClusteringFn] = CLUSTERING_FNS,
    seeds: Sequence[int] = (0, 1, 2),
    **kmeans_options: Any,
) -> dict[str, float]:
    """Computes scores of k-means with one cluster per label: mean and std over seeds.

    `metric_fns`: display name -> function of (labels, assignment). `seeds` seed k-means; 'NMI_std'
    is the standard deviation of 'NMI' over them. All other arguments, such as `starts`,
    `iterations` and `devices`, are passed to `retrieval.kmeans`.

    Published numbers are the score of scikit-learn's KMeans with n_init=10, which is 0.5 to 1.3
    points above the mean of single starts: `seeds=(0,), starts=10, **metrics.SCIKIT_LEARN_KMEANS`.

    >>> embeddings = np.array([[0.0], [1.0], [8.0], [9.0]])
    >>> metrics.clustering(embeddings, np.array([0, 0, 1, 1]))["NMI"]
    1.0
    """
    labels = np.asarray(labels)
    if not len(seeds) or labels.shape != (len(embeddings),):
        raise ValueError(
            f"give one seed or more and a label for each of the {len(embeddings)} embeddings, got "
            f"seeds={tuple(seeds)} and labels of shape {labels.shape}"
        )
    k = len(np.unique(labels))
    values: dict[str, list[float]] = {name: [] for name in metric_fns}
    for seed in seeds:
        assignment = _retrieval.kmeans(embeddings, k=k, seed=seed, **kmeans_options).assignment
        for name, metric_fn in metric_fns.items():
            values[name].append(float(metric_fn(labels, assignment)))
    scores: dict[str, float] = {}
    for name, value in values.items():
        scores |= {name: float(np.mean(value)), f"{name}_std": float(np.std(value))}
    return scores
