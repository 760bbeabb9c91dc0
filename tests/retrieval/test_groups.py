"""Ranks outside of each query's group against a loop over all pairs."""

import numpy as np
import pytest
from search_loops import all_similarities, lattice, naive_ranks, ranks_by_query

from dmljax import retrieval
from dmljax.retrieval import ranking, tiles


@pytest.mark.parametrize(("name", "split"), [("euclidean", False), ("cosine", True)])
@pytest.mark.parametrize("sorted_from", [64, 3, 1])
def test_ranks_with_groups_are_those_of_a_loop(split, name, sorted_from, monkeypatch):
    """By counting, by sorting, and by both: of some queries each."""
    monkeypatch.setattr(ranking, "_SORTED_FROM", sorted_from)
    monkeypatch.setattr(tiles, "STRIP_SIZE", 500)
    rng = np.random.default_rng(int(split))
    x, y, groups = lattice(rng, 90), rng.integers(0, 12, 90), rng.integers(-1, 5, 90)
    x[x.sum(axis=1) == 0] = 1
    if name == "cosine":  # unit vectors along an axis: exact in single precision
        x = np.eye(3, dtype=np.float32)[rng.integers(0, 3, 90)] * x[:, :1].clip(1)
    gallery, items, item_labels, item_groups = {}, x, y, groups
    if split:
        items, item_labels, item_groups = x[7:][::-1], y[20:83], groups[:63]
        items = items[:63]
        gallery = {"gallery": items, "gallery_labels": item_labels, "gallery_groups": item_groups}
    counts = (groups[:, None] != item_groups[None]) | (groups[:, None] < 0)
    expected = naive_ranks(
        all_similarities(x, items, name), y, item_labels, within=not split, counts=counts
    )
    blocks = retrieval.ranks(x, y, groups=groups, similarity_fn=getattr(retrieval, name), **gallery)
    assert ranks_by_query(blocks) == expected and len(expected) > 50
