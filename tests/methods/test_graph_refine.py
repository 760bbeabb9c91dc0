"""Refinement of embeddings by the graph network of their nearest neighbors."""

import functools

import numpy as np
import pytest
from graph_cases import HEADS, C, D, graph_case, jit

from dmljax import metrics
from dmljax.methods import graph_nets as graphs
from dmljax.methods.graph import refine
from dmljax.nets import attention
from dmljax.retrieval import k_reciprocal


def _clusters(rng, classes=8, per_class=12, dim=16, noise=0.2):
    labels = np.repeat(np.arange(classes), per_class)
    x = rng.normal(size=(classes, dim))[labels] / np.sqrt(dim)
    x = x + noise * rng.normal(size=x.shape)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


def test_averaging_neighbors_improves_the_ranking():
    x, labels = _clusters(np.random.default_rng(0))
    means = refine(lambda nodes: nodes.mean(axis=1), x, k=11)
    raw, better = (metrics.retrieval(e, labels, ks=(1,))["MAP@R"] for e in (x, means))
    assert better > raw + 0.05


def test_every_image_is_refined_in_its_own_neighborhood():
    method, params, model_state, _ = graph_case("two layers, necks")
    x, _ = _clusters(np.random.default_rng(1), classes=4, per_class=5, dim=D)
    block_fn = functools.partial(
        graphs.MessagePassing, attention_fn=functools.partial(attention.dot, heads=HEADS)
    )
    block = graphs.GraphNetwork(classes=C, layers=2, block_fn=block_fn, concat_layers=True)
    stats = model_state["batch_stats"]["graph"]

    @jit
    def refine_one(nodes):
        variables = {"params": params["graph"], "batch_stats": stats}
        return block.apply(variables, nodes, train=False)["embeddings"][0]

    # 20 images are three chunks of 7 rows; the last one is filled up with an image.
    options = {"k": 6, "batch_size": 4, "rows": 7}
    hoods = k_reciprocal(x, k=6, batch_size=4)
    assert (hoods[:, 0] == np.arange(len(x))).all()
    expected = np.stack([refine_one(x[hood]) for hood in hoods])
    actual = method.inspect.refine(params, model_state, x, query=None, gallery=None, **options)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-5)
    # An image that could not be read stays NaN.
    broken = np.insert(x, 3, np.nan, axis=0)
    actual = method.inspect.refine(params, model_state, broken, **options)
    assert np.isnan(actual[3]).all()
    np.testing.assert_allclose(np.delete(actual, 3, axis=0), expected, atol=1e-5)


def test_queries_are_refined_by_the_gallery():
    x, _ = _clusters(np.random.default_rng(2), classes=4, per_class=6, dim=D)
    query = np.arange(24) % 3 == 0
    gallery = ~query
    gallery[1] = False
    actual = refine(lambda nodes: nodes[:, 0] + nodes[:, -1], x, query=query, gallery=gallery, k=5)
    near = k_reciprocal(x[query], x[gallery], k=5, batch_size=4)
    expected = x.copy()
    for row, i in enumerate(np.flatnonzero(query)):
        expected[i] = x[i] + x[gallery][near[row, -1]]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    with pytest.raises(ValueError, match="8 images are query and gallery at once"):
        refine(lambda nodes: nodes[:, 0], x, query=query, gallery=np.ones(24, bool))
    with pytest.raises(ValueError, match=r"queries of 16 numbers .* concat_layers=False"):
        twice = lambda nodes: np.concatenate([nodes[:, 0]] * 2, axis=1)  # noqa: E731
        refine(twice, x, query=query, gallery=gallery)
