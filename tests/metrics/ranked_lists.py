"""Retrieval scores by definition, from the list of items of each query, best first."""

import numpy as np

NAMES = ("P@1", "RP", "MAP@R", "mAP", "MRR")  # of a report
CUT = ("mAP@3", "MRR@3")


def naive_scores(hits, ks):
    """Every score of one query. `hits[i]`: is the i-th item of its list a positive?"""
    positives = sum(hits)
    if positives == 0:
        return dict.fromkeys([f"R@{k}" for k in ks] + [*NAMES, *CUT], np.nan)
    scores = {f"R@{k}": float(any(hits[:k])) for k in ks}
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    scores["P@1"] = float(hits[0])
    scores["RP"] = sum(hits[:positives]) / positives
    scores["MAP@R"] = sum(precisions[i] for i in range(positives) if hits[i]) / positives
    scores["mAP"] = sum(precisions[i] for i in range(len(hits)) if hits[i]) / positives
    scores["MRR"] = 1 / (1 + list(hits).index(True))
    scores["mAP@3"] = sum(precisions[i] for i in range(min(3, len(hits))) if hits[i]) / positives
    scores["MRR@3"] = scores["MRR"] if any(hits[:3]) else 0.0
    return scores


def search_scores(queries, labels, gallery, gallery_labels, ks, *, within):
    """`naive_scores` of every query; of equally similar items, the negatives come first."""
    scores = []
    for i, query in enumerate(np.asarray(queries, np.float64)):
        distances = ((query[None] - gallery) ** 2).sum(axis=1)
        hits = gallery_labels == labels[i]
        order = [j for j in np.lexsort((hits, distances)) if not (within and i == j)]
        scores.append(naive_scores(hits[order].tolist(), ks))
    return {name: np.array([s[name] for s in scores]) for name in scores[0]}
