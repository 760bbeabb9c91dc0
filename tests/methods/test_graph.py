"""The graph method against loops in float64, its ablations, refinement, pictures and configs."""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from dmljax import losses, metrics, nets
from dmljax.methods import assemble, base
from dmljax.methods.graph import nets as graphs
from dmljax.methods.graph.refine import refine
from dmljax.nets import attention, pools
from dmljax.report import inside
from dmljax.retrieval.reciprocal import k_reciprocal, k_reciprocal_queries
from dmljax.train import config, durations, named_methods, optimizers, registry, schedules
from dmljax.train.build import build
from dmljax.train.step import init_state, train_step

N, D, C, HEADS = 8, 8, 3, 2
LOSS = functools.partial(losses.label_smoothed_cross_entropy, epsilon=0.1, temperature=0.2)
NET = nets.convnet(widths=(8,), strides=(2,), frozen=True)
SHARED = {"share_vector": True, "share_projection": True}
# The rows of the published ablations, and then what else there is.
ROWS = {
    "baseline": {},
    "backbone only": {"graph_weight": 0.0},
    "no MLP, no attention": {"attention": "none", "mlp": "none", "layers": 2},
    "no attention": {"attention": "none"},
    "no MLP": {"mlp": "none"},
    "GAT": {"attention": {"name": "gat", **SHARED}},
    "GATv2": {"attention": {"name": "gatv2", **SHARED}},
    "GATv2, no MLP": {"attention": "gatv2", "mlp": "none"},
    "plus one, LN(2h)": {"attention": "dot_plus_one", "mlp": "identity"},
    "two layers, necks": {"layers": 2, "concat_layers": True, "neck": True},
    "graph only": {"encoder_weight": 0.0},
    "edges": {"threshold": 0.9},
    "shifted edges, other weights": {
        "weighted": True,
        "positive": "shifted",
        "similarity": "dot",
        "encoder_weight": 0.5,
        "graph_weight": 3.0,
    },
}


@functools.cache
def _images():
    return np.random.default_rng(0).normal(size=(N, 8, 8, 3)).astype(np.float32)


LABELS = np.arange(N, dtype=np.int32) % C
# Compiling is nearly all of the time here: eight times less without optimising.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def _method(name="baseline", **options):
    defaults = {"dim": D, "heads": HEADS, "dropout": 0.0}
    return named_methods.graph(NET, LOSS, classes=C, **{**defaults, **ROWS[name], **options})


def _fill(shapes):
    """Numbers for the variables, none of them at its initial zeros and ones: compiles nothing."""
    rng = np.random.default_rng(1)

    def draw(path, shape):
        near = {"scale": 1.0, "var": 1.0}.get(path[-1].key, 0.0)
        drawn = near + 0.2 * rng.normal(size=shape.shape)
        return (np.abs(drawn) if path[-1].key == "var" else drawn).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def _case(name="baseline"):
    """(method, params, model_state, compiled loss with its slopes)."""
    method = _method(name)
    batch = {"images": _images(), "labels": LABELS}
    params, model_state = _fill(jax.eval_shape(method.init, jax.random.key(0), batch))

    @jit
    def slope(params, images, labels, where, key, step):
        def loss(params, images):
            batch = {"images": images, "labels": labels, "where": where}
            return method.loss(params, model_state, batch, key=key, step=step)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, images)

    return method, params, model_state, slope


def _run(name="baseline", *, images=None, labels=LABELS, where=None, key=0, step=0):
    """((loss, (model_state, metrics)), slopes of params and images)."""
    _, params, _, slope = _case(name)
    images = _images() if images is None else images
    where = np.ones(N, bool) if where is None else where
    return slope(params, images, labels, where, jax.random.key(key), np.int32(step))


# --- the loss, in loops -------------------------------------------------------------------------


def _linear(p, x):
    return x @ np.float64(p["kernel"]) + np.float64(p.get("bias", 0.0))


def _layer_norm(p, x):
    rows = [(r - r.mean()) / np.sqrt(r.var() + 1e-5) for r in x]
    return np.stack(rows) * np.float64(p["scale"]) + np.float64(p["bias"])


def _neck(p, x):
    assert list(p) == ["scale"]  # no bias
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) * np.float64(p["scale"])


