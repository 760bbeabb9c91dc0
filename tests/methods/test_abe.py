"""ABE against loops in float64, its collapse without the divergence, its pictures and configs."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from one_step import Patches, fill, jit, moved, read, shrink, step
from PIL import Image

from dmljax import losses, methods, miners, nets, ops
from dmljax.methods import base
from dmljax.methods.abe import contrastive, divergence, mean_divergence
from dmljax.methods.abe import nets as ensembles
from dmljax.report import inside
from dmljax.train import named_methods

RNG = np.random.default_rng(0)
CLASSES, B = 6, 24


CUT = {"split": ("one", "two"), "attention": "two"}
NET = Patches()


def _unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# --- losses -------------------------------------------------------------------------------------

X = _unit(RNG.normal(size=(8, 3))).astype(np.float32)
LABELS = np.array([0, 0, 1, 1, 2, 2, 2, 3])


def _contrastive(x, labels, *, margin=1.0, push_positives=False, partner=None):
    x, terms = x.astype(np.float64), []
    for i in range(len(x)):
        for j in range(len(x)):
            if i == j or (partner is not None and partner[i] != j):
                continue
            square = np.sum((x[i] - x[j]) ** 2)
            same = labels[i] == labels[j]
            push = max(0, margin - square) if push_positives or not same else 0
            terms.append(square * same + push)
    return np.mean(terms)


@pytest.mark.parametrize("options", [{}, {"margin": 2.5}, {"push_positives": True}])
def test_contrastive_is_the_formula(options):
    expected = _contrastive(X, LABELS, **options)
    np.testing.assert_allclose(contrastive(X, LABELS, **options), expected, rtol=1e-5)


def test_contrastive_masks_and_mines():
    where = np.arange(8) < 5
    np.testing.assert_allclose(
        contrastive(X, LABELS, where=where), _contrastive(X[:5], LABELS[:5]), rtol=1e-5
    )
    pairs = miners.batch_hard(ops.unit_euclidean(X, X), ops.pairs(LABELS))
    mined = contrastive(X, LABELS, mine_fn=miners.batch_hard)
    np.testing.assert_allclose(mined, contrastive(X, pairs), rtol=1e-6)
    assert abs(float(mined) - _contrastive(X, LABELS)) > 0.1
    assert contrastive(X, np.full(8, True)[:, None] * False) > 0  # no class: all are negatives


LEARNERS = _unit(RNG.normal(size=(4, 3, 5)) + 1).astype(np.float32)


@pytest.mark.parametrize("margin", [1.0, 0.4])
def test_divergence_is_the_formula(margin):
    total = 0.0
    for image in LEARNERS.astype(np.float64):
        for p in range(3):
            for q in range(p):
                total += max(0, margin - np.sum((image[p] - image[q]) ** 2))
    np.testing.assert_allclose(divergence(LEARNERS, margin=margin), total / 4, rtol=1e-5)
    mean = mean_divergence(LEARNERS, margin=margin)
    np.testing.assert_allclose(mean, total / 4 / 3, rtol=1e-5)


def test_divergence_of_one_learner_is_nothing():
    value, slope = jax.value_and_grad(divergence)(LEARNERS[:, :1])
    assert value == 0 and not np.any(slope)


# --- the method ---------------------------------------------------------------------------------


@functools.cache
def _batch(seed=0):
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).normal(size=(CLASSES, 12, 12, 3))
    labels = np.repeat(np.arange(CLASSES, dtype=np.int32), B // CLASSES)
    images = patterns[labels] + rng.normal(size=(B, 12, 12, 3))
    order = rng.permutation(B)
    return {"images": images[order].astype(np.float32), "labels": labels[order]}


def _method(loss_fn=contrastive, **options):
    return named_methods.abe(
        NET, loss_fn, classes=CLASSES, **{"learners": 3, "dim": 12, **CUT, **options}
    )


@functools.cache
def _start(heads=False):
    return fill(jax.eval_shape(_method(heads=heads).init, jax.random.key(0), _batch()))


@functools.cache
def _vectors(heads=False):
    """The learners' vectors as the loss sees them, from the ensemble itself."""
    options = {"learners": 3, "features": 12, "net": Patches, "split": CUT["split"]}
    module = ensembles.MultiHead(**options)
    if not heads:
        module = ensembles.ABE(**options, attention=CUT["attention"])
    run = jit(lambda params, x: module.apply({"params": params}, x, train=True))
    return jax.device_get(run(_start(heads)[0]["net"], _batch()["images"])["learners"])


