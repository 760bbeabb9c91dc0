"""Scores of embeddings, in double precision: public functions, and reports built from them.

* Functions of ranks, such as `recall_at_k(ranks, k=1)`, give one value per query. `ranks [q r]` has
  one row per query: the ranks of the query's positives in the gallery, counted from 1, in ascending
  order, and 0 as padding at the end. `dmljax.retrieval.ranks` computes them. A query without a
  positive (a row of zeros) gives NaN.
* Functions of a clustering, such as `nmi(labels, assignment)`, give one number, and so do functions
  of the embeddings, such as `class_deviation(embeddings, labels)`.
* Functions of several runs (`significance.py`), such as `holm(p_values)`, say what their scores
  allow to conclude.
* Reports, `retrieval` and `clustering`, take embeddings and return a dict of scores.

A new score is one function: pass it in `metric_fns` under its display name, together with the
entries of `RANKING_FNS` or `CLUSTERING_FNS`.
"""

from dmljax.metrics import (
    clusters,
    neighbors,
    open_set,
    pair_similarity,
    ranking,
    reports,
    significance,
    spread,
)
from dmljax.metrics.clusters import *  # noqa: F403
from dmljax.metrics.neighbors import *  # noqa: F403
from dmljax.metrics.open_set import *  # noqa: F403
from dmljax.metrics.pair_similarity import *  # noqa: F403
from dmljax.metrics.ranking import *  # noqa: F403
from dmljax.metrics.reports import *  # noqa: F403
from dmljax.metrics.significance import *  # noqa: F403
from dmljax.metrics.spread import *  # noqa: F403

_MODULES = (clusters, neighbors, open_set, pair_similarity, ranking, reports, spread, significance)
# What only reports, studies and bundles of this package use.
_INTERNAL = {
    *("KS", "LESS_IS_BETTER", "ClassHistograms", "Neighborhoods", "display_name", "offered_fmrs"),
    *("expected_best", "fold_difference", "interval_note", "level_text", "paired_difference"),
    *("student_interval", "visible_difference", "welch_difference"),
}
__all__ = sorted({name for module in _MODULES for name in module.__all__} - _INTERNAL)
