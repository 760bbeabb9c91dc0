"""Attention: plain loops, masks, dropout, wrong input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_attention import SHARED, D, X

from dmljax.nets import attention


def _leaky(x):
    return np.where(x > 0, x, 0.2 * x)


def _messages(score, values, adjacency, edge_weights, one):
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


def _naive_dot(p, x, adjacency, edge_weights, heads, one=0, combine="concat"):
    def linear(name):
        return x @ p[name]["kernel"] + p[name]["bias"]

    parts = [np.split(linear(f"{name}_linear"), heads, axis=1) for name in "qkv"]
    outputs = [
        _messages(
            lambda i, j, q=q, k=k: q[i] @ k[j] / len(q[i]) ** 0.5, v, adjacency, edge_weights, one
        )
        for q, k, v in zip(*parts, strict=True)
    ]
    messages = [m for m, _ in outputs]
    messages = (
        np.concatenate(messages, axis=1) if combine == "concat" else np.mean(messages, axis=0)
    )
    return messages @ p["out"]["kernel"] + p["out"]["bias"], np.stack([a for _, a in outputs])


def _naive_gat(
    p, x, adjacency, edge_weights, heads, second=False, combine="concat", linear="linear"
):
    def layer(p, x, heads, combine):
        senders = np.split(x @ p[linear]["kernel"], heads, axis=1)
        other = p.get("linear_r", p[linear])
        receivers = np.split(x @ other["kernel"], heads, axis=1)
        outputs = []
        for h in range(heads):
            a = p["attn"]["kernel"][:, h if p["attn"]["kernel"].shape[1] > 1 else 0]

            def score(i, j, h=h, a=a):
                r, s = receivers[h][i], senders[h][j]
                return a @ _leaky(r + s) if second else _leaky(a @ np.concatenate([r, s]))

            outputs.append(_messages(score, senders[h], adjacency, edge_weights, 0))
        messages = [m for m, _ in outputs]
        messages = (
            np.concatenate(messages, axis=1) if combine == "concat" else np.mean(messages, axis=0)
        )
        return messages, np.stack([a for _, a in outputs])

    y, attention = layer(p["layer1"], x, heads, combine)
    if "output" in p:
        y, _ = layer(p["output"], np.where(y > 0, y, np.expm1(np.minimum(y, 0))), 1, "mean")
    return y, attention


_naive_gatv2 = functools.partial(_naive_gat, second=True, linear="linear_l")


KINDS = {
    "dot": (attention.dot(heads=2), _naive_dot),
    "dot_plus_one": (attention.dot_plus_one(heads=4), functools.partial(_naive_dot, one=1)),
    "dot, mean": (
        attention.dot(heads=3, combine_fn=attention.average_heads),
        functools.partial(_naive_dot, combine="mean"),
    ),
    "gat": (attention.gat(heads=2, sublayers=2), _naive_gat),
    "gat, two W": (attention.gat(heads=4, share_projection=False, sublayers=1), _naive_gat),
    "gat, mean": (
        attention.gat(heads=3, combine_fn=attention.average_heads, share_vector=True),
        functools.partial(_naive_gat, combine="mean"),
    ),
    "gatv2": (attention.gatv2(heads=2), _naive_gatv2),
    "gatv2, shared": (attention.gatv2(heads=2, **SHARED), _naive_gatv2),
    "gatv2, mean": (
        attention.gatv2(heads=2, combine_fn=attention.average_heads, sublayers=1),
        functools.partial(_naive_gatv2, combine="mean"),
    ),
}


def _double(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


@functools.cache
def _case(name, n=5):
    """Parameters, nodes, a graph in which node 1 receives nothing, weights; all in float64."""
    module, _ = KINDS[name]
    rng = np.random.default_rng(3)
    nodes = rng.normal(size=(n, D))
    params = module.init(jax.random.key(1), nodes.astype(np.float32), train=False)["params"]
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape), _double(params))
    adjacency = rng.random((n, n)) < 0.6
    adjacency[1] = False
    return params, nodes, adjacency, rng.random((n, n)), rng.normal(size=(n, D))


@pytest.mark.parametrize(
    ("name", "masked"), [("dot", False), ("gat", False), *((name, True) for name in KINDS)]
)
def test_values_and_gradients_are_those_of_loops(name, masked):
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
    # The gradient along random directions of all parameters and nodes.
    leaves, structure = jax.tree.flatten((params, nodes))
    rng = np.random.default_rng(0)
    for _ in range(4):
        direction = [rng.normal(size=leaf.shape) for leaf in leaves]

        def along(step, direction=direction):
            moved = [leaf + step * w for leaf, w in zip(leaves, direction, strict=True)]
            return np.sum(loop(*jax.tree.unflatten(structure, moved))[0] * signs)

        expected = (along(1e-6) - along(-1e-6)) / 2e-6
        dots = [
            np.sum(np.asarray(s) * w)
            for s, w in zip(jax.tree.leaves(slopes), direction, strict=True)
        ]
        np.testing.assert_allclose(sum(dots), expected, rtol=1e-5, atol=1e-5)


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
    rows = np.flatnonzero(where)
    signs = signs * where[:, None]
    broken = np.where(where[:, None], nodes, np.nan)
    edges = np.where(where[:, None] & where[None, :], edge_weights, np.nan)
    masks = {"adjacency": adjacency, "edge_weights": edges, "where": where}
    (_, out), slopes = _slopes(name)(params, broken, signs, masks)
    masks = {"adjacency": adjacency[rows][:, rows], "edge_weights": edge_weights[rows][:, rows]}
    (_, expected), dropped = _slopes(name)(params, nodes[rows], signs[rows], masks)
    np.testing.assert_allclose(out["nodes"][rows], expected["nodes"], atol=1e-5)
    assert np.isfinite(out["nodes"]).all()
    assert not np.any(out["attention"][:, 2]) and not np.any(out["attention"][:, :, 2])
    for ours, theirs in zip(*map(jax.tree.leaves, (slopes[0], dropped[0])), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    np.testing.assert_allclose(slopes[1][rows], dropped[1], atol=1e-4)
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
    assert np.max(out["attention"]) > 0.99  # one sender has nearly all of the weight


@pytest.mark.parametrize("kind", ["dot", "gatv2"])
def test_dropout_changes_the_messages_and_not_the_returned_attention(kind):
    params, nodes, *_ = _case(kind)
    module = getattr(attention, kind)(heads=2, dropout=0.9)
    key = {"dropout": jax.random.key(0)}
    out = module.apply({"params": params}, nodes, train=True, rngs=key)
    plain = module.apply({"params": params}, nodes, train=False)
    assert np.abs(out["nodes"] - plain["nodes"]).max() > 0.1
    if kind == "dot":  # the returned weights are those before dropout
        np.testing.assert_allclose(out["attention"], plain["attention"], atol=1e-6)


def test_scores_of_gatv2_need_little_memory():
    """Of its n n w sums only a few rows exist at a time, for the gradient too."""
    n, width = 128, 128

    def loss(r, s, a):
        return jnp.sum(attention._gatv2_scores(r, s, a, slope=0.2) ** 2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, width), (n, width), (width,))]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * n * width * 4 / 2


def _trace(module, **options):
    return jax.eval_shape(lambda: module.init(jax.random.key(0), X, train=False, **options))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _trace(attention.dot(heads=3)),
            r"3 heads cannot share 8 features: take one of 1, 2, 4, 8",
        ),
        (lambda: _trace(attention.gat(heads=0)), r"0 heads cannot share 8 features"),
        (lambda: _trace(attention.gatv2(sublayers=3)), r"sublayers is 1 or 2, not 3"),
        (
            lambda: attention.check_nodes(np.float32(1), None, None, None),
            r"nodes are \[n d\] floats, one row per image, not float32 \[\]",
        ),
        (
            lambda: _trace(attention.dot(heads=2), adjacency=np.ones((4, 5), bool)),
            r"adjacency of 4 nodes must have the shape \[4, 4\], not \[4, 5\]",
        ),
        (
            lambda: _trace(attention.dot(heads=2), adjacency=np.ones((4, 4), np.float32)),
            r"adjacency must be boolean, not float32: write adjacency > 0",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(call, message, unchecked):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