def _losses(method, *, heads=False, seeds=(0,)):
    """The loss and its metrics, for each key."""
    run = jit(lambda key: method.loss(*_start(heads), _batch(), key=key, step=0))
    with mock.patch.object(base, "diagnostics", lambda *_: {}):  # most of the time to compile
        actual = [jax.device_get(run(jax.random.key(seed))) for seed in seeds]
    return [{"value": value, **metrics} for value, (_, metrics) in actual]


@pytest.mark.parametrize("heads", [False, True])
def test_loss_is_the_learners_and_lambda_times_the_divergence(heads):
    x, labels = _vectors(heads), _batch()["labels"]
    method = _method(heads=heads, lambda_div=0.7, margin_div=0.9)
    (actual,) = _losses(method, heads=heads)
    metric = sum(_contrastive(x[:, m], labels) for m in range(3))
    apart = float(divergence(x.astype(np.float64), margin=0.9))
    np.testing.assert_allclose(actual["metric"], metric, rtol=1e-4)
    np.testing.assert_allclose(actual["divergence"], apart, rtol=1e-4)
    np.testing.assert_allclose(actual["value"], metric + 0.7 * apart, rtol=1e-4)
    cosine = np.mean([np.sum(x[:, p] * x[:, q], axis=1) for p, q in ((0, 1), (0, 2), (1, 2))])
    np.testing.assert_allclose(actual["self_cosine"], cosine, atol=1e-5)


def test_drawn_pairs_are_rows_a_half_apart():
    x, labels = _vectors(), _batch()["labels"]
    partner = (np.arange(B) + B // 2) % B
    expected = sum(_contrastive(x[:, m], labels, partner=partner) for m in range(3))
    (actual,) = _losses(_method(pairs="drawn"))
    np.testing.assert_allclose(actual["metric"], expected, rtol=1e-4)


def test_any_pair_loss_with_any_miner():
    x, labels = _vectors(), _batch()["labels"]
    loss_fn = functools.partial(losses.triplet, margin=0.3)
    (actual,) = _losses(_method(loss_fn, mine_fn=miners.batch_hard))
    by_itself = jit(lambda x: loss_fn(x, labels, mine_fn=miners.batch_hard))
    expected = sum(by_itself(x[:, m]) for m in range(3))
    np.testing.assert_allclose(actual["metric"], expected, rtol=1e-4)
    drawing = base.RandomMiner(functools.partial(miners.distance_weighted, dim=4))
    a, b, c = _losses(_method(loss_fn, mine_fn=drawing), seeds=(0, 0, 1))
    assert a["metric"] == b["metric"] != c["metric"]


def test_embeddings_and_parts():
    method, images = _method(), _batch()["images"]

    @jit
    def look(params, model_state, images):
        functions = method.embed, method.inspect.parts, method.inspect.spatial_masks
        return [function(params, model_state, images) for function in functions]

    embeddings, parts, shown = jax.device_get(look(*_start(), images))
    assert embeddings.shape == (B, 12) and embeddings.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-6)
    assert sorted(parts) == ["learner_0", "learner_1", "learner_2"]
    for m in range(3):
        np.testing.assert_allclose(
            parts[f"learner_{m}"] / 3**0.5, embeddings[:, 4 * m : 4 * m + 4], atol=1e-6
        )
    masks = shown["masks"]
    assert masks.shape == (B, 3, 4, 4, 10) and masks.min() > 0 and masks.max() < 1
    assert _method(heads=True).inspect.spatial_masks is None
    assert _method(learners=1).inspect.parts is None


