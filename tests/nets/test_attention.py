"""Attention and message passing: golden numbers of the published code, and plain loops."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax.methods.graph import nets as graph
from dmljax.nets import attention

N, D = 4, 8


# --- golden numbers -----------------------------------------------------------------------------

X = np.sin(0.9 * np.arange(N * D).reshape(N, D) + 0.2).astype(np.float32)


def _wave(p, *shape):
    """A tensor in torch's layout, weights [out, in]."""
    scale = 0.8 if p > 20 else 0.3
    return scale * np.sin(0.7 * np.arange(np.prod(shape)).reshape(shape) + 1.3 * p)


def _dense(p, out, width, bias=None):
    kernel = {"kernel": _wave(p, out, width).T}
    return kernel if bias is None else {**kernel, "bias": _wave(bias, out)}


def _norm(p):
    return {"scale": _wave(p, D), "bias": _wave(p + 1, D)}


DOT = {
    "q_linear": _dense(1, D, D, 2),
    "v_linear": _dense(3, D, D, 4),
    "k_linear": _dense(5, D, D, 6),
    "out": _dense(7, D, D, 8),
}
GAT = {
    "layer1": {"linear": _dense(21, D, D), "attn": _dense(22, 1, 2 * D // 2)},
    "output": {"linear": _dense(23, D, D), "attn": _dense(24, 1, 2 * D)},
}
GATV2 = {
    "layer1": {"linear_l": _dense(21, D, D), "attn": _dense(22, 1, D // 2)},
    "output": {"linear_l": _dense(23, D, D), "attn": _dense(24, 1, D)},
}
NORM1 = {"norm1": _norm(9)}
MLP = {"linear1": _dense(11, 4 * D, D, 12), "linear2": _dense(13, D, 4 * D, 14), "norm2": _norm(15)}
SHARED = {"share_vector": True, "share_projection": True}


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


BLOCKS = {
    "dot_plus_one": (
        attention.dot_plus_one(heads=2),
        DOT,
        {0: "-0.88749 -1.18236 -0.94010 -0.27141 0.51954 1.07348 1.13931 0.68798"},
    ),
    "dot": (
        attention.dot(heads=2),
        DOT,
        {0: "-1.02260 -1.36854 -1.09378 -0.32360 0.59226 1.23847 1.32251 0.80716"},
    ),
    "gat": (
        attention.gat(heads=2, **SHARED),
        GAT,
        {
            0: "-2.45104 -1.08111 0.77410 2.28183 2.76533 2.00755 0.34865 -1.46675",
            3: "-2.29650 -1.42598 0.08462 1.55724 2.33086 2.05823 0.86173 -0.72158",
        },
    ),
    "gatv2": (
        attention.gatv2(heads=2, **SHARED),
        GATV2,
        {
            0: "-1.58899 -0.90549 0.18446 1.19161 1.66388 1.38929 0.49109 -0.62754",
            3: "-1.60022 -0.93527 0.14950 1.16716 1.66092 1.40915 0.52485 -0.59503",
        },
    ),
}
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


def _numbers(text):
    return np.array(text.split(), float)


@pytest.mark.parametrize("name", BLOCKS)
def test_attention_of_the_published_code(name):
    module, params, rows = BLOCKS[name]
    nodes = module.apply({"params": params}, X, train=False)["nodes"]
    for row, text in rows.items():
        np.testing.assert_allclose(nodes[row], _numbers(text), atol=2e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_of_the_published_code(name):
    options, params, text = LAYERS[name]
    module = _block_fn(heads=2, **options)()
    # No parameter too few, none too many.
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X, train=False))["params"]
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    nodes = module.apply({"params": params}, X, train=False)["nodes"]
    np.testing.assert_allclose(nodes[0], _numbers(text), atol=2e-5)


def test_correlations_of_the_published_code():
    expected = np.eye(4)
    expected[[0, 1, 2], [1, 2, 3]] = expected[[1, 2, 3], [0, 1, 2]] = 0.59377, 0.67454, 0.59007
    adjacency, weights = graph.similarity_graph(X)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    assert adjacency.all()
    adjacency, weights = graph.similarity_graph(X, threshold=0.6)
    np.testing.assert_allclose(weights, np.where(expected > 0.6, expected, 0), atol=1e-5)
    np.testing.assert_array_equal(adjacency, expected > 0.6)


def test_shifted_correlations():
    adjacency, weights = graph.similarity_graph(X, positive_fn=graph.shifted, threshold=0.0)
    plain = np.corrcoef(X)
    expected = plain - plain.min()
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
    off = ~np.eye(4, dtype=bool)
    np.testing.assert_array_equal(adjacency, off & (plain > plain.min() + 1e-6))
    # A masked row neither sets the minimum nor stays in the graph.
    where = np.array([True, True, True, False])
    few = graph.similarity_graph(X, positive_fn=graph.shifted, threshold=0.0, where=where)
    dropped = graph.similarity_graph(X[:3], positive_fn=graph.shifted, threshold=0.0)
    np.testing.assert_allclose(few.weights[:3, :3], dropped.weights, atol=1e-6)
    assert not few.adjacency[3].any() and not few.adjacency[:, 3].any()


def test_a_constant_row_has_no_correlation():
    weights = graph.correlation(np.concatenate([X, np.ones((1, D), np.float32)]))
    np.testing.assert_array_equal(weights[4], 0)


# --- parameter counts ---------------------------------------------------------------------------

CARS = {"classes": 98, "layers": 2, "heads": 8, "concat_layers": True}
CUB = {"classes": 100, "layers": 1, "heads": 2}
# Of the published code, less the bias of its neck, which it keeps at 0: 1024 for cars, 512 for cub.
COUNTS = {
    "dot": ({}, 6_669_824, 3_467_264),
    "gat": ({"attention_fn": functools.partial(attention.gat, **SHARED)}, 5_619_456, 2_942_464),
    "gatv2": ({"attention_fn": functools.partial(attention.gatv2, **SHARED)}, 5_618_304, 2_941_696),
    "no attention": ({"attention_fn": None}, 4_566_528, 2_415_616),
    "no MLP": ({"mlp_fn": None}, 2_468_352, 1_366_528),
    "neither": ({"attention_fn": None, "mlp_fn": None}, 365_056, 314_880),
}


def _count(module, width=512):
    x = jax.ShapeDtypeStruct((4, width), jnp.float32)
    shapes = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), x)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    options, cars, cub = COUNTS[name]
    assert _count(_graph_network(**CARS, **options)) == cars - 1024
    assert _count(_graph_network(**CUB, **options)) == cub - 512


def test_parameter_counts_of_the_other_published_networks():
    sop = _graph_network(classes=11318, layers=1, heads=8)
    inshop = _graph_network(classes=3997, layers=1, heads=4)
    assert _count(sop) == 9_210_880 - 512 and _count(inshop) == 5_462_528 - 512


def test_options_of_graph_attention_have_their_parameters():
    d, heads = 8, 4

    def count(kind, **options):
        return _count(kind(heads=heads, sublayers=1, **options), d)

    assert count(attention.gat) == d * d + 2 * d  # a vector of 2 d / heads for each head
    assert count(attention.gat, share_vector=True) == d * d + 2 * d // heads
    assert count(attention.gat, share_projection=False) == 2 * d * d + 2 * d
    assert count(attention.gat, combine="mean") == heads * d * d + heads * 2 * d
    assert count(attention.gatv2) == 2 * d * d + d
    assert count(attention.gatv2, share_projection=True, share_vector=True) == d * d + d // heads


# --- plain loops --------------------------------------------------------------------------------


def _leaky(x):
    return np.where(x > 0, x, 0.2 * x)


def _listen(score, values, adjacency, edge_weights, one):
    """Every receiver's messages by a loop over its senders. `one` is 1 for plus-one, else 0."""
    n = len(values)
    messages, attention = np.zeros_like(values), np.zeros((n, n))
    for i in range(n):
        total = float(one)
        for j in range(n):
            if adjacency[i, j]:
                total += np.exp(score(i, j))
        for j in range(n):
            if adjacency[i, j]:
                attention[i, j] = np.exp(score(i, j)) / total * edge_weights[i, j]
                messages[i] += attention[i, j] * values[j]
    return messages, attention


def _naive_dot(p, x, adjacency, edge_weights, heads, one=0):
    def linear(name):
        return x @ p[name]["kernel"] + p[name]["bias"]

    parts = [np.split(linear(f"{name}_linear"), heads, axis=1) for name in "qkv"]
    heard = [
        _listen(
            lambda i, j, q=q, k=k: q[i] @ k[j] / len(q[i]) ** 0.5, v, adjacency, edge_weights, one
        )
        for q, k, v in zip(*parts, strict=True)
    ]
    messages = np.concatenate([m for m, _ in heard], axis=1)
    return messages @ p["out"]["kernel"] + p["out"]["bias"], np.stack([a for _, a in heard])


def _naive_gat(
    p, x, adjacency, edge_weights, heads, second=False, combine="concat", linear="linear"
):
    def layer(p, x, heads, combine):
        senders = np.split(x @ p[linear]["kernel"], heads, axis=1)
        other = p.get("linear_r", p[linear])
        receivers = np.split(x @ other["kernel"], heads, axis=1)
        heard = []
        for h in range(heads):
            a = p["attn"]["kernel"][:, h if p["attn"]["kernel"].shape[1] > 1 else 0]

            def score(i, j, h=h, a=a):
                r, s = receivers[h][i], senders[h][j]
                return a @ _leaky(r + s) if second else _leaky(a @ np.concatenate([r, s]))

            heard.append(_listen(score, senders[h], adjacency, edge_weights, 0))
        messages = [m for m, _ in heard]
        messages = (
            np.concatenate(messages, axis=1) if combine == "concat" else np.mean(messages, axis=0)
        )
        return messages, np.stack([a for _, a in heard])

    y, attention = layer(p["layer1"], x, heads, combine)
    if "output" in p:
        y, _ = layer(p["output"], np.where(y > 0, y, np.expm1(np.minimum(y, 0))), 1, "mean")
    return y, attention


_naive_gatv2 = functools.partial(_naive_gat, second=True, linear="linear_l")
KINDS = {
    "dot": (attention.dot(heads=2), _naive_dot),
    "dot_plus_one": (attention.dot_plus_one(heads=4), functools.partial(_naive_dot, one=1)),
    "gat": (attention.gat(heads=2), _naive_gat),
    "gat, two W": (attention.gat(heads=4, share_projection=False, sublayers=1), _naive_gat),
    "gat, mean": (
        attention.gat(heads=3, combine="mean", share_vector=True),
        functools.partial(_naive_gat, combine="mean"),
    ),
    "gatv2": (attention.gatv2(heads=2), _naive_gatv2),
    "gatv2, shared": (attention.gatv2(heads=2, **SHARED), _naive_gatv2),
    "gatv2, mean": (
        attention.gatv2(heads=2, combine="mean", sublayers=1),
        functools.partial(_naive_gatv2, combine="mean"),
    ),
}


def _double(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@functools.cache
def _case(name, n=5):
    """Parameters, nodes, a graph in which node 1 hears no one, weights; all in float64."""
    module, _ = KINDS[name]
    rng = np.random.default_rng(3)
    nodes = rng.normal(size=(n, D))
    params = module.init(jax.random.key(1), nodes.astype(np.float32), train=False)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape), _double(params))
    adjacency = rng.random((n, n)) < 0.6
    adjacency[1] = False
    return params, nodes, adjacency, rng.random((n, n)), rng.normal(size=(n, D))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_loops_agree(name, masked):
    module, naive = KINDS[name]
    params, nodes, adjacency, edge_weights, signs = _case(name)
    masks = {"adjacency": adjacency, "edge_weights": edge_weights} if masked else {}
    used = (adjacency, edge_weights) if masked else (np.ones((5, 5), bool), np.ones((5, 5)))

    def loop(params, nodes):
        return naive(params, nodes, *used, module.heads)

    with jax.enable_x64(True):

        @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def ours(params, nodes):
            out = module.apply({"params": params}, nodes, train=False, **masks)
            return jnp.sum(out["nodes"] * signs), out

        (_, out), slopes = jax.jit(ours)(params, nodes)
    messages, attention = loop(params, nodes)
    np.testing.assert_allclose(out["nodes"], messages, atol=1e-10)
    np.testing.assert_allclose(out["attention"], attention, atol=1e-10)
    if masked:
        assert not np.any(out["attention"][:, 1])
    # The gradient along some random ways through all parameters and nodes at once.
    leaves, structure = jax.tree.flatten((params, nodes))
    rng = np.random.default_rng(0)
    for _ in range(4):
        way = [rng.normal(size=leaf.shape) for leaf in leaves]

        def along(step, way=way):
            moved = [leaf + step * w for leaf, w in zip(leaves, way, strict=True)]
            return np.sum(loop(*jax.tree.unflatten(structure, moved))[0] * signs)

        expected = (along(1e-6) - along(-1e-6)) / 2e-6
        dots = [
            np.sum(np.asarray(s) * w) for s, w in zip(jax.tree.leaves(slopes), way, strict=True)
        ]
        np.testing.assert_allclose(sum(dots), expected, rtol=1e-5, atol=1e-5)


