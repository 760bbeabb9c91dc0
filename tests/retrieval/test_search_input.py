"""Bad input of a search is named in one line."""

import numpy as np
import pytest
from search_loops import all_ranks

from dmljax import retrieval
from dmljax.retrieval import inputs

BAD = np.ones((6, 2))
BAD[4, 1] = np.nan
X, Y = np.eye(6), np.array([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: all_ranks(BAD, Y), r"embeddings\[4\] is not finite"),
        (lambda: all_ranks(X * 1e25, Y), r"embeddings\[0\] is not finite.*scale"),
        (
            lambda: all_ranks(X[:, :2], Y, gallery=BAD, gallery_labels=Y),
            r"gallery\[4\] is not finite",
        ),
        (lambda: all_ranks(X[0], Y), r"shape \(6,\)"),
        (lambda: all_ranks(X[:0], Y[:0]), r"shape \(0, 6\).*not empty"),
        (lambda: all_ranks(X * 1j, Y), "complex128: give real"),
        (lambda: all_ranks(X, Y[:5]), r"labels are int64 of shape \(5,\): .* of the 6 embeddings"),
        (lambda: all_ranks(X, Y.astype(np.float32)), "labels are float32.*give integers"),
        (lambda: all_ranks(X, Y, gallery=X), "give both, or only labels"),
        (lambda: all_ranks(X, Y, gallery_labels=Y), "give both, or only labels"),
        (
            lambda: all_ranks(X, Y, gallery=X[:, :3], gallery_labels=Y),
            "6 dimensions.*gallery has 3",
        ),
        (
            lambda: all_ranks(X, Y, gallery=X, gallery_labels=Y.astype(np.uint64)),
            "labels are int64 .* and gallery_labels uint64",
        ),
        (lambda: all_ranks(X, Y, groups=Y, gallery=X, gallery_labels=Y), "give both, or only"),
        (lambda: all_ranks(X, Y, groups=Y, gallery_groups=Y), "give both, or only groups"),
        (lambda: all_ranks(X, Y, groups=Y[:3]), r"^groups are int64 of shape \(3,\): .* of the 6"),
        (lambda: all_ranks(X, Y, groups=np.ones(6)), r"groups are float64 of shape \(6,\)"),
        (
            lambda: retrieval.nearest(X, X, k=1, groups=np.stack([Y, Y], 1), gallery_groups=Y),
            r"shape \(6, 2\) and gallery_groups .* of shape \(6,\): give integers",
        ),
        (lambda: all_ranks(X, Y, tile=100), "tile=100 must be a positive multiple of 128"),
        (lambda: retrieval.nearest(X, k=6), "k must be an integer from 1 to 5 items"),
        (lambda: retrieval.nearest(X, X, k=7), "k must be .* from 1 to 6 items"),
        (lambda: retrieval.nearest(X, X, k=0), "k must be .*, got 0"),
        (lambda: retrieval.kmeans(X, k=7), "k must be .* from 1 to 6 embeddings"),
        (lambda: all_ranks(X, Y, devices=[]), "^devices is empty: leave it out"),
        (lambda: retrieval.kmeans(X, k=2, devices=[]), "^devices is empty: leave it out"),
        (
            lambda: all_ranks(X, Y, filter_dtype="float99"),
            "filter_dtype='float99' with .*: give jnp.bf",
        ),
        (lambda: all_ranks(X.astype(str), Y), "^embeddings are <U32: give real numbers"),
        (lambda: all_ranks(X, Y.astype(str)), "^labels are <U21 .*: give integers"),
        (lambda: all_ranks(X, Y, gallery=X[:0], gallery_labels=Y[:0]), "^gallery of shape"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_number_that_is_no_integer_is_named(unchecked):
    """k-means went on for ever."""
    with pytest.raises(ValueError, match="from 1 to 6 embeddings, got 2"):
        retrieval.kmeans(X, k=2.5)
    with pytest.raises(ValueError, match="from 1 to 5 items to find, got 2"):
        retrieval.nearest(X, k=2.0)


def test_every_row_of_a_large_array_is_read():
    """In pieces of 4,096 rows."""
    x = np.repeat(np.linspace(0, 8, 9000)[:, None], 2, axis=1)
    assert inputs.check_vectors(x, None)[2].tolist() == [4, 4]
    for row in (4095, 4096, 8999):
        bad = x.copy()
        bad[row, 1] = np.inf
        with pytest.raises(ValueError, match=rf"embeddings\[{row}\] is not finite"):
            inputs.check_vectors(bad, None)