def _edges(x, options):
    n = len(x)
    weights = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            same = options.get("similarity") == "dot"
            weights[i, j] = x[i] @ x[j] if same else np.corrcoef(x[i], x[j])[0, 1]
    if options.get("positive") == "shifted":
        weights = weights - weights.min()
        np.fill_diagonal(weights, 0)
    else:
        weights = np.maximum(weights, 0)
    hears = weights > options.get("threshold", -np.inf)
    return hears, weights if options.get("weighted") else np.ones((n, n))


def _attend(p, x, h, options):
    n, width = len(h), D // HEADS
    hears, weights = _edges(x, options)
    q, k, v = (_linear(p[f"{part}_linear"], h) for part in "qkv")
    out = np.zeros((n, D))
    for head in range(HEADS):
        part = slice(head * width, (head + 1) * width)
        for i in range(n):
            scores = [np.exp(q[i, part] @ k[j, part] / np.sqrt(width)) for j in range(n)]
            total = sum(s for s, heard in zip(scores, hears[i], strict=True) if heard)
            total += options.get("attention") == "dot_plus_one"
            for j in np.flatnonzero(hears[i]):
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
    _, params, model_state, _ = _case(name)
    variables = {"params": params["net"], "batch_stats": model_state["batch_stats"]["net"]}
    maps = np.float64(NET.apply(variables, images, train=False)["features"])
    return _linear(params["head"]["red"], maps.max(axis=(1, 2)))


def _naive(name, images, labels):
    """The losses {encoder, graph}, where there are."""
    options, params = ROWS[name], _case(name)[1]
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
        if options.get("attention") != "none":
            h = _layer_norm(q["norm1"], h + _attend(q["att"], x, h, options))
        if options.get("mlp", "relu") == "relu":
            inner = np.maximum(_linear(q["linear1"], h), 0)
            h = _layer_norm(q["norm2"], h + _linear(q["linear2"], inner))
        elif options["mlp"] == "identity":
            h = _layer_norm(q["norm2"], 2 * h)
        hidden.append(h)
    h = _neck(p["bottleneck"], np.concatenate(hidden, axis=1) if "concat_layers" in options else h)
    assert list(p["fc"]) == ["kernel"]
    actual["graph"] = _cross_entropy(_linear(p["fc"], h), labels)
    return actual


@pytest.mark.parametrize("name", [n for n in ROWS if "GAT" not in n])
def test_loops_agree(name):
    expected = _naive(name, _images(), LABELS)
    (value, (_, actual)), _ = _run(name)
    assert {k for k in actual if k.endswith("_loss")} == {f"{k}_loss" for k in expected}
    for part, loss in expected.items():
        np.testing.assert_allclose(actual[f"{part}_loss"], loss, rtol=2e-5)
    total = sum(ROWS[name].get(f"{part}_weight", 1.0) * loss for part, loss in expected.items())
    np.testing.assert_allclose(value, total, rtol=2e-5)


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_every_row_learns(name):
    (value, _), slopes = _run(name)
    assert np.isfinite(value)
    leaves = jax.tree_util.tree_leaves_with_path(slopes)
    assert all(np.isfinite(leaf).all() for _, leaf in leaves)
    still = {jax.tree_util.keystr(path) for path, leaf in leaves if not np.any(leaf)}
    assert not still


def test_the_graphs_loss_trains_the_backbone():
    """All of it, with no other loss and no classifier that nothing trains."""
    _, params, _, _ = _case("graph only")
    assert list(params["head"]) == ["red"]
    _, (of_params, of_images) = _run("graph only")
    assert np.abs(of_params["net"]["conv1"]["conv"]["kernel"]).max() > 1e-4
    assert np.abs(of_params["head"]["red"]["kernel"]).max() > 1e-4
    assert (np.abs(of_images).max(axis=(1, 2, 3)) > 1e-6).all()


# --- batches ------------------------------------------------------------------------------------


def test_order_of_the_batch_does_not_matter():
    order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
    (value, (state, _)), (slopes, of_images) = _run()
    (other, (other_state, _)), (other_slopes, of_others) = _run(
        images=_images()[order], labels=LABELS[order]
    )
    np.testing.assert_allclose(other, value, rtol=1e-5)
    np.testing.assert_allclose(of_others, of_images[order], atol=2e-5)
    ours, theirs = (slopes, state), (other_slopes, other_state)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["two layers, necks", "edges"])
