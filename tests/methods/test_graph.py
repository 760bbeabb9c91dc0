"""The graph method and its ablations against loops in float64, its gradients and its outputs."""

import jax
import numpy as np
import pytest
from graph_cases import (
    HEADS,
    LABELS,
    NET,
    ROWS,
    C,
    D,
    N,
    graph_case,
    images_of_batch,
    jit,
)


def _run(name="baseline", *, images=None, labels=LABELS, where=None, key=0, step=0):
    """((loss, (model_state, metrics)), slopes of params and images)."""
    _, params, _, slope = graph_case(name)
    images = images_of_batch() if images is None else images
    where = np.ones(N, bool) if where is None else where
    return slope(params, images, labels, where, jax.random.key(key), np.int32(step))


def _linear(p, x):
    return x @ np.float64(p["kernel"]) + np.float64(p.get("bias", 0.0))


def _layer_norm(p, x):
    rows = [(r - r.mean()) / np.sqrt(r.var() + 1e-5) for r in x]
    return np.stack(rows) * np.float64(p["scale"]) + np.float64(p["bias"])


def _neck(p, x):
    assert list(p) == ["scale"]  # no bias
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) * np.float64(p["scale"])


def _edges(x, options):
    n, edges = len(x), options.get("edges_fn", {})
    weights = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            same = edges.get("similarity_fn") == "dot_products"
            weights[i, j] = x[i] @ x[j] if same else np.corrcoef(x[i], x[j])[0, 1]
    if edges.get("positive_fn") == "shifted":
        weights = weights - weights.min()
        np.fill_diagonal(weights, 0)
    else:
        weights = np.maximum(weights, 0)
    adjacency = weights > edges.get("threshold", -np.inf)
    return adjacency, weights if edges.get("name") == "similarity_graph" else np.ones((n, n))


def _attend(p, x, h, options):
    n, width = len(h), D // HEADS
    adjacency, weights = _edges(x, options)
    q, k, v = (_linear(p[f"{part}_linear"], h) for part in "qkv")
    out = np.zeros((n, D))
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        for i in range(n):
            scores = [np.exp(q[i, part] @ k[j, part] / np.sqrt(width)) for j in range(n)]
            total = sum(s for s, edge in zip(scores, adjacency[i], strict=True) if edge)
            total += options.get("attention_fn") == "dot_plus_one"
            for j in np.flatnonzero(adjacency[i]):
                out[i, part] += scores[j] / total * weights[i, j] * v[j, part]
    return _linear(p["out"], out)


def _cross_entropy(logits, labels):
    values = []
    for z, y in zip(logits / 0.2, labels, strict=True):
        target = np.full(C, 0.1 / C)
        target[y] += 0.9
        values.append(-np.sum(target * (z - np.log(np.sum(np.exp(z))))))
    return np.mean(values)


def _features(name, images):
    """From the maps of the net on: the largest of each, and the linear layer."""
    _, params, model_state, _ = graph_case(name)
    variables = {"params": params["net"], "batch_stats": model_state["batch_stats"]["net"]}
    maps = np.float64(NET.apply(variables, images, train=False)["features"])
    return _linear(params["head"]["red"], maps.max(axis=(1, 2)))


def _naive(name, images, labels):
    """The losses {encoder, graph}, where there are."""
    options, params = ROWS[name], graph_case(name)[1]
    x, actual = _features(name, images), {}
    head = params["head"]
    if "fc" in head:
        y = _neck(head["bottleneck"], x) if "bottleneck" in head else x
        actual["encoder"] = _cross_entropy(_linear(head["fc"], y), labels)
    if "graph" not in params:
        return actual
    x = np.stack([row / np.linalg.norm(row) for row in x])
    p, hidden = params["graph"], []
    h = _linear(p["dim_red"], x)
    for layer in range(options.get("layers", 1)):
        q = p.get("layers", {}).get(str(layer), {})
        if options.get("attention_fn", "dot") is not None:
            h = _layer_norm(q["norm1"], h + _attend(q["att"], x, h, options))
        if (mlp := options.get("mlp_fn", "mlp")) == "mlp":
            inner = np.maximum(_linear(q["linear1"], h), 0)
            h = _layer_norm(q["norm2"], h + _linear(q["linear2"], inner))
        elif mlp == "identity":
            h = _layer_norm(q["norm2"], 2 * h)
        hidden.append(h)
    h = _neck(p["bottleneck"], np.concatenate(hidden, axis=1) if "concat_layers" in options else h)
    assert list(p["fc"]) == ["kernel"]
    actual["graph"] = _cross_entropy(_linear(p["fc"], h), labels)
    return actual


