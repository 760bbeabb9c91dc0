"""Ranking losses against double loops, dense formulas and pytorch-metric-learning (the peer)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from dmljax import losses, miners, ops
from dmljax.losses import ranking

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "ranking.npz")
CASES = sorted(name.removesuffix(".values") for name in GOLDEN.files if name.endswith(".values"))
PNP = ("O", "Ds", "Dq", "Iu", "Ib")

# Every loss as tested here, with high temperatures, so that all terms matter.
LOSSES = {
    "fast_ap": losses.fast_ap,
    "smooth_ap": functools.partial(losses.smooth_ap, temperature=0.2),
    "recall_at_k": functools.partial(losses.recall_at_k, ks=(1, 3, 4), k_temperature=0.2),
    **{f"pnp:{v}": functools.partial(losses.pnp, temperature=0.2, variant=v) for v in PNP},
    "histogram": functools.partial(losses.histogram, num_bins=20),
}
each_loss = pytest.mark.parametrize("name", LOSSES)
each_kind = pytest.mark.parametrize(
    "name", [name for name in LOSSES if "pnp" not in name or name == "pnp:Iu"]
)


def test_every_loss_is_tested():
    assert {name.partition(":")[0] for name in LOSSES} == set(ranking.__all__)


# --- the referees: loops for values, dense formulas for gradients -------------------------------


def _unit(x):
    x = np.asarray(x, np.float64)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(norms > 0, norms, 1)


def _pnp_penalty(variant, r, b=2.0, alpha=1.0):
    return {
        "O": r,
        "Ds": np.log(1 + r),
        "Dq": 1 - 1 / (1 + r) ** alpha,
        "Iu": (1 + r) * np.log(1 + r),
        "Ib": (b * r - np.log(1 + b * r)) / b**2,
    }[variant]


def _naive_entry(name, s, a, positives, negatives, own):
    """One anchor's entry, from its row `s` of cosines."""
    if name == "fast_ap":
        squares, entry, so_far, so_far_positive = 2 - 2 * s, 0.0, 0.0, 0.0
        if own:  # of zero rows only the loss itself knows that they have no direction
            squares = own[0][a]
        for centre in np.linspace(0, 4, 11):
            positive_weights = [max(0, 1 - abs(squares[j] - centre) / 0.4) for j in positives]
            negative_weights = [max(0, 1 - abs(squares[j] - centre) / 0.4) for j in negatives]
            so_far += sum(positive_weights) + sum(negative_weights)
            so_far_positive += sum(positive_weights)
            if so_far > 0:
                entry += sum(positive_weights) * so_far_positive / so_far / len(positives)
        return 1 - entry
    if name == "recall_at_k":
        ranked, recalls = positives + negatives, []
        for k in (1, 3, 4):
            within_k = 0.0
            for p in positives:
                rank = 1 + sum(expit((s[z] - s[p]) / 0.2) for z in ranked if z != p)
                within_k += expit(k - rank)
            recalls.append(min(k, within_k) / min(k, len(positives)))
        return 1 - np.mean(recalls)
    positives = [*positives, a] if own else positives
    total = 0.0
    for p in positives:
        ahead = {j: expit((s[j] - s[p]) / 0.2) for j in positives + negatives if j != p}
        if name == "smooth_ap":
            total += (1 + sum(ahead[j] for j in positives if j != p)) / (1 + sum(ahead.values()))
        else:
            total += _pnp_penalty(name[4:], sum(ahead[j] for j in negatives))
    return 1 - total / len(positives) if name == "smooth_ap" else total / len(positives)


def _naive_histogram(s, alike, unlike, own):
    both = [a for a in range(len(s)) if alike[a].any() and unlike[a].any()]

    def density(mask):
        chosen = {(a, j) for a in both for j in range(s.shape[1]) if mask[a, j]}
        chosen = {tuple(sorted(pair)) for pair in chosen} if own else chosen
        nodes = np.linspace(-1, 1, 21)
        return [
            np.mean([max(0, 1 - abs(s[pair] - node) / 0.1) for pair in chosen]) for node in nodes
        ]

    return float(np.dot(density(unlike), np.cumsum(density(alike)))) if both else 0.0