def test_masking_an_image_is_dropping_it(name):
    where = np.arange(N) != 2
    expected = _naive(name, _images()[where], LABELS[where])
    results = []
    for shift in (0, 5):
        images = _images() + shift * (~where)[:, None, None, None].astype(np.float32)
        (value, (state, actual)), (slopes, of_images) = _run(name, images=images, where=where)
        for part, loss in expected.items():
            np.testing.assert_allclose(actual[f"{part}_loss"], loss, rtol=2e-5)
        np.testing.assert_array_equal(of_images[2], 0)
        results.append((value, state, actual, slopes))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_sharded_over_devices_gives_the_same():
    """The graph spans the global batch, wherever its rows lie."""
    _, params, _, slope = _case()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    (value, _), slopes = _run()
    batch = jax.device_put((_images(), LABELS, np.ones(N, bool)), rows)
    (other, _), others = slope(
        jax.device_put(params, everywhere), *batch, jax.random.key(0), np.int32(0)
    )
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for a, b in zip(*map(jax.tree.leaves, (slopes, others)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=2e-5)


def test_compiles_once():
    _run("no MLP")
    slope = _case("no MLP")[3]
    for seed in (1, 2):
        _run("no MLP", labels=LABELS[::-1].copy(), key=seed, step=seed)
    assert slope._cache_size() == 1


def test_dropout_follows_the_key():
    method = _method(dropout=0.5)
    _, params, model_state, _ = _case()
    batch = {"images": _images(), "labels": LABELS}  # without `where`, as the loop gives it

    @jit
    def value(key):
        return method.loss(params, model_state, batch, key=key, step=0)[1][1]

    first, again, other = (value(jax.random.key(k)) for k in (1, 1, 2))
    assert first["graph_loss"] == again["graph_loss"] != other["graph_loss"]
    for actual in (first, other):  # only the graph drops out
        np.testing.assert_allclose(
            actual["encoder_loss"], _run()[0][1][1]["encoder_loss"], rtol=1e-5
        )


def test_batch_norms():
    """A frozen net's stay, those of the necks follow the batch."""
    _, _, before, _ = _case("two layers, necks")
    (_, (after, _)), _ = _run("two layers, necks")
    before, after = before["batch_stats"], after["batch_stats"]
    for a, b in zip(*map(jax.tree.leaves, (before["net"], after["net"])), strict=True):
        np.testing.assert_array_equal(a, b)
    mean = _features("two layers, necks", _images()).mean(axis=0)
    was = before["head"]["bottleneck"]["mean"]
    expected = 0.9 * was + 0.1 * mean
    np.testing.assert_allclose(after["head"]["bottleneck"]["mean"], expected, atol=1e-5)
    gap = after["graph"]["bottleneck"]["var"] - before["graph"]["bottleneck"]["var"]
    assert np.abs(gap).min() > 1e-5


def test_what_is_evaluated_is_the_backbone():
    """Each image alone, whatever else is in the batch, and without the graph's weights."""
    method, params, model_state, _ = _case("two layers, necks")
    few = {name: params[name] for name in ("net", "head")}
    embed = jit(lambda x: {
        "": method.embed(few, model_state, x), **method.inspect.parts(few, model_state, x)
    })  # fmt: skip
    actual = embed(_images())
    x = _features("two layers, necks", _images())
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(actual[""], x / norm, atol=1e-5)
    stats = model_state["batch_stats"]["head"]["bottleneck"]
    y = (x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) * params["head"]["bottleneck"]["scale"]
    norm = np.linalg.norm(y, axis=1, keepdims=True)
    np.testing.assert_allclose(actual["neck"], y / norm, atol=1e-5)
    twice = np.concatenate([_images()[:1]] * N)
    np.testing.assert_allclose(embed(twice)[""][0], actual[""][0], atol=1e-6)
    assert _case()[0].inspect.parts is None


def test_backbone_only_has_no_graph():
    method, params, model_state, _ = _case("backbone only")
    assert sorted(params) == ["head", "net"] and sorted(model_state["batch_stats"]) == ["net"]
    assert method.inspect == base.Inspect()


# --- attention, shown ---------------------------------------------------------------------------


def test_attention_of_a_batch():
    """Sums to 1 over those who are heard, and is 0 up to the threshold of the correlation."""
    method, params, model_state, _ = _case("edges")
    shown = jit(method.inspect.batch_attention)(params, model_state, _images())
    assert list(shown) == ["attention"] and shown["attention"].shape == (1, HEADS, N, N)
    hears = np.corrcoef(_features("edges", _images())) > 0.9

    assert N < hears.sum() < N * N
    for head in np.asarray(shown["attention"][0]):
        np.testing.assert_array_equal(head > 0, hears)
        np.testing.assert_allclose(head.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("GAT", {"attention": (1, HEADS, N, N), "attention_2": (1, 1, N, N)}),
        ("no attention", {}),
    ],
)
def test_what_there_is_of_attention(name, shapes):
    method, params, model_state, _ = _case(name)
    shown = jax.eval_shape(method.inspect.batch_attention, params, model_state, _images())
    assert {name: array.shape for name, array in shown.items()} == shapes


