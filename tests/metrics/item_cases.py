"""Sixty items with lone queries, unreadable rows and groups, and their pairs by definition."""

import numpy as np
import pytest

KINDS = ("within", "groups", "gallery", "gallery and groups")
every_kind = pytest.mark.parametrize("kind", KINDS)


def case(kind, *, seed=0, d=5):
    """`(embeddings, labels, search)`: the arguments of a function about pairs of items."""
    rng = np.random.default_rng(seed)
    n = 60
    labels = np.concatenate([rng.integers(0, 12, n - 2), [90, 91]]) * 7  # the last two are alone
    centers = {label: rng.standard_normal(d) for label in np.unique(labels)}
    vectors = np.stack([centers[label] for label in labels]) + rng.standard_normal((n, d))
    vectors[[3, 31]] = np.nan
    vectors[7] = 0
    groups = rng.integers(-1, 8, n)  # they cut across classes
    if "gallery" not in kind:
        return vectors, labels, {"groups": groups} if "groups" in kind else {}
    query = rng.random(n) < 0.5
    search = {"gallery": vectors[~query], "gallery_labels": labels[~query]}
    if "groups" in kind:
        search |= {"groups": groups[query], "gallery_groups": groups[~query]}
    return vectors[query], labels[query], search


def pairs(embeddings, labels, search):
    """`(similarities, is_same, counts)`, [q n] in double precision; NaN rows count nowhere."""
    gallery = search.get("gallery", embeddings)
    gallery_labels = search.get("gallery_labels", labels)
    similarities = np.full((len(embeddings), len(gallery)), np.nan)
    is_same, counts = np.zeros((2, *similarities.shape), bool)
    groups = search.get("groups", np.full(len(embeddings), -1))
    gallery_groups = search.get("gallery_groups", groups)
    for i, x in enumerate(embeddings):
        for j, y in enumerate(gallery):
            if np.isnan(x).any() or np.isnan(y).any():
                continue
            size = np.linalg.norm(x) * np.linalg.norm(y)
            similarities[i, j] = x @ y / size if size else 0
            is_same[i, j] = labels[i] == gallery_labels[j]
            in_group = "groups" in search and groups[i] == gallery_groups[j] != -1
            counts[i, j] = not in_group and ("gallery" in search or i != j)
    return similarities, is_same, counts