def _naive(name, x, labels, y=None, reference_labels=None):
    own = y is None
    x = _unit(x)
    y, reference_labels = (x, labels) if own else (_unit(y), reference_labels)
    s = x @ y.T
    squares = ((x[:, None] - y[None]) ** 2).sum(-1)
    alike = np.asarray(labels)[:, None] == np.asarray(reference_labels)[None]
    unlike = ~alike
    if own:
        alike = alike & ~np.eye(len(x), dtype=bool)
    if name == "histogram":
        return _naive_histogram(s, alike, unlike, own)
    entries = [
        _naive_entry(
            name,
            1 - squares[a] / 2 if name == "fast_ap" else s[a],
            a,
            list(np.flatnonzero(alike[a])),
            list(np.flatnonzero(unlike[a])),
            (squares,) if own else (),
        )
        for a in range(len(x))
        if alike[a].any()
    ]
    return float(np.mean(entries)) if entries else 0.0


def _dense(name, x, labels):
    """The formula on all triples at once, for `jax.grad`."""
    x = x / jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))
    s, eye = x @ x.T, np.eye(len(x), dtype=bool)
    alike = (labels[:, None] == labels[None]) & ~np.eye(len(x), dtype=bool)
    unlike = labels[:, None] != labels[None]
    valid = alike.any(axis=1)

    def triangles(values, centres, width):
        gaps = jnp.abs(values[..., None] - centres[None, None, :])
        return jnp.maximum(1 - gaps / width, 0)  # [b b bins]

    if name == "histogram":
        both = valid & unlike.any(axis=1)
        once = np.triu(both[:, None] | both[None, :])
        bins = triangles(s, jnp.linspace(-1, 1, 21), 0.1)
        positive, negative = (jnp.mean(bins[m & once], axis=0) for m in (alike, unlike))
        return jnp.sum(negative * jnp.cumsum(positive))
    if name == "fast_ap":
        squares = jnp.sum((x[:, None, :] - x[None, :, :]) ** 2, axis=-1)
        bins = triangles(squares, jnp.linspace(0, 4, 11), 0.4)
        h = jnp.sum(bins * alike[..., None], axis=1)
        total = jnp.cumsum(jnp.sum(bins * (alike | unlike)[..., None], axis=1), axis=1)
        terms = jnp.where(h > 0, h * jnp.cumsum(h, axis=1) / jnp.where(h > 0, total, 1), 0)
        return jnp.mean((1 - jnp.sum(terms, axis=1) / jnp.sum(alike, axis=1))[valid])
    # sig[a, p, j]: how far j stands before p.
    sig = jax.nn.sigmoid((s[:, None, :] - s[:, :, None]) / 0.2) * ~eye[None]
    if name == "recall_at_k":
        ranks = 1 + jnp.sum(sig * ~eye[:, None, :], axis=2)
        recalls = []
        for k in (1, 3, 4):
            within_k = jnp.sum(jax.nn.sigmoid(k - ranks) * alike, axis=1)
            recalls.append(jnp.minimum(within_k, k) / np.clip(alike.sum(axis=1), 1, k))
        return jnp.mean((1 - sum(recalls) / 3)[valid])
    positives = alike | eye
    if name == "smooth_ap":
        ratio = (1 + jnp.sum(sig * positives[:, None, :], axis=2)) / (1 + jnp.sum(sig, axis=2))
        return jnp.mean(
            (1 - jnp.sum(ratio * positives, axis=1) / jnp.sum(positives, axis=1))[valid]
        )
    r = jnp.sum(sig * unlike[:, None, :], axis=2)
    penalty = {
        "O": r,
        "Ds": jnp.log(1 + r),
        "Dq": 1 - 1 / (1 + r),
        "Iu": (1 + r) * jnp.log(1 + r),
        "Ib": (2 * r - jnp.log(1 + 2 * r)) / 4,
    }[name[4:]]
    return jnp.mean((jnp.sum(penalty * positives, axis=1) / jnp.sum(positives, axis=1))[valid])


