"""Networks of the graph method: golden numbers of the published code, sizes, masks, dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_attention import (
    DOT,
    GAT,
    GATV2,
    SHARED,
    D,
    N,
    X,
    linear_params,
    norm_params,
    parse_numbers,
)

from dmljax.methods import graph_nets as graph
from dmljax.nets import attention

NORM1 = {"norm1": norm_params(9)}
MLP = {
    "linear1": linear_params(11, 4 * D, D, 12),
    "linear2": linear_params(13, D, 4 * D, 14),
    "norm2": norm_params(15),
}


def _block_fn(attention_fn=attention.dot, *, heads=8, dropout=0.1, **options):
    """Makes blocks with this attention, and these options of `MessagePassing`."""
    if attention_fn is not None:
        attention_fn = functools.partial(attention_fn, heads=heads, dropout=dropout)
    return functools.partial(
        graph.MessagePassing, attention_fn=attention_fn, dropout=dropout, **options
    )


def _graph_network(
    *, attention_fn=attention.dot, heads=8, dropout=0.1, mlp_fn=graph.mlp, **options
):
    block_fn = _block_fn(attention_fn, heads=heads, dropout=dropout, mlp_fn=mlp_fn)
    return graph.GraphNetwork(block_fn=block_fn, **options)


LAYERS = {
    "dot_plus_one": (
        {"attention_fn": attention.dot_plus_one},
        {"att": DOT, **NORM1, **MLP},
        "0.23300 0.40779 0.12319 -0.21137 -0.39256 0.03970 -0.18672 0.57408",
    ),
    "dot": (
        {},
        {"att": DOT, **NORM1, **MLP},
        "0.23732 0.41277 0.11832 -0.20907 -0.39645 0.02323 -0.15203 0.58078",
    ),
    "dot_plus_one, no MLP but its norm": (
        {"attention_fn": attention.dot_plus_one, "mlp_fn": graph.identity},
        {"att": DOT, **NORM1, "norm2": MLP["norm2"]},
        "0.53465 0.40422 0.14473 -0.19153 -0.27720 -0.09554 0.23283 0.52562",
    ),
    "dot, no MLP": (
        {"mlp_fn": None},
        {"att": DOT, **NORM1},
        "0.48067 0.31813 0.22712 0.10585 -0.06005 -0.16321 -0.36508 -0.65109",
    ),
    "no attention": (
        {"attention_fn": None},
        MLP,
        "0.09963 0.55323 0.06036 -0.21323 -0.35547 0.15421 -0.31976 0.39352",
    ),
    "gat": (
        {"attention_fn": functools.partial(attention.gat, **SHARED)},
        {"att": GAT, **NORM1, **MLP},
        "0.25718 0.20318 0.23529 -0.16635 -0.43010 0.13353 0.07387 0.45650",
    ),
    "gatv2": (
        {"attention_fn": functools.partial(attention.gatv2, **SHARED)},
        {"att": GATV2, **NORM1, **MLP},
        "0.25570 0.22444 0.22763 -0.17765 -0.42497 0.14633 -0.00422 0.47519",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_of_the_published_code(name):
    options, params, text = LAYERS[name]
    module = _block_fn(heads=2, **options)()
    # No parameter too few, none too many.
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X, train=False))["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    nodes = module.apply({"params": params}, X, train=False)["nodes"]
    np.testing.assert_allclose(nodes[0], parse_numbers(text), atol=2e-5)


def test_correlations_of_the_published_code():
    expected = np.eye(4)
    expected[[0, 1, 2], [1, 2, 3]] = expected[[1, 2, 3], [0, 1, 2]] = 0.59377, 0.67454, 0.59007
    adjacency, weights = graph.similarity_graph(X)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert adjacency.all()
    adjacency, weights = graph.similarity_graph(X, threshold=0.6)
    np.testing.assert_allclose(weights, np.where(expected > 0.6, expected, 0), atol=1e-5)
    np.testing.assert_array_equal(adjacency, expected > 0.6)


SMALL = {"classes": 3, "layers": 2, "heads": 2, "concat_layers": True}


@functools.cache
def _network(**options):
    module = _graph_network(**{**SMALL, **options})
    return module, module.init(jax.random.key(0), X, train=False)


@functools.cache
def _train():
    module, _ = _network()

    def step(variables, x, key, where):
        return module.apply(
            variables, x, train=True, where=where, rngs={"dropout": key}, mutable="batch_stats"
        )

    return jax.jit(step)


def test_a_network_returns_named_outputs():
    module, variables = _network()
    out = module.apply(variables, X, train=False)
    assert {name: array.shape for name, array in out.items()} == {
        "nodes": (2, N, D),
        "attention": (2, 2, N, N),
        "features": (N, 2 * D),
        "embeddings": (N, 2 * D),
        "neck": (N, 2 * D),
        "logits": (N, 3),
    }
    np.testing.assert_allclose(np.linalg.norm(out["embeddings"], axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(out["features"], np.concatenate(out["nodes"], axis=1))
    np.testing.assert_allclose(np.sum(out["attention"], axis=3), 1, atol=1e-6)
    kernel = variables["params"]["fc"]["kernel"]
    np.testing.assert_allclose(out["logits"], out["neck"] @ kernel, atol=1e-6)
    assert sorted(variables["params"]) == ["bottleneck", "dim_red", "fc", "layers"]
    assert sorted(variables["params"]["layers"]) == ["0", "1"]
    assert sorted(variables["params"]["bottleneck"]) == ["scale"]


def test_dropout_needs_a_key_and_only_while_training():
    _, variables = _network()
    where = np.ones(N, bool)
    first, second, repeated = (
        _train()(variables, X, jax.random.key(k), where)[0]["logits"] for k in (1, 2, 1)
    )
    np.testing.assert_array_equal(first, repeated)
    assert np.abs(first - second).max() > 1e-4
    zero = _graph_network(**SMALL, dropout=0.0)
    out, _ = zero.apply(variables, X, train=True, mutable="batch_stats")  # no key
    np.testing.assert_allclose(
        out["nodes"], _network()[0].apply(variables, X, train=False)["nodes"], atol=1e-6
    )


def _trace(module, nodes=X, **options):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), nodes, train=False, **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _trace(_graph_network(attention_fn=None), where=np.ones(3, bool)),
            r"where of 4 nodes must have the shape \[4\], not \[3\]",
        ),
        (
            lambda: _trace(graph.GraphNetwork(), edge_weights=np.ones((4,), np.float32)),
            r"edge_weights of 4 nodes must have the shape \[4, 4\], not \[4\]",
        ),
        (
            lambda: _trace(graph.GraphNetwork(), nodes=X[None]),
            r"nodes are \[n d\] floats, one row per image, not float32 \[1, 4, 8\]",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