# --- masks --------------------------------------------------------------------------------------


@functools.cache
def _slopes(name):
    module, _ = KINDS[name]

    def ours(params, nodes, signs, masks):
        out = module.apply({"params": params}, nodes, train=False, **masks)
        return jnp.sum(out["nodes"] * signs), out

    return jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("name", ["dot", "dot_plus_one", "gat", "gatv2"])
def test_masked_nodes_never_reach_others(name):
    params, nodes, adjacency, edge_weights, signs = jax.tree.map(
        lambda a: a if a.dtype == bool else a.astype(np.float32), _case(name)
    )
    where = np.array([True, True, False, True, True])
    keep = np.flatnonzero(where)
    signs = signs * where[:, None]
    broken = np.where(where[:, None], nodes, np.nan)
    edges = np.where(where[:, None] & where[None, :], edge_weights, np.nan)
    masks = {"adjacency": adjacency, "edge_weights": edges, "where": where}
    (_, out), slopes = _slopes(name)(params, broken, signs, masks)
    few = {"adjacency": adjacency[keep][:, keep], "edge_weights": edge_weights[keep][:, keep]}
    (_, expected), dropped = _slopes(name)(params, nodes[keep], signs[keep], few)
    np.testing.assert_allclose(out["nodes"][keep], expected["nodes"], atol=1e-5)
    assert np.isfinite(out["nodes"]).all()
    assert not np.any(out["attention"][:, 2]) and not np.any(out["attention"][:, :, 2])
    for ours, theirs in zip(*map(jax.tree.leaves, (slopes[0], dropped[0])), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    np.testing.assert_allclose(slopes[1][keep], dropped[1], atol=1e-4)
    np.testing.assert_array_equal(slopes[1][2], 0)


@pytest.mark.parametrize("name", ["dot", "dot_plus_one", "gat", "gatv2"])
def test_a_graph_without_edges_is_finite(name):
    params, nodes, _, edge_weights, signs = jax.tree.map(
        lambda a: a.astype(np.float32), _case(name)
    )
    nothing = np.zeros((5, 5), bool)
    masks = {"adjacency": nothing, "edge_weights": edge_weights}
    (_, out), slopes = _slopes(name)(params, nodes, signs, masks)
    bias = params["out"]["bias"] if name.startswith("dot") else np.zeros(D)
    np.testing.assert_allclose(out["nodes"], np.tile(bias, (5, 1)), atol=1e-6)
    np.testing.assert_array_equal(out["attention"], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("name", ["dot", "dot_plus_one", "gat", "gatv2"])
def test_huge_scores_are_finite(name):
    params, nodes, *_, signs = jax.tree.map(lambda a: a.astype(np.float32), _case(name))
    (_, out), slopes = _slopes(name)(params, 1e4 * nodes, signs, {})
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((out, slopes)))
    assert np.max(out["attention"]) > 0.99  # it is one sender that is heard


def test_plus_one_hears_less_than_one_whole():
    params, nodes, *_ = _case("dot_plus_one")
    full = attention.dot(heads=4).apply({"params": params}, nodes, train=False)["attention"]
    less = KINDS["dot_plus_one"][0].apply({"params": params}, nodes, train=False)["attention"]
    np.testing.assert_allclose(np.sum(full, axis=2), 1, atol=1e-6)
    assert np.max(np.sum(less, axis=2)) < 1
    np.testing.assert_allclose(less / np.sum(less, axis=2, keepdims=True), full, atol=1e-6)


def test_symmetry_of_the_scores():
    """A shared projection makes GATv2's scores symmetric; GAT ranks senders the same for all."""
    rng = np.random.default_rng(0)
    g, other = rng.normal(size=(2, 6, 3)).astype(np.float32)
    a, b = rng.normal(size=(3,)).astype(np.float32), rng.normal(size=(6,)).astype(np.float32)
    v2 = attention._gatv2_scores(g, g, a, slope=0.2)
    np.testing.assert_allclose(v2, v2.T, atol=1e-6)
    two = attention._gatv2_scores(g, other, a, slope=0.2)
    assert np.abs(two - two.T).max() > 0.1
    order = np.argsort(attention._gat_scores(g, g, b, slope=0.2), axis=1)
    assert (order == order[0]).all()
    assert (np.argsort(v2, axis=1) != np.argsort(v2, axis=1)[0]).any()


# --- dropout, dtype, the whole network ----------------------------------------------------------

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


def test_network_outputs():
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


def test_the_last_block_alone_gives_the_features():
    module, variables = _network(concat_layers=False, neck=False, mlp_fn=None)
    out = module.apply(variables, X, train=False)
    np.testing.assert_array_equal(out["features"], out["nodes"][1])
    assert "neck" not in out and "bias" in variables["params"]["fc"]
    block = _block_fn(heads=2, mlp_fn=None)()
    params = variables["params"]["layers"]["1"]
    expected = block.apply({"params": params}, out["nodes"][0], train=False)["nodes"]
    np.testing.assert_allclose(out["nodes"][1], expected, atol=1e-6)


def test_order_of_the_batch_does_not_matter():
    module, variables = _network()
    order = np.array([2, 0, 3, 1])
    plain = module.apply(variables, X, train=False)["logits"]
    np.testing.assert_allclose(
        module.apply(variables, X[order], train=False)["logits"], plain[order], atol=1e-6
    )


def test_dropout_needs_a_key_and_only_while_training():
    _, variables = _network()
    where = np.ones(N, bool)
    first, second, again = (
        _train()(variables, X, jax.random.key(k), where)[0]["logits"] for k in (1, 2, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - second).max() > 1e-4
    zero = _graph_network(**SMALL, dropout=0.0)
    out, _ = zero.apply(variables, X, train=True, mutable="batch_stats")  # no key
    np.testing.assert_allclose(
        out["nodes"], _network()[0].apply(variables, X, train=False)["nodes"], atol=1e-6
    )


@pytest.mark.parametrize("kind", ["dot", "gatv2"])
def test_attention_is_dropped_out(kind):
    params, nodes, *_ = _case(kind)
    module = getattr(attention, kind)(heads=2, dropout=0.9)
    key = {"dropout": jax.random.key(0)}
    out = module.apply({"params": params}, nodes, train=True, rngs=key)
    plain = module.apply({"params": params}, nodes, train=False)
    assert np.abs(out["nodes"] - plain["nodes"]).max() > 0.1
    if kind == "dot":  # what comes back is that of before dropout
        np.testing.assert_allclose(out["attention"], plain["attention"], atol=1e-6)


def _dropped(module):
    """Paths and rates of all dropouts that are active in training."""
    actual = {}

    def record(call, args, kwargs, context):
        if isinstance(context.module, nn.Dropout) and not context.module.deterministic:
            actual["/".join(context.module.path)] = context.module.rate
        return call(*args, **kwargs)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    with nn.intercept_methods(record):
        jax.eval_shape(lambda: module.init(keys, X, train=True))
    return actual


def test_places_of_dropout():
    steps = {"dropout1": 0.2, "dropout": 0.2, "dropout2": 0.2}
    block = _block_fn(heads=2, dropout=0.2)()
    assert _dropped(block) == {"att/dropout": 0.2, **steps}
    attention_fn = functools.partial(attention.gat, dropout=0.3, heads=4)
    block = graph.MessagePassing(dropout=0.2, attention_fn=attention_fn)
    inner = ("dropout_layer1", "layer1/dropout", "dropout_output", "output/dropout")
    assert _dropped(block) == {**{f"att/{name}": 0.3 for name in inner}, **steps}


def test_masked_images_stay_out_of_the_network():
    """Of the messages, of the neck's statistics, and of every gradient."""
    module = _graph_network(**SMALL, dropout=0.0)
    _, variables = _network()
    where = np.array([True, False, True, True])
    broken = np.where(where[:, None], X, np.nan)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, x, where):
        out, state = module.apply(
            {**variables, "params": params}, x, train=True, where=where, mutable="batch_stats"
        )
        rows = jnp.sum(out["logits"] * jnp.cos(jnp.arange(3.0))[None, :], axis=1) ** 2
        return jnp.sum(rows if where is None else jnp.where(where, rows, 0)), state

    masked = loss(variables["params"], broken, where)
    dropped = loss(variables["params"], X[where], None)
    for ours, theirs in zip(*map(jax.tree.leaves, (masked, dropped)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_sharded_over_devices_gives_the_same():
    _, variables = _network()
    x = np.tile(X, (4, 1)) + np.arange(16)[:, None].astype(np.float32) / 16
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    where = np.arange(16) != 5
    one, state = _train()(variables, x, jax.random.key(0), where)
    placed = jax.device_put(variables, whole)
    many, state_of_many = _train()(
        placed, jax.device_put(x, rows), jax.random.key(0), jax.device_put(where, rows)
    )
    np.testing.assert_allclose(many["logits"][where], one["logits"][where], atol=1e-5)
    for ours, theirs in zip(*map(jax.tree.leaves, (state_of_many, state)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", ["dot_plus_one", "gat", "gatv2"])
def test_half_precision(kind):
    module = _graph_network(**SMALL, attention_fn=getattr(attention, kind), dtype=jnp.bfloat16)
    variables = module.init(jax.random.key(0), X, train=False)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(variables))
    out = module.apply(variables, X, train=False)
    assert {array.dtype for array in out.values()} == {jnp.dtype("float32")}
    full = _graph_network(**SMALL, attention_fn=getattr(attention, kind)).apply(
        variables, X, train=False
    )
    gap = np.abs(out["features"] - full["features"]).max()
    assert 1e-4 < gap < 0.1  # computed in bfloat16 indeed


def test_scores_of_gatv2_need_little_memory():
    """Of its n n w sums only a few rows exist at a time, for the gradient too."""
    n, width = 128, 128

    def loss(r, s, a):
        return jnp.sum(attention._gatv2_scores(r, s, a, slope=0.2) ** 2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, width), (n, width), (width,))]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * n * width * 4 / 2


# --- bad input ----------------------------------------------------------------------------------


def _apply(module, nodes=X, **options):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), nodes, train=False, **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _apply(attention.dot(heads=3)),
            r"3 heads cannot share 8 features: take one of 1, 2, 4, 8",
        ),
        (lambda: _apply(attention.gat(heads=0)), r"0 heads cannot share 8 features"),
        (lambda: attention.gat(combine="max"), r"combine is 'concat' or 'mean', not 'max'"),
        (lambda: attention.gatv2(sublayers=3), r"sublayers is 1 or 2, not 3"),
        (
            lambda: _apply(attention.dot(heads=2), adjacency=np.ones((4, 5), bool)),
            r"adjacency of 4 nodes must have the shape \[4, 4\], not \[4, 5\]",
        ),
        (
            lambda: _apply(attention.dot(heads=2), adjacency=np.ones((4, 4), np.float32)),
            r"adjacency must be boolean, not float32: write adjacency > 0",
        ),
        (
            lambda: _apply(_graph_network(attention_fn=None), where=np.ones(3, bool)),
            r"where of 4 nodes must have the shape \[4\], not \[3\]",
        ),
        (
            lambda: _apply(graph.GraphNetwork(), edge_weights=np.ones((4,), np.float32)),
            r"edge_weights of 4 nodes must have the shape \[4, 4\], not \[4\]",
        ),
        (
            lambda: _apply(graph.GraphNetwork(), nodes=X[None]),
            r"nodes are \[n d\] floats, one row per image, not float32 \[1, 4, 8\]",
        ),
    ],
)
def test_says_what_and_how(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