ROWS, COLUMNS = 9, 4


@functools.cache
def _compiled(name):
    return jax.jit(jax.value_and_grad(LOSSES[name]))


def _run(name, x, labels, where=None, wide=False):
    """Value and gradient. Compiling takes longest, so all batches are padded to one shape, with
    columns of zeros and with rows that do not count."""
    b, d = x.shape
    dtype = np.float64 if wide else x.dtype
    full = np.full((ROWS, COLUMNS), np.nan, dtype)
    full[:b] = 0
    full[:b, :d] = x
    counts = np.arange(ROWS) < b
    counts[:b] &= True if where is None else where
    labels = np.concatenate([labels, np.zeros(ROWS - b)]).astype(np.int32)
    with jax.enable_x64(wide):
        value, gradient = _compiled(name)(full, labels, where=counts)
    gradient = np.asarray(gradient)
    assert not gradient[~counts].any()
    return value, gradient[:b, :d]


# --- values and gradients -----------------------------------------------------------------------


@each_loss
@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 9),
    labels=st.lists(st.sampled_from([-7, 0, 3, 2**31 - 1]), min_size=7, max_size=7),
    where=st.lists(st.booleans(), min_size=7, max_size=7),
    twin=st.booleans(),
    zero=st.booleans(),
)
def test_a_masked_batch_equals_the_loop_over_the_rows_that_count(
    name, seed, labels, where, twin, zero
):
    x, labels, where = np.random.default_rng(seed).normal(size=(7, 3)), np.array(labels), where
    x[4:6] = x[3] if twin else x[4:6]
    x[2] = 0 if zero else x[2]
    counting = np.flatnonzero(where)
    x[~np.array(where)] = np.nan  # a row that does not count may hold anything
    value, gradient = _run(name, x, labels, where, wide=True)
    np.testing.assert_allclose(
        value, _naive(name, x[counting], labels[counting]), rtol=1e-9, atol=1e-9
    )
    assert np.isfinite(gradient).all()


@each_loss
def test_gradient_is_that_of_the_dense_formula(name):
    x = np.random.default_rng(1).normal(size=(9, 4))
    labels = np.array([0, 2, 1, 0, 5, 2, 0, 0, 1])
    value, gradient = _run(name, x, labels, wide=True)
    with jax.enable_x64(True):
        dense = functools.partial(_dense, name, labels=labels)
        expected, slope = map(np.asarray, jax.jit(jax.value_and_grad(dense))(x))
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(gradient, slope, rtol=1e-7, atol=1e-9)
    assert np.abs(slope).max() > 1e-3


@each_kind
def test_references(name):
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(5, 4)), rng.normal(size=(8, 4))
    labels, others = np.array([0, 1, 2, 0, 9]), np.array([0, 0, 1, 1, 1, 2, 2, 3])
    with jax.enable_x64(True):
        value = jax.jit(LOSSES[name])(x, labels, references=y, reference_labels=others)
    np.testing.assert_allclose(value, _naive(name, x, labels, y, others), rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_peer(case):
    # Padded to one shape with rows that do not count, because compiling takes longest.
    embeddings, b = GOLDEN[f"{case}.embeddings"], len(GOLDEN[f"{case}.labels"])
    x, labels, where = np.full((16, 6), np.nan), np.zeros(16, np.int32), np.arange(16) < b
    x[:b], labels[:b] = embeddings, GOLDEN[f"{case}.labels"]
    compared = 0
    for i, name in enumerate(GOLDEN["losses"]):
        expected, slope = GOLDEN[f"{case}.values"][i], GOLDEN[f"{case}.gradients"][i]
        # The peer's angular miner finds an angle between three points that are one.
        if np.isnan(expected) or (case == "duplicates" and name == "triplet+angular"):
            continue
        compared += 1
        with jax.enable_x64(True):
            value, gradient = _as_peer(str(name))(x, labels, where=where)
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9, err_msg=name)
        atol = 1e-5 * np.abs(slope).max() + 1e-9
        np.testing.assert_allclose(gradient[:b], slope, rtol=0, atol=atol, err_msg=name)
    assert compared >= 12