@pytest.mark.parametrize("name", [n for n in ROWS if "GAT" not in n])
def test_losses_are_those_of_loops(name):
    expected = _naive(name, images_of_batch(), LABELS)
    (value, (_, actual)), _ = _run(name)
    assert {k for k in actual if k.endswith("_loss")} == {f"{k}_loss" for k in expected}
    for part, loss in expected.items():
        np.testing.assert_allclose(actual[f"{part}_loss"], loss, rtol=2e-5)
    total = sum(ROWS[name].get(f"{part}_weight", 1.0) * loss for part, loss in expected.items())
    np.testing.assert_allclose(value, total, rtol=2e-5)


@pytest.mark.parametrize("name", ROWS)
def test_every_parameter_gets_a_gradient(name):
    (value, _), slopes = _run(name)
    assert np.isfinite(value)
    leaves = jax.tree_util.tree_leaves_with_path(slopes)
    assert all(np.isfinite(leaf).all() for _, leaf in leaves)
    without_gradient = {jax.tree_util.keystr(path) for path, leaf in leaves if not np.any(leaf)}
    assert not without_gradient


def test_the_loss_of_the_graph_trains_the_backbone():
    """All of it, with no other loss and no classifier that nothing trains."""
    _, params, _, _ = graph_case("graph only")
    assert list(params["head"]) == ["red"]
    _, (of_params, of_images) = _run("graph only")
    assert np.abs(of_params["net"]["conv1"]["conv"]["kernel"]).max() > 1e-4
    assert np.abs(of_params["head"]["red"]["kernel"]).max() > 1e-4
    assert (np.abs(of_images).max(axis=(1, 2, 3)) > 1e-6).all()


@pytest.mark.parametrize("name", ["two layers, necks", "edges"])
def test_masking_an_image_is_dropping_it(name):
    where = np.arange(N) != 2
    expected = _naive(name, images_of_batch()[where], LABELS[where])
    results = []
    for shift in (0, 5):
        images = images_of_batch() + shift * (~where)[:, None, None, None].astype(np.float32)
        (value, (state, actual)), (slopes, of_images) = _run(name, images=images, where=where)
        for part, loss in expected.items():
            np.testing.assert_allclose(actual[f"{part}_loss"], loss, rtol=2e-5)
        np.testing.assert_array_equal(of_images[2], 0)
        results.append((value, state, actual, slopes))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_frozen_net_keeps_its_statistics_and_necks_follow_the_batch():
    _, _, before, _ = graph_case("two layers, necks")
    (_, (after, _)), _ = _run("two layers, necks")
    before, after = before["batch_stats"], after["batch_stats"]
    for a, b in zip(*map(jax.tree.leaves, (before["net"], after["net"])), strict=True):
        np.testing.assert_array_equal(a, b)
    mean = _features("two layers, necks", images_of_batch()).mean(axis=0)
    expected = 0.9 * before["head"]["bottleneck"]["mean"] + 0.1 * mean
    np.testing.assert_allclose(after["head"]["bottleneck"]["mean"], expected, atol=1e-5)
    gap = after["graph"]["bottleneck"]["var"] - before["graph"]["bottleneck"]["var"]
    assert np.abs(gap).min() > 1e-5


def test_an_embedding_depends_on_its_image_and_the_backbone_alone():
    """Each image alone, whatever else is in the batch, and without the graph's weights."""
    method, params, model_state, _ = graph_case("two layers, necks")
    encoder_params = {name: params[name] for name in ("net", "head")}
    embed = jit(lambda x: {
        "": method.embed(encoder_params, model_state, x),
        **method.inspect.parts(encoder_params, model_state, x),
    })  # fmt: skip
    actual = embed(images_of_batch())
    x = _features("two layers, necks", images_of_batch())
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(actual[""], x / norm, atol=1e-5)
    stats = model_state["batch_stats"]["head"]["bottleneck"]
    y = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) * params["head"]["bottleneck"]["scale"]
    norm = np.linalg.norm(y, axis=1, keepdims=True)
    np.testing.assert_allclose(actual["neck"], y / norm, atol=1e-5)
    twice = np.concatenate([images_of_batch()[:1]] * N)
    np.testing.assert_allclose(embed(twice)[""][0], actual[""][0], atol=1e-6)
    assert graph_case()[0].inspect.parts is None


def test_attention_of_a_batch_follows_its_edges():
    """Weights sum to 1 over the senders. They are 0 up to the threshold of the correlation."""
    method, params, model_state, _ = graph_case("edges")
    maps = jit(method.inspect.batch_attention)(params, model_state, images_of_batch())
    assert list(maps) == ["attention"] and maps["attention"].shape == (1, HEADS, N, N)
    adjacency = np.corrcoef(_features("edges", images_of_batch())) > 0.9

    assert N < adjacency.sum() < N * N
    for head in np.asarray(maps["attention"][0]):
        np.testing.assert_array_equal(head > 0, adjacency)
        np.testing.assert_allclose(head.sum(axis=1), 1, atol=1e-5)
