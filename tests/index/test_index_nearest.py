"""Exact search keeps every row that could be among the best, whatever float32 rounds."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax.index import nearest
from dmljax.index.nearest import SIMILARITIES


def _loop(query, vectors, k, similarity, where):
    """Positions of the best k by sums of Python floats, of equal ones the first."""
    scored = []
    for i, row in enumerate(vectors):
        pairs = [(float(a), float(b)) for a, b in zip(query, row, strict=True)]
        if similarity == "cosine":
            score = sum(a * b for a, b in pairs)
        else:
            score = -sum((a - b) ** 2 for a, b in pairs)
        if where[i]:
            scored.append((-score, i))
    return [i for _, i in sorted(scored)[:k]]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    similarity=st.sampled_from([*SIMILARITIES]),
    count=st.integers(1, 700),
    queries=st.integers(1, 6),
    k=st.integers(1, 20),
    center=st.sampled_from([0.0, 1.0, 300.0]),
    spread=st.sampled_from([1e-3, 1.0, 100.0]),
    masked=st.booleans(),
)
def test_the_best_of_several_tiles(seed, similarity, count, queries, k, center, spread, masked):
    rng = np.random.default_rng(seed)
    x = center + spread * rng.normal(size=(count + queries, 5))
    x[rng.random(len(x)) < 0.05] *= 1e4
    if similarity == "cosine":
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    x = x.astype(np.float32)
    x[: count // 3] = x[0]  # equal vectors
    vectors, asked = x[:count], x[count:]
    where = rng.random(count) < (rng.choice([0.05, 0.9]) if masked else 1)
    with mock.patch.object(nearest, "_ROWS", max(1, count // 2)):
        results = nearest.search(asked, vectors, k, SIMILARITIES[similarity], where=where)
    for query, (best, _) in zip(asked, results, strict=True):
        assert best.tolist() == _loop(query, vectors, k, similarity, where)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_rows_that_float32_cannot_tell_apart_are_ranked_in_float64(similarity):
    """Finds the right ones among many nearly equal rows in several tiles."""
    rng = np.random.default_rng(0)
    x = np.ones((150_000, 4)) + 1e-6 * rng.normal(size=(150_000, 4))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    vectors, rows = x.astype(np.float32), np.arange(len(x))
    where = np.ones(len(x), bool)
    query, record = vectors[77_777], SIMILARITIES[similarity]
    ((best, _),) = nearest.search(query[None], vectors, 10, record, where=where)
    expected, _ = nearest.best(rows, record.score_fn(query, vectors), 10)
    assert best.tolist() == expected.tolist()