@functools.cache
def _as_peer(name):
    """A loss of the peer's, by its name in the file: loss:argument+miner."""
    loss, _, mined = name.partition("+")
    loss, _, argument = loss.partition(":")
    if loss == "pnp":
        warm = {"b": 3, "alpha": 2, "temperature": 0.2, "variant": "Dq"}
        keywords = warm if argument == "warm" else {"variant": argument}
    elif loss == "smooth_ap":
        keywords = {"temperature": float(argument or 0.01)}
    else:
        keywords = {"num_bins": int(argument)} if argument else {}
    mine_fns = {
        "all": miners.triplet_margin,
        "semihard": functools.partial(miners.triplet_margin, kind="semihard"),
        "angular": miners.angular,
        "multi_similarity": miners.multi_similarity,
        "pair_margin": miners.pair_margin,
    }
    if mined:
        keywords["mine_fn"] = mine_fns[mined]
    return jax.jit(jax.value_and_grad(functools.partial(getattr(losses, loss), **keywords)))


# --- where the peer is wrong --------------------------------------------------------------------


def _perfect(labels):
    """Every class a point of its own, all classes at right angles."""
    return np.eye(np.max(labels) + 1, dtype=np.float32)[labels]


def test_smooth_ap_of_a_perfect_batch_is_0_for_all_class_sizes():
    # The peer takes 4 x 3 for 3 x 4 and reports .297.
    for labels in (np.repeat(np.arange(4), 3), np.array([0, 1, 0, 2, 2, 1, 0, 0, 3, 3])):
        assert jax.jit(losses.smooth_ap)(_perfect(labels), labels) < 1e-4


def test_smooth_ap_does_not_depend_on_the_order_of_rows():
    x, labels = np.random.default_rng(3).normal(size=(12, 5)), np.repeat(np.arange(4), 3)
    order = np.random.default_rng(4).permutation(12)
    with jax.enable_x64(True):
        loss = jax.jit(losses.smooth_ap)
        sorted_, shuffled = loss(x, labels), loss(x[order], labels[order])
    np.testing.assert_allclose(sorted_, shuffled, rtol=1e-9)
    np.testing.assert_allclose(sorted_, _smooth_ap_cold(x, labels), rtol=1e-9)


def _smooth_ap_cold(x, labels):
    s, precisions = _unit(x) @ _unit(x).T, []
    for a in range(len(x)):
        positives = np.flatnonzero(labels == labels[a])
        ahead = expit((s[a][None, :] - s[a][:, None]) / 0.01) * (1 - np.eye(len(x)))
        ratios = (1 + ahead[:, positives].sum(1)) / (1 + ahead.sum(1))
        precisions.append(ratios[positives].mean())
    return 1 - np.mean(precisions)


def test_histogram_has_a_last_bin_for_duplicates():
    labels = np.repeat(np.arange(3), 3)
    value, gradient = jax.value_and_grad(losses.histogram)(jnp.asarray(_perfect(labels)), labels)
    assert value == 0  # all positives are in the last bin, all negatives far below
    assert np.isfinite(gradient).all()
    # And with each positive the twin of a negative too: below or level, in the bin's sum.
    assert losses.histogram(np.ones((4, 2), np.float32), np.array([0, 0, 1, 1])) > 0.9999


# --- single formulas ----------------------------------------------------------------------------