def test_picture_puts_images_beside_what_they_hear(tmp_path):
    """Green images hear each other, and gray ones themselves; the picture is sorted by label."""
    colors = np.array([[0, 200, 0], [128, 128, 128]], np.uint8)
    labels = np.array([1, 0, 1, 0, 0])
    images = np.broadcast_to(colors[labels][:, None, None], (5, 8, 8, 3))
    attention = (labels[:, None] == labels[None, :]) / np.array([[2], [3], [2], [3], [3]])
    path = tmp_path / "attention.png"
    inside.batch_attention(images, np.stack([[attention] * 2] * 2), path, labels=labels)
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    green = (np.abs(pixels - colors[0]).max(axis=2) < 8).sum()
    gray = (np.abs(pixels - colors[1]).max(axis=2) < 8).sum()
    assert green > 1000 and 1.2 < green / gray < 1.8  # three images against two
    one = tmp_path / "one.png"
    inside.batch_attention(images[..., :1], attention, one)
    with Image.open(one) as first, Image.open(path) as second:
        assert first.size[0] < second.size[0]  # one layer against two
    with pytest.raises(ValueError, match="attention among 4 images does not suit 5 images"):
        inside.batch_attention(images, attention[:4, :4], path)


# --- refinement ---------------------------------------------------------------------------------


def _clusters(rng, classes=8, per_class=12, dim=16, noise=0.2):
    labels = np.repeat(np.arange(classes), per_class)
    x = rng.normal(size=(classes, dim))[labels] / np.sqrt(dim)
    x = x + noise * rng.normal(size=x.shape)
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


def test_a_mean_of_neighbours_finds_more():
    x, labels = _clusters(np.random.default_rng(0))
    means = refine(lambda nodes: nodes.mean(axis=1), x, k=11)
    raw, better = (metrics.retrieval(e, labels, ks=(1,))["MAP@R"] for e in (x, means))
    assert better > raw + 0.05


def test_refined_one_by_one():
    """Every image in its own neighbourhood, of which the graph returns the first."""
    method, params, model_state, _ = _case("two layers, necks")
    x, _ = _clusters(np.random.default_rng(1), classes=4, per_class=5, dim=D)
    block_fn = functools.partial(
        graphs.MessagePassing, attention_fn=functools.partial(attention.dot, heads=HEADS)
    )
    block = graphs.GraphNetwork(classes=C, layers=2, block_fn=block_fn, concat_layers=True)
    stats = model_state["batch_stats"]["graph"]

    @jit
    def alone(nodes):
        variables = {"params": params["graph"], "batch_stats": stats}
        return block.apply(variables, nodes, train=False)["embeddings"][0]

    # Three parts of 7, one of them with an image to spare.
    options = {"k": 6, "batch_size": 4, "rows": 7}
    hoods = k_reciprocal(x, k=6, batch_size=4)
    assert (hoods[:, 0] == np.arange(len(x))).all()
    expected = np.stack([alone(x[hood]) for hood in hoods])
    actual = method.inspect.refine(params, model_state, x, query=None, gallery=None, **options)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-5)
    # With an image that could not be read.
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
    near = k_reciprocal_queries(x[query], x[gallery], k=5, batch_size=4)
    expected = x.copy()
    for row, i in enumerate(np.flatnonzero(query)):
        expected[i] = x[i] + x[gallery][near[row, -1]]
    np.testing.assert_allclose(actual, expected, atol=1e-6)
    with pytest.raises(ValueError, match="8 images are query and gallery at once"):
        refine(lambda nodes: nodes[:, 0], x, query=query, gallery=np.ones(24, bool))
    with pytest.raises(ValueError, match=r"queries of 16 numbers .* concat_layers=False"):
        twice = lambda nodes: np.concatenate([nodes[:, 0]] * 2, axis=1)  # noqa: E731
        refine(twice, x, query=query, gallery=gallery)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_weight": 0.0, "graph_weight": 0.0}, "both 0: nothing would be learned"),
        ({"similarity": "corelation"}, "no similarity 'corelation': did you mean 'correlation'"),
        ({"positive": "abs"}, r"no positive 'abs'\. It has: rectified, shifted"),
    ],
)
def test_says_what_and_how(options, message, unchecked):
    with pytest.raises(ValueError, match=message) as caught:
        _method(**options)
    assert "\n" not in str(caught.value)