def test_min_max_masks_span_zero_to_one():
    masks = jit(_method(mask="min_max").inspect.spatial_masks)(*_start(), _batch()["images"])[
        "masks"
    ]
    masks = jax.device_get(masks)
    np.testing.assert_allclose(masks.min(axis=(2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(masks.max(axis=(2, 3)), 1, atol=1e-6)


COUNTS = [(8, 512, False, 12_047_040), (2, 128, False, 9_648_000), (1, 512, True, 6_498_352)]


@pytest.mark.parametrize(("learners", "dim", "heads", "count"), COUNTS)
def test_published_sizes(learners, dim, heads, count):
    method = named_methods.abe(
        nets.googlenet(), contrastive, classes=98, learners=learners, dim=dim, heads=heads
    )
    batch = {"images": jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)}
    params, _ = jax.eval_shape(method.init, jax.random.key(0), batch)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count
    assert ("masks" in params["net"]) == (not heads)


@functools.cache
def _trained(lambda_div):
    """(metrics of 120 steps, params, model_state)."""
    method, optimizer = _method(lambda_div=lambda_div), optax.adam(1e-2)

    @jit
    def go(params, model_state, opt_state, batch, key):
        def loss(params):
            return method.loss(params, model_state, batch, key=key, step=jnp.zeros((), jnp.int32))

        (_, (model_state, metrics)), slopes = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(slopes, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state, metrics

    params, model_state = _start()
    opt_state, actual = optimizer.init(params), []
    with mock.patch.object(base, "diagnostics", lambda *_: {}):
        for i in range(120):
            params, model_state, opt_state, metrics = go(
                params, model_state, opt_state, _batch(i), jax.random.key(i)
            )
            actual.append({k: float(v) for k, v in metrics.items()})
    return actual, params, model_state


def test_without_the_divergence_all_learners_become_one():
    """Table 2 and figure 5 of the paper: both learn the classes, one has a single learner."""
    alone, apart = _trained(0.0)[0], _trained(1.0)[0]
    assert alone[0]["self_cosine"] == apart[0]["self_cosine"] < 0.9
    assert alone[-1]["self_cosine"] > 0.97
    assert apart[-1]["self_cosine"] < 0.5
    assert max(alone[-1]["metric"], apart[-1]["metric"]) < 0.5 * alone[0]["metric"]


# --- pictures -----------------------------------------------------------------------------------


def test_cosines_are_of_three_kinds():
    labels = np.array([0, 1, 0, 1])
    actual = inside.cosines_of_pairs(LEARNERS, labels)
    x = LEARNERS.astype(np.float64)
    kinds = {"self": [], "positive": [], "negative": []}
    for i in range(4):
        kinds["self"] += [x[i, p] @ x[i, q] for p in range(3) for q in range(p)]
        for j in range(i):
            kind = "positive" if labels[i] == labels[j] else "negative"
            kinds[kind] += [x[i, p] @ x[j, p] for p in range(3)]
    for kind, values in kinds.items():
        np.testing.assert_allclose(np.sort(actual[kind]), np.sort(values), atol=1e-6)
    some = inside.cosines_of_pairs(LEARNERS, labels, limit=3)
    assert len(some["self"]) == 9 and len(some["positive"]) + len(some["negative"]) == 9


def _pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def _share(pixels, color):
    """Of the pixels, those nearer than 60 to a color."""
    return np.mean(np.abs(pixels - np.array(color)).sum(axis=-1) < 60)


def test_histograms_show_the_collapse(tmp_path):
    pictures = {}
    for lambda_div in (0.0, 1.0):
        _, params, model_state = _trained(lambda_div)
        parts = jit(_method().inspect.parts)(params, model_state, _batch(50)["images"])
        stacked = np.stack(list(parts.values()), axis=1)
        actual = inside.cosines_of_pairs(stacked, _batch(50)["labels"])
        assert np.mean(actual["positive"]) > np.mean(actual["negative"]) + 0.3
        inside.part_cosines(actual, tmp_path / "cosines.png")
        pictures[lambda_div] = _pixels(tmp_path / "cosines.png")
    blue = {k: _share(p, (158, 184, 210)) for k, p in pictures.items()}  # of self pairs alone
    assert blue[1.0] > 2 * blue[0.0]


def test_masks_are_drawn_where_they_are(tmp_path):
    masks = np.full((2, 3, 4, 4, 5), 0.5, np.float32)
    masks[0, 1, :2] = 0.9  # the second learner looks at the upper half of the first image
    images = np.full((2, 12, 12, 3), 128, np.uint8)
    inside.spatial_masks(masks, images, tmp_path / "masks.png")
    pixels = _pixels(tmp_path / "masks.png")
    red = (pixels[..., 0] - pixels[..., 2] > 30).nonzero()
    h, w = pixels.shape[:2]
    assert len(red[0]) and red[0].max() < h / 2
    assert w / 2 <= red[1].min() and red[1].max() <= 0.76 * w
    one = masks.copy()
    one[..., 1:] = 0.5
    inside.spatial_masks(one, images, tmp_path / "one.png", channel=3)
    pixels = _pixels(tmp_path / "one.png")
    assert not np.any(pixels[..., 0] - pixels[..., 2] > 30)


# --- bad input and configs ----------------------------------------------------------------------

BAD = {
    "pairs": ({"pairs": "some"}, "there is no pairs 'some'. It has: all, drawn"),
    "mask": ({"mask": "relu"}, "there is no mask 'relu'. It has: min_max, sigmoid"),
    "share": ({"learners": 5}, "5 learners cannot share 12 features"),
    "divergence": (
        {"divergence_pairs": "max"},
        "there is no divergence_pairs 'max'. It has: mean, sum",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_says_what_and_how(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message) as caught:
        method = _method(**options)
        state = jax.eval_shape(method.init, jax.random.key(0), _batch())
        jax.eval_shape(
            lambda p, s: method.loss(p, s, _batch(), key=jax.random.key(0), step=0), *state
        )
    assert "\n" not in str(caught.value)


def test_says_which_nets_can_be_cut():
    with pytest.raises(ValueError, match=r"Lecun does not .* take googlenet"):
        methods.abe(nets.lecun(), contrastive, classes=3)
    odd = {k: v[:-1] for k, v in _batch().items()}
    method = _method(pairs="drawn")
    with pytest.raises(ValueError, match=r"an even number of rows, not 23"):
        method.loss(*_start(), odd, key=jax.random.key(0), step=0)


ROWS = [
    ("cars_abe", None, 8, False, 1.0),
    ("cars_abe", "learners=4,dim=256", 4, False, 1.0),
    ("cars_abe", "divergence=0", 8, False, 0.0),
    ("cars_abe", "heads=True,learners=2", 2, True, 0.0),
    ("cars_abe", "heads=True,divergence=1", 8, True, 1.0),
    ("cub_abe", None, 8, False, 1.0),
    ("sop_abe", None, 8, False, 1.0),
    ("inshop_abe", None, 8, False, 1.0),
]


@pytest.mark.parametrize(("name", "arg", "learners", "heads", "weight"), ROWS)
def test_configs_say_what_their_rows_do(name, arg, learners, heads, weight):
    config = read(name, arg)
    method = config["method"]
    row = (method["learners"], method["heads"], method["lambda_div"])
    assert row == (learners, heads, weight)
    assert config["sampler"] == {"name": "abe_pairs", "batch_size": 64}
    assert config["net"] == {"name": "googlenet"} and "normalize" not in config
    names = {"cub_abe": "cub200", "cars_abe": "cars196"}
    assert config["dataset"]["name"] == names.get(name, name[:-4])


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("cars_abe", "heads=True,learners=2"),
        ("cub_abe", None),
    ],
)
def test_configs_take_a_step(name, arg, tmp_path):
    small = {"sampler": {"batch_size": 16}, "method": CUT}
    with_diagnostics = name == "cub_abe"
    if with_diagnostics:
        small["method"] = {"split": ["conv1", "conv2"], "attention": "conv2"}
        small["net"] = {"name": "convnet", "widths": [4, 6], "strides": [2, 1]}
    config = shrink(read(name, arg), tmp_path, **small)
    config["normalize"] = "caffe"  # what GoogLeNet, which the small net replaces, asks for
    run, before, after, metrics = step(config, stats=with_diagnostics)
    heads, weight = config["method"]["heads"], config["method"]["lambda_div"]
    assert np.isfinite(metrics["loss"]) and ("positive_distance" in metrics) == with_diagnostics
    np.testing.assert_allclose(
        metrics["loss"], metrics["metric"] + weight * metrics["divergence"], rtol=1e-5
    )
    images = jax.ShapeDtypeStruct((2, 12, 12, 3), np.float32)
    parts = jax.eval_shape(run.method.inspect.parts, before.params, before.model_state, images)
    assert len(parts) == config["method"]["learners"]
    assert moved(before.params, after.params, "net/shared") > 0
    # The first step of SGD: the rate, ten times that of what is new, times the slope it remembers.
    slopes = optax.tree.get(after.opt_state, "trace")
    new, old = ("embedding_1", "head_1") if heads else ("embedding", "head")
    for part, rate in ((new, 1e-3), (old, 1e-4)):
        slope = max(float(abs(x).max()) for x in jax.tree.leaves(slopes["net"][part]))
        change = moved(before.params, after.params, f"net/{part}")
        np.testing.assert_allclose(change, rate * slope, rtol=0.02)


@pytest.mark.parametrize("heads", [False, True])
def test_a_pool_says_what_the_features_are(heads):
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    cut, actual = {"split": ("conv3", "conv4"), "attention": "conv4"}, {}
    for pool in ("mean", "flatten", "gem"):
        method = named_methods.abe(
            nets.convnet(), contrastive, classes=5, dim=8, learners=2, heads=heads, pool=pool, **cut
        )
        params, state = jax.eval_shape(method.init, jax.random.key(0), {"images": images})
        assert jax.eval_shape(method.embed, params, state, images).shape == (2, 8)
        linear = params["net"]["embedding_0" if heads else "embedding"]["kernel"]
        powers = [leaf for name, leaf in params["net"].items() if name.startswith("pool")]
        actual[pool] = linear.shape, len(jax.tree.leaves(powers))
    several = 2 if heads else 1
    assert actual == {"mean": ((128, 4), 0), "flatten": ((2048, 4), 0), "gem": ((128, 4), several)}