def test_recall_at_k_does_not_rank_the_query():
    # One positive, nearest: rank 1, so sigmoid(k - 1).
    labels = np.array([0, 0, 1, 1])
    value = losses.recall_at_k(_perfect(labels), labels, ks=(1, 2))
    assert value == pytest.approx(1 - (expit(0) + expit(1)) / 2, abs=1e-6)


def test_recall_at_k_divides_by_the_most_that_k_places_hold():
    # All of one class and alike: each of 7 positives has rank 4.
    x, labels = np.ones((8, 2), np.float32), np.zeros(8, int)
    assert losses.recall_at_k(x, labels, ks=(2,)) == pytest.approx(1 - 7 * expit(-2) / 2, abs=1e-5)
    assert losses.recall_at_k(x, labels, ks=(16,)) == pytest.approx(0, abs=1e-4)
    # The recall is at most 1, however many positives rank within k.
    assert losses.recall_at_k(x, labels, ks=(5,)) == pytest.approx(0, abs=1e-6)


def test_fast_ap_is_one_minus_precision_where_bins_are_pure():
    # Positives opposite, negatives at the anchor: found last, among all.
    x = np.array([[1, 0], [-1, 0], [1, 0], [-1, 0]], np.float32)
    assert losses.fast_ap(x, np.array([0, 0, 1, 1])) == pytest.approx(1 - 1 / 3)
    assert losses.fast_ap(x, np.array([0, 1, 0, 1])) == pytest.approx(0)


def test_histogram_entries_are_shares_of_positives_below_a_negative():
    x = jnp.asarray(np.random.default_rng(5).normal(size=(10, 3)), jnp.float32)
    labels = np.arange(10) // 3
    shares = losses.histogram(x, labels, reduce_fn=None)
    assert shares.shape == (10, 10) and shares.min() >= 0 and shares.max() < 1.0001
    s = _unit(x) @ _unit(x).T
    both = labels < 3
    alike = s[(labels[:, None] == labels[None]) & ~np.eye(10, dtype=bool)]
    for i, j in ((0, 3), (5, 9), (9, 5)):
        assert both[i] or both[j]
        assert shares[i, j] == pytest.approx(np.mean(alike < s[i, j]), abs=0.12)


@each_kind
def test_entries(name):
    x, _ = _batch()
    labels, where = np.array([0, 0, 1, 1, 1, 2, 0, 2, 2]), np.array([1] * 5 + [0] * 4, bool)
    entries = jax.jit(functools.partial(LOSSES[name], reduce_fn=None))(x, labels, where=where)
    assert not entries[5:].any()
    counted = 12 if name == "histogram" else 5
    value, _ = _run(name, x, labels, where)
    np.testing.assert_allclose(entries.sum() / counted, value, rtol=1e-5)


# --- properties ---------------------------------------------------------------------------------


