"""Scores of embeddings, in double precision: public functions, and reports built from them.

* Functions of ranks, such as `recall_at_k(ranks, k=1)`, give one value per query. `ranks [q r]` has
  one row per query: the ranks of the query's positives in the gallery, counted from 1, in ascending
  order, and 0 as padding at the end. `dmljax.retrieval.ranks` computes them. A query without a
  positive (a row of zeros) gives NaN.
* Functions of a clustering, such as `nmi(labels, assignment)`, give one number, and so do functions
  of the embeddings, such as `class_deviation(embeddings, labels)`.
* Functions of several runs (`statistics.py`), such as `student_interval(values)`, say what their
  scores allow to conclude.
* Reports, `retrieval` and `clustering`, take embeddings and return a dict of scores.

A new score is one function: pass it in `metric_fns`, beside the entries of `RANKING_FNS` or
`CLUSTERING_FNS`, under the name that the report shows.
"""

from dmljax import renames
from dmljax.metrics.bootstrap import AVERAGES, average, bootstrap_means, interval, interval_note
from dmljax.metrics.classes import (
    ClassTable,
    Confusions,
    class_table,
    confusions,
    density,
    wilson_upper,
)
from dmljax.metrics.clusters import ami, ari, nmi, pairwise_f1
from dmljax.metrics.comparison import Comparison, McNemar, compare, mcnemar
from dmljax.metrics.deviation import class_deviation
from dmljax.metrics.hubness import Hubs, hubs
from dmljax.metrics.neighbors import Neighborhoods, neighborhoods, worst_queries
from dmljax.metrics.pair_similarity import (
    SimilarityHistograms,
    alignment,
    fmr_at,
    fnmr_at,
    offered_fmrs,
    similarity_at_share,
    similarity_histograms,
    threshold_at_fmr,
    uniformity,
)
from dmljax.metrics.projection import MapPositions, map_positions
from dmljax.metrics.ranking import (
    average_precision,
    map_at_k,
    map_at_r,
    precision_at_1,
    r_precision,
    recall_at_k,
    reciprocal_rank,
    reciprocal_rank_at_k,
)
from dmljax.metrics.reports import (
    CLUSTERING_FNS,
    LESS_IS_BETTER,
    RANKING_FNS,
    SCIKIT_LEARN_KMEANS,
    ClusteringFn,
    RankingFn,
    clustering,
    per_query,
    retrieval,
    shown_name,
)
from dmljax.metrics.spread import effective_rank, participation, rho_spectrum, spectrum
from dmljax.metrics.statistics import (
    Difference,
    Estimate,
    expected_best,
    fold_difference,
    holm,
    paired_difference,
    student_interval,
    visible_difference,
    visible_paired_difference,
    welch_difference,
)
from dmljax.metrics.suspects import (
    NearDuplicates,
    SuspectedLabels,
    gray_correlation,
    near_duplicates,
    suspected_labels,
)

__all__ = [
    "AVERAGES",
    "CLUSTERING_FNS",
    "LESS_IS_BETTER",
    "RANKING_FNS",
    "SCIKIT_LEARN_KMEANS",
    "ClassTable",
    "ClusteringFn",
    "Comparison",
    "Confusions",
    "Difference",
    "Estimate",
    "Hubs",
    "MapPositions",
    "McNemar",
    "NearDuplicates",
    "Neighborhoods",
    "RankingFn",
    "SimilarityHistograms",
    "SuspectedLabels",
    "alignment",
    "ami",
    "ari",
    "average",
    "average_precision",
    "bootstrap_means",
    "class_deviation",
    "class_table",
    "clustering",
    "compare",
    "confusions",
    "density",
    "effective_rank",
    "expected_best",
    "fmr_at",
    "fnmr_at",
    "fold_difference",
    "gray_correlation",
    "holm",
    "hubs",
    "interval",
    "interval_note",
    "map_at_k",
    "map_at_r",
    "map_positions",
    "mcnemar",
    "near_duplicates",
    "neighborhoods",
    "nmi",
    "offered_fmrs",
    "paired_difference",
    "pairwise_f1",
    "participation",
    "per_query",
    "precision_at_1",
    "r_precision",
    "recall_at_k",
    "reciprocal_rank",
    "reciprocal_rank_at_k",
    "retrieval",
    "rho_spectrum",
    "shown_name",
    "similarity_at_share",
    "similarity_histograms",
    "spectrum",
    "student_interval",
    "suspected_labels",
    "threshold_at_fmr",
    "uniformity",
    "visible_difference",
    "visible_paired_difference",
    "welch_difference",
    "wilson_upper",
    "worst_queries",
]

__getattr__ = renames.old_functions(__name__, "metric")