# --- configs ------------------------------------------------------------------------------------

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SETS = ("cub", "cars", "sop", "inshop")


@functools.cache
def _module(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}_graph.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _sizes(name, arg, classes, net="convnet"):
    """Parameters of each module, by tracing."""
    actual = _module(name).get_config(arg)
    module = getattr(nets, net)()  # the width of the embedding is set, so any net will do
    method = registry.resolve("method", config.plain(actual.method))
    method = method(module, LOSS, classes=classes)
    side = 227 if net == "resnet50" else 32
    batch = {
        "images": jax.ShapeDtypeStruct((2, side, side, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((2,), jnp.int32),
    }
    params, _ = jax.eval_shape(method.init, jax.random.key(0), batch)
    return {part: sum(x.size for x in jax.tree.leaves(tree)) for part, tree in params.items()}


@pytest.mark.parametrize(
    ("name", "arg", "classes", "size"),
    [
        ("cars", "", 98, 6_669_824),
        ("cub", "", 100, 3_467_264),
        ("cars", "attention=gat,published=True", 98, 5_619_456),
        ("cub", "attention=gat,published=True", 100, 2_942_464),
        ("cars", "attention=gatv2,published=True", 98, 5_618_304),
        ("cub", "attention=gatv2,published=True", 100, 2_941_696),
        ("cars", "attention=none", 98, 4_566_528),
        ("cub", "attention=none", 100, 2_415_616),
        ("cars", "mlp=False", 98, 2_468_352),
        ("cub", "mlp=False", 100, 1_366_528),
        ("cars", "attention=none,mlp=False", 98, 365_056),
        ("cub", "attention=none,mlp=False", 100, 314_880),
        ("cars", "attention=dot_plus_one", 98, 6_669_824),
        ("sop", "backbone_only=False", 11_318, 9_210_880),
        ("inshop", "", 3_997, 5_462_528),
    ],
)
def test_published_sizes(name, arg, classes, size):
    # The frozen bias of the published neck is counted there, and is not here.
    bias = 1024 if name == "cars" else 512
    assert _sizes(name, arg, classes)["graph"] == size - bias


def test_published_sizes_of_the_encoder():
    sizes = _sizes("cars", "backbone_only=True", 98, net="resnet50")
    assert set(sizes) == {"net", "head"} and sum(sizes.values()) == 24_607_394
    assert "graph" not in _sizes("sop", "", 11_318)


@functools.cache
def _data(folder):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 6)
    colors = rng.integers(40, 216, size=(12, 1, 1, 3))[labels]
    images = np.clip(colors + rng.integers(-40, 40, size=(72, 40, 40, 3)), 0, 255)
    path = folder / "set.npz"
    np.savez(path, images=images.astype(np.uint8), labels=labels, class_is_test=np.arange(12) >= 6)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def _small(name, arg, folder):
    """The config on twelve classes of plain colors, with a net that compiles in a second."""
    actual = _module(name).get_config(arg)
    actual.unlock()
    actual.dataset = ConfigDict({"name": "npz", "path": _data(folder)})
    actual.net = ConfigDict({"name": "convnet", "widths": (8,), "strides": (2,)})
    actual.transform.size = 16
    if actual.sampler.name == "number":
        actual.sampler.batch_size = 8
    else:
        actual.sampler.update(classes=4, per_class=2)
    actual.method.dim = 16
    return actual


def _first_step(run):
    """The loss and parameters around one step on the first batch of the data, as the loop does."""
    rows = run.sample_fn(run.train.labels, seed=0, step=0)
    rng = np.random.default_rng(0)
    images = np.stack([run.transform_fn(run.train.records[i], rng) for i in rows])
    batch = {"images": images, "labels": run.train.labels[rows]}
    normalized = {**batch, "images": run.normalize_fn(images)}
    params, model_state = _fill(jax.eval_shape(run.method.init, jax.random.key(0), normalized))
    before = init_state(params, model_state, run.optimizer)
    step = jit(train_step(run.method, run.optimizer, normalize_fn=run.normalize_fn, seed=0))
    return before, *step(before, batch)


@pytest.mark.parametrize("name", ["sop", "cub"])
def test_config_takes_a_step(name, folder):
    run = build(_small(name, "published=True", folder))
    before, after, actual = _first_step(run)
    assert run.batch_size == 8 and np.isfinite(actual["loss"]) and actual["gradient_norm"] > 0
    assert ("graph_loss" in actual) == (name != "sop")  # whose published config has none
    for part in before.params:
        gaps = [
            np.abs(a - b).max()
            for a, b in zip(
                *map(jax.tree.leaves, (before.params[part], after.params[part])), strict=True
            )
        ]
        assert max(gaps) > 0, part


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "arg",
    [
        "",
        "attention=gat",
        "attention=gatv2,mlp=False",
        "attention=none,mlp=False,published=True",
        "backbone_only=True,validation=0.34",
    ],
)
def test_config_builds(name, arg, folder):
    run = build(_small(name, arg, folder))
    options = run.config["method"]
    assert options["mlp"] == ("none" if "mlp=False" in arg else "relu")
    assert (run.held_out is not None) == ("validation" in arg)
    assert run.selection.key == ("val/R@1" if "validation" in arg else "test/R@1")
    alone = "backbone_only" in arg or (name == "sop" and "backbone_only=False" not in arg)
    assert (run.method.inspect.refine is None) == alone
    std = 0.299 if "published" in arg else 0.229
    white = np.full((1, 1, 1, 3), 255, np.uint8)
    np.testing.assert_allclose(run.normalize_fn(white)[0, 0, 0, 0], (1 - 0.485) / std, rtol=1e-6)