def _batch(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return x, np.arange(ROWS) % 4


@each_loss
def test_permutation_and_scale(name):
    x, labels = _batch()
    order = np.random.default_rng(7).permutation(ROWS)
    value, gradient = _run(name, x, labels)
    other, moved = _run(name, 8 * x[order], labels[order])
    np.testing.assert_allclose(value, other, rtol=1e-5)
    np.testing.assert_allclose(gradient[order], 8 * moved, rtol=1e-3, atol=1e-5)


@each_kind
def test_jit_and_vmap(name):
    x, labels = _batch()
    batches = np.stack([x, x[::-1] ** 2])
    plain = [LOSSES[name](one, labels) for one in batches]
    np.testing.assert_allclose(plain, [_run(name, one, labels)[0] for one in batches], 1e-5)
    together, slopes = jax.vmap(_compiled(name), in_axes=(0, None))(batches, labels)
    np.testing.assert_allclose(together, plain, rtol=1e-5)
    np.testing.assert_allclose(slopes[1], _run(name, batches[1], labels)[1], 1e-4, 1e-6)


@each_loss
@pytest.mark.parametrize("labels", ([0] * 6, range(6), [0, 0, 0, 1, 1, 1]), ids=str)
def test_degenerate_batches_are_finite(name, labels):
    labels = np.array(labels)
    rng = np.random.default_rng(8)
    spread = rng.normal(size=(6, 3))
    near = np.ones((6, 3)) + 1e-6 * spread
    tiny, large = 1e-30 * spread, 1e30 * spread
    half = spread * (np.arange(6) % 2)[:, None]
    for x in (spread, near, tiny, large, half, np.ones((6, 3)), np.zeros((6, 3))):
        for where in (np.ones(6, bool), np.zeros(6, bool), np.arange(6) < 2, np.arange(6) < 1):
            value, gradient = _run(name, x.astype(np.float32), labels, where)
            assert np.isfinite(value) and value >= -1e-5
            assert np.isfinite(gradient).all()
            assert where.sum() > 1 or (value == 0 and not gradient.any())


@each_kind
def test_single_row(name):
    x, labels = jnp.ones((1, 3)), jnp.array([2])
    value, gradient = jax.jit(jax.value_and_grad(LOSSES[name]))(x, labels)
    assert value == 0 and not gradient.any()


@each_loss
@pytest.mark.parametrize("row", range(ROWS))
def test_nan_stays_visible(name, row):
    # Among them rows that are nobody's positive but everybody's negative.
    x, labels = _batch()[0], np.array([9, 0, 0, 0, 1, 8, 1, 0, 1])
    x[row, 1] = np.nan
    assert np.isnan(_run(name, x, labels)[0])


@each_kind
def test_half_precision(name):
    x, labels = _batch()
    half = jnp.asarray(x).astype(jnp.bfloat16)
    value, gradient = _compiled(name)(half, labels)
    wide, slope = _run(name, np.asarray(half.astype(jnp.float32)), labels)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, wide, rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(jnp.float32), slope, rtol=1e-2, atol=1e-6)


@each_kind
def test_label_forms_and_miners(name):
    x, labels = _batch()
    value, _ = _run(name, x, labels)
    loss = jax.jit(LOSSES[name])
    hot = labels[:, None] == np.arange(4)[None]
    np.testing.assert_allclose(loss(x, hot), value, rtol=1e-6)
    pairs = ops.pairs(labels)
    np.testing.assert_allclose(loss(x, pairs), value, rtol=1e-6)
    # Only pairs that a miner keeps are ranked.
    keep = np.random.default_rng(9).random((ROWS, ROWS)) < 0.7
    fewer = ops.Pairs(pairs.positives & keep, pairs.negatives & keep)
    mined = functools.partial(
        LOSSES[name], mine_fn=lambda _, p: ops.Pairs(p[0] & keep, p[1] & keep)
    )
    np.testing.assert_allclose(jax.jit(mined)(x, labels), loss(x, fewer), rtol=1e-6)
    assert abs(loss(x, fewer) - value) > 1e-3


@pytest.mark.parametrize("name", ranking.__all__)
def test_memory(name):
    # Labels are an argument, so this is the same program for 256 classes of 4 and for 2 of 512.
    x = jax.ShapeDtypeStruct((1024, 128), jnp.float32)
    labels = jax.ShapeDtypeStruct((1024,), jnp.int32)
    lowered = jax.jit(jax.value_and_grad(getattr(losses, name))).lower(x, labels)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 64 * 2**20


def test_wrong_arguments_are_named():
    x, labels = _batch()
    with pytest.raises(ValueError, match="'Z' does not exist; there are O, Ds, Dq, Iu, Ib"):
        losses.pnp(x, labels, variant="Z")
    for name in ("fast_ap", "histogram"):
        with pytest.raises(ValueError, match="num_bins must be at least 1, not 0"):
            getattr(losses, name)(x, labels, num_bins=0)
    for ks in ((), (0, 1)):
        with pytest.raises(ValueError, match="ks must be one or more numbers from 1"):
            losses.recall_at_k(x, labels, ks=ks)
