"""Scores of embeddings, in double precision: public functions, and reports built from them.

* Functions of ranks, such as `recall_at_k(ranks, k=1)`, give one value per query. `ranks [q r]` has
  one row per query: the ranks of the query's positives in the gallery, counted from 1, in ascending
  order, and 0 as padding at the end. `dmljax.retrieval.ranks` computes them. A query without a
  positive (a row of zeros) gives NaN.
* Functions of a clustering, such as `nmi(labels, assignment)`, give one number.
* Reports, `retrieval` and `clustering`, take embeddings and return a dict of scores.

A new score is one function: pass it in `metric_fns`, beside those of `RANKING_FNS` or
`CLUSTERING_FNS`, under the name that the report shows.
"""

from dmljax.metrics.bootstrap import interval
from dmljax.metrics.clusters import ami, ari, nmi, pairwise_f1
from dmljax.metrics.ranking import (
    map_at_r,
    mean_average_precision,
    mean_reciprocal_rank,
    precision_at_1,
    r_precision,
    recall_at_k,
)
from dmljax.metrics.reports import (
    CLUSTERING_FNS,
    RANKING_FNS,
    ClusteringFn,
    RankingFn,
    clustering,
    per_query,
    retrieval,
    shown_name,
)

__all__ = [
    "CLUSTERING_FNS",
    "RANKING_FNS",
    "ClusteringFn",
    "RankingFn",
    "ami",
    "ari",
    "clustering",
    "interval",
    "map_at_r",
    "mean_average_precision",
    "mean_reciprocal_rank",
    "nmi",
    "pairwise_f1",
    "per_query",
    "precision_at_1",
    "r_precision",
    "recall_at_k",
    "retrieval",
    "shown_name",
]