def test_rates_of_the_configs():
    """Divided at both reloads, and only at the first as published."""
    module, factors = _module("cars"), {}
    for published in (False, True):
        actual = module.get_config(f"published={published}")
        assert actual.steps == "70 epochs"
        spec = config.plain(actual.schedule)
        steps = functools.partial(durations.steps, epoch_end=lambda epochs: 120 * epochs)
        spec["at"] = [steps(at) for at in spec["at"]]
        factor = registry.resolve("schedule", spec)(total=steps(actual.steps))
        epochs = np.array([0, 29.99, 30, 49.99, 50, 69]) * 120
        factors[published] = [float(factor(int(s))) for s in epochs]
        assert [steps(at) for at in actual.reload_best_at] == [30 * 120, 50 * 120]
    np.testing.assert_allclose(factors[False], [1, 1, 0.1, 0.1, 0.01, 0.01], rtol=1e-6)
    np.testing.assert_allclose(factors[True], [1, 1, 0.1, 0.1, 0.1, 0.1], rtol=1e-6)


def test_everything_decays():
    """The published optimizer spares neither biases nor norms."""
    spec = config.plain(_module("cub").get_config().optimizer)
    params = {"fc": {"bias": jnp.ones(3), "kernel": jnp.ones((2, 3))}}
    rate, decay = spec["rate"], spec["decay"]
    optimizer = optimizers.build(
        optimizers.radam(),
        schedule=schedules.constant(total=1),
        **{name: spec[name] for name in ("rate", "decay", "groups")},
    )
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jit(optimizer.update)(zero, optimizer.init(params), params)
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_allclose(leaf, -rate * decay, rtol=1e-5)


def test_a_misspelt_attention_is_refused_by_the_config():
    with pytest.raises(ValueError, match="no attention 'gatv3': did you mean 'gatv2'"):
        _sizes("cub", "attention=gatv3", 100)


def test_pool_with_options():
    """Of any method: the head makes the pools that a backbone does not."""
    encoder = assemble.encoder(NET, dim=None, pool_fn=functools.partial(pools.learned_gem, p=200.0))
    _, params, model_state, _ = _case("backbone only")
    stats = {"batch_stats": {"net": model_state["batch_stats"]["net"]}}
    trees = {"net": params["net"], "head": {"gem": {"p": jnp.float32(200.0)}}}
    pooled = jit(lambda x: encoder.apply(trees, stats, x, train=False)[0]["pooled"])(_images())
    maps = NET.apply({"params": params["net"], "batch_stats": stats["batch_stats"]["net"]},
                     _images(), train=False)["features"]  # fmt: skip
    np.testing.assert_allclose(pooled, np.max(maps, axis=(1, 2)), rtol=0.05, atol=2e-6)
