"""Miners against double loops, against pytorch-metric-learning (the peer), and inside losses."""

import functools
import itertools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax import losses, miners, ops

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "ranking.npz")
CASES = sorted(name.removesuffix(".values") for name in GOLDEN.files if name.endswith(".values"))
KEY = jax.random.key(0)
STRATEGIES = [
    (pos, neg)
    for pos, neg in itertools.product(("easy", "semihard", "hard", "all"), repeat=2)
    if "semihard" not in (pos, neg) or (pos != neg and "all" not in (pos, neg))
]
PAIR_MINERS = {
    "multi_similarity": functools.partial(miners.multi_similarity, epsilon=0.125),
    "batch_hard": miners.batch_hard,
    **{
        f"batch_easy_hard:{pos},{neg}": functools.partial(
            miners.batch_easy_hard,
            pos=pos,
            neg=neg,
            allowed_pos_range=(0.25, 1.5),
            allowed_neg_range=(0.5, 1.75),
        )
        for pos, neg in STRATEGIES
    },
    "pair_margin": functools.partial(miners.pair_margin, pos_margin=0.25, neg_margin=1.25),
    "hardest_fraction": functools.partial(miners.hardest_fraction, fraction=0.3),
}
TRIPLET_MINERS = {
    **{
        f"triplet_margin:{kind}": functools.partial(miners.triplet_margin, margin=0.25, kind=kind)
        for kind in ("all", "hard", "semihard", "easy")
    },
    "angular": functools.partial(miners.angular, angle=31),
}
DRAWS = {
    "distance_weighted": functools.partial(miners.distance_weighted, key=KEY, dim=8),
    "uniform_histogram": functools.partial(miners.uniform_histogram, key=KEY, num_bins=5),
}
BY_POSITION = {"next_in_batch": miners.next_in_batch, "across_halves": miners.across_halves}
EVERY = PAIR_MINERS | TRIPLET_MINERS | DRAWS | BY_POSITION


def test_every_miner_is_tested():
    assert {name.partition(":")[0] for name in EVERY} == set(miners.__all__)


def _dense(chosen):
    """[b n n]: the chosen triplets."""
    (positives, negatives), d, select_fn = chosen
    between = d[None] if d.shape[0] == d.shape[1] else None
    kept = select_fn(d[:, :, None], d[:, None, :], between)
    return kept & positives[:, :, None] & negatives[:, None, :]


def _as_masks(chosen):
    return tuple(chosen) if isinstance(chosen, ops.Pairs) else (_dense(chosen),)


# --- the referees -------------------------------------------------------------------------------


def _naive_multi_similarity(d, positives, negatives, epsilon=0.125):
    s, chosen = 1 - d**2 / 2, ([], [])
    for i in range(len(d)):
        p, n = np.flatnonzero(positives[i]), np.flatnonzero(negatives[i])
        if len(p) and len(n):
            chosen[0].extend((i, j) for j in p if s[i, j] < s[i, n].max() + epsilon)
            chosen[1].extend((i, j) for j in n if s[i, j] > s[i, p].min() - epsilon)
    return chosen


def _naive_pair_margin(d, positives, negatives):
    return (
        [(i, j) for i, j in np.argwhere(positives) if d[i, j] > 0.25],
        [(i, j) for i, j in np.argwhere(negatives) if d[i, j] < 1.25],
    )


def _naive_hardest_fraction(d, positives, negatives):
    chosen = []
    for mask, sign in ((positives, -1), (negatives, 1)):
        ranked = sorted(np.argwhere(mask).tolist(), key=lambda pair: sign * d[tuple(pair)])
        chosen.append(ranked[: math.ceil(0.3 * len(ranked) - 1e-9)])
    return chosen


def _naive_batch_easy_hard(pos, neg, d, positives, negatives, ranges=True):
    chosen = ([], [])
    for i in range(len(d)):
        p, n = list(np.flatnonzero(positives[i])), list(np.flatnonzero(negatives[i]))
        if ranges:
            p = [j for j in p if 0.25 <= d[i, j] <= 1.5]
            n = [j for j in n if 0.5 <= d[i, j] <= 1.75]

        def best(of, far, row=d[i]):
            return [] if not of else [(max if far else min)(of, key=row.__getitem__)]

        if neg == "semihard":
            p = best(p, pos == "hard")
            n = best([j for j in n if p and d[i, j] > d[i, p[0]]], far=False)
        elif pos == "semihard":
            n = best(n, neg == "easy")
            p = best([j for j in p if n and d[i, j] < d[i, n[0]]], far=True)
        else:
            p = p if pos == "all" else best(p, pos == "hard")
            n = n if neg == "all" else best(n, neg == "easy")
        if "all" in (pos, neg) or (p and n):
            chosen[0].extend((i, j) for j in p)
            chosen[1].extend((i, j) for j in n)
    return chosen


def _naive(name, *args):
    name, _, strategy = name.partition(":")
    if name == "batch_hard":
        return _naive_batch_easy_hard("hard", "hard", *args, ranges=False)
    if name == "batch_easy_hard":
        return _naive_batch_easy_hard(*strategy.split(","), *args)
    return globals()[f"_naive_{name}"](*args)


def _naive_triplet(name, d_ap, d_an, d_pn):
    gap = d_an - d_ap
    if name == "angular":
        # The triangle laid out flat: the anchor at 0, the positive on the first axis.
        tangent = d_ap / (2 * math.sqrt(max(0, (2 * d_an**2 + 2 * d_pn**2 - d_ap**2) / 4)) or 1e-30)
        return math.atan(tangent) > math.radians(31)
    kind = name.partition(":")[2]
    return {
        "all": gap <= 0.25,
        "hard": gap <= 0,
        "semihard": 0 < gap <= 0.25,
        "easy": gap > 0.25,
    }[kind]


# Distances on a grid, so that there are ties, which floats represent exactly.
GRIDS = st.lists(st.integers(0, 16), min_size=30, max_size=30)
MASKS = st.lists(st.sampled_from(["p", "n", "-"]), min_size=30, max_size=30)


def _grid(steps, kinds):
    distances = np.reshape(steps, (5, 6)).astype(np.float32) / 8
    kinds = np.reshape(kinds, (5, 6))
    return distances, ops.Pairs(kinds == "p", kinds == "n")


@functools.cache
def _compiled(name):
    """The miner's masks: of pairs, or of triplets."""
    return jax.jit(lambda *args: _as_masks(EVERY[name](*args)))


@pytest.mark.parametrize("name", PAIR_MINERS)
@settings(deadline=None, max_examples=60, derandomize=True)
@given(steps=GRIDS, kinds=MASKS)
def test_pairs_are_those_of_the_loop(name, steps, kinds):
    distances, pairs = _grid(steps, kinds)
    chosen = _compiled(name)(distances, pairs)
    for mask, expected in zip(chosen, _naive(name, distances, *pairs), strict=True):
        assert {*map(tuple, np.argwhere(mask))} == {*map(tuple, expected)}


@pytest.mark.parametrize("name", TRIPLET_MINERS)
@settings(deadline=None, max_examples=20, derandomize=True)
@given(steps=st.lists(st.integers(4, 12), min_size=15, max_size=15), seed=st.integers(0, 99))
def test_triplets_are_those_of_the_loop(name, steps, seed):
    distances = np.zeros((6, 6), np.float32)
    distances[np.triu_indices(6, 1)] = np.array(steps) / 8
    distances += distances.T
    pairs = ops.pairs(np.random.default_rng(seed).integers(0, 3, 6))
    kept = np.asarray(_compiled(name)(distances, pairs)[0])
    d, pairs = distances.astype(float), ops.Pairs(*map(np.asarray, pairs))
    for i, j, k in itertools.product(range(6), repeat=3):
        expected = pairs.positives[i, j] and pairs.negatives[i, k]
        expected = expected and _naive_triplet(name, d[i, j], d[i, k], d[j, k])
        assert kept[i, j, k] == expected


def _naive_across_halves(labels):
    half, chosen = len(labels) // 2, ([], [])
    for i in range(half):
        chosen[int(labels[i] != labels[i + half])].append((i, i + half))
    return chosen


def _naive_next_in_batch(labels):
    chosen = ([], [])
    for i, label in enumerate(labels):
        later = list(enumerate(labels))[i + 1 :]
        same = [j for j, other in later if other == label]
        others = [j for j, other in later if other != label]
        if same and others:
            chosen[0].append((i, same[0]))
            chosen[1].append((i, others[0]))
    return chosen


@pytest.mark.parametrize("name", BY_POSITION)
@pytest.mark.parametrize("size", (1, 2, 8, 9))
def test_selection_by_position(name, size):
    rng = np.random.default_rng(size)
    for _ in range(10):
        labels = rng.integers(0, 3, size)
        distances = rng.uniform(size=(size, size)).astype(np.float32)
        chosen = _compiled(name)(distances, ops.pairs(labels))
        for mask, expected in zip(chosen, _naive(name, labels), strict=True):
            assert [*map(tuple, np.argwhere(mask))] == sorted(expected)


def test_angle_is_measured_at_the_negative():
    # An isosceles triangle over a base of length 1: half the angle at the tip is atan(1 / (2 h)).
    for angle, kept in ((25, False), (35, True)):
        height = 1 / (2 * math.tan(math.radians(angle)))
        x = np.array([[-0.5, 0], [0.5, 0], [0, height]])
        distances = np.linalg.norm(x[:, None] - x[None], axis=-1)
        pairs = ops.pairs(np.array([0, 0, 1]))
        assert _dense(miners.angular(distances, pairs, angle=30)).any() == kept


# --- the peer -------------------------------------------------------------------------


def _as_peer(name):
    name, _, argument = name.partition(":")
    if name == "multi_similarity":
        keywords = {"epsilon": float(argument)} if argument else {}
    elif name == "pair_margin":
        keywords = {"pos_margin": 0.9, "neg_margin": 1.3} if argument else {}
    elif name == "hardest_fraction":
        keywords = {"fraction": float(argument)} if argument else {}
    elif name == "batch_easy_hard" and argument == "ranges":
        keywords = {"allowed_pos_range": (0.3, 1.3), "allowed_neg_range": (0.9, 1.6)}
        keywords |= {"pos": "hard", "neg": "hard"}
    elif name == "batch_easy_hard":
        keywords = dict(zip(("pos", "neg"), argument.split(","), strict=True))
    elif name == "triplet_margin":
        keywords = {"margin": 0.5} if argument == ".5" else {"kind": argument}
    else:
        keywords = {"angle": float(argument)} if argument else {}
    return functools.partial(getattr(miners, name), **keywords)


@functools.cache
def _all_as_peer():
    names = [str(name) for key in ("pair_miners", "triplet_miners") for name in GOLDEN[key]]
    return names, jax.jit(lambda *args: [_as_masks(_as_peer(name)(*args)) for name in names])


@pytest.mark.parametrize("case", CASES)
def test_peer(case):
    # Padded to one shape with rows that do not count, because compiling takes longest.
    b = len(GOLDEN[f"{case}.labels"])
    x, labels, where = np.zeros((16, 6)), np.zeros(16, np.int32), np.arange(16) < b
    x[:b], labels[:b] = GOLDEN[f"{case}.embeddings"], GOLDEN[f"{case}.labels"]
    names, mine = _all_as_peer()
    with jax.enable_x64(True):
        x = jnp.asarray(x)
        chosen = mine(ops.unit_euclidean(x, x), ops.pairs(labels, where=where))
    pairs, triplets = len(GOLDEN["pair_miners"]), len(GOLDEN["triplet_miners"])
    expected = np.unpackbits(GOLDEN[f"{case}.pairs"], count=pairs * 2 * b * b)
    expected = [*expected.reshape(pairs, 2, b, b).astype(bool)]
    wanted = np.unpackbits(GOLDEN[f"{case}.triplets"], count=triplets * b**3)
    expected += [*wanted.reshape(triplets, 1, b, b, b).astype(bool)]
    for name, masks, wanted in zip(names, chosen, expected, strict=True):
        if case == "duplicates" and name.startswith(("batch_", "hardest_", "angular")):
            continue  # the peer takes any of equal candidates; for angular see below
        for mask, peer in zip(map(np.asarray, masks), wanted, strict=True):
            assert mask.sum() == peer.sum(), name
            mask = mask[(slice(b),) * mask.ndim]
            if name.startswith("hardest_"):
                # The two directions of a pair are equal, and an odd count splits one pair.
                mask, peer = mask | mask.T, peer | peer.T
            np.testing.assert_array_equal(mask, peer, err_msg=name)


def test_angular_ignores_the_lengths_of_embeddings():
    # The peer does not normalize, so it selects other triplets of 5 x than of x.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    x = x * jnp.arange(1, 9)[:, None]
    labels = np.arange(8) // 2
    value = losses.triplet(x, labels, mine_fn=miners.angular)
    unit = losses.triplet(ops.normalize(x), labels, mine_fn=miners.angular)
    np.testing.assert_allclose(value, unit, rtol=1e-5)


def test_three_equal_points_have_no_angle():
    # The peer adds 1e-6 to all differences of coordinates, which gives an angle of 26.6 degrees.
    noise = np.random.default_rng(1).uniform(0, 1e-7, (6, 6)).astype(np.float32)
    for distances in (noise + noise.T, np.zeros((6, 6), np.float32)):
        assert not _dense(miners.angular(distances, ops.pairs(np.arange(6) // 3), angle=1)).any()


def test_ranges_hold_for_all_pairs_too():
    # The peer ignores a range for the strategy "all".
    distances = np.array([[0.1, 0.5, 1.0, 1.5]], np.float32)
    pairs = ops.Pairs(np.array([[1, 1, 0, 0]], bool), np.array([[0, 0, 1, 1]], bool))
    kept = miners.batch_easy_hard(
        distances, pairs, pos="all", neg="all", allowed_pos_range=(0.3, 9), allowed_neg_range=(0, 1)
    )
    np.testing.assert_array_equal(kept[0], [[0, 1, 0, 0]])
    np.testing.assert_array_equal(kept[1], [[0, 0, 1, 0]])


# --- draws --------------------------------------------------------------------------------------


def test_distance_weighted_draws_by_the_inverse_density():
    distances = jnp.array([[0.3, 0.2, 0.7, 0.9, 1.2, 1.5]])
    positives = jnp.array([[True, False, False, False, False, False]])
    pairs = ops.Pairs(positives, ~positives)
    draw = jax.jit(
        jax.vmap(lambda key: miners.distance_weighted(distances, pairs, key=key, dim=6).negatives)
    )
    drawn = np.asarray(draw(jax.random.split(KEY, 20_000)))[:, 0]
    assert (drawn.sum(axis=1) == 1).all()
    d = np.maximum(distances[0], 0.5)
    weights = 1 / (d**4 * (1 - d**2 / 4) ** 1.5)
    weights = np.where((np.arange(6) > 0) & (np.asarray(distances[0]) < 1.4), weights, 0)
    np.testing.assert_allclose(drawn.mean(axis=0), weights / weights.sum(), atol=0.01)


def test_distance_weighted_draws_distinct_negatives_as_many_as_positives():
    rng = np.random.default_rng(0)
    distances = rng.uniform(0, 2, (40, 50)).astype(np.float32)
    kinds = rng.choice(["p", "n", "-"], (40, 50), p=[0.3, 0.5, 0.2])
    kinds[:3], kinds[3:5], kinds[5:7] = "p", "n", "-"
    positives, negatives = kinds == "p", kinds == "n"
    chosen = miners.distance_weighted(distances, ops.Pairs(positives, negatives), key=KEY, dim=64)
    possible = negatives & (distances < 1.4)
    assert not (chosen.negatives & ~possible).any()
    counts = np.minimum(positives.sum(axis=1), possible.sum(axis=1))
    np.testing.assert_array_equal(chosen.negatives.sum(axis=1), counts)
    np.testing.assert_array_equal(chosen.positives, positives & (counts > 0)[:, None])


def test_distance_weighted_survives_many_dimensions_and_antipodes():
    distances = jnp.array([[0.0, 1e-3, 1.9, 2.0, 2.0000002]])
    positives = jnp.array([[True] * 1 + [False] * 4])
    chosen = miners.distance_weighted(
        distances, ops.Pairs(positives, ~positives), key=KEY, dim=4096, nonzero_loss_cutoff=3
    )
    # In 4096 dimensions 1.9 is less likely than what the cutoff makes of 1e-3, and so is drawn...
    log_q = [4094 * np.log(d) + 2046.5 * np.log(1 - d**2 / 4) for d in (0.5, 1.9)]
    np.testing.assert_array_equal(np.flatnonzero(chosen.negatives[0]), [1 + np.argmin(log_q)])


def test_uniform_histogram_fills_every_bin_alike():
    rng = np.random.default_rng(1)
    distances = rng.beta(2, 5, (30, 40)).astype(np.float32) * 2
    kinds = rng.choice(["p", "n", "-"], (30, 40), p=[0.2, 0.7, 0.1])
    pairs = ops.Pairs(kinds == "p", kinds == "n")
    chosen = miners.uniform_histogram(
        distances, pairs, key=KEY, num_bins=8, pos_per_bin=5, neg_per_bin=20
    )
    for mask, drawn, per_bin in zip(pairs, chosen, (5, 20), strict=True):
        drawn = np.asarray(drawn)
        assert not (drawn & ~mask).any()
        d = distances[mask].astype(float)
        edges = np.linspace(d.min(), d.max() + 1e-6, 9)
        sizes, _ = np.histogram(d, edges)
        taken, _ = np.histogram(distances[drawn], edges)
        np.testing.assert_array_equal(taken, np.minimum(sizes, per_bin))
        assert (sizes > per_bin).any() and (sizes < per_bin).any()


def test_uniform_histogram_draws_evenly_within_a_bin():
    distances = jnp.zeros((2, 6)).at[1].set(1.0)
    pairs = ops.Pairs(jnp.zeros((2, 6), bool), jnp.ones((2, 6), bool))
    draw = jax.vmap(
        lambda key: miners.uniform_histogram(distances, pairs, key=key, neg_per_bin=2).negatives
    )
    drawn = np.asarray(jax.jit(draw)(jax.random.split(KEY, 10_000)))
    assert (drawn.sum(axis=2) == 2).all()
    np.testing.assert_allclose(drawn.mean(axis=0), 1 / 3, atol=0.02)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_keys(name):
    rng = np.random.default_rng(2)
    distances, pairs = rng.uniform(0.5, 1.3, (20, 20)), ops.pairs(np.arange(20) // 4)
    draw = functools.partial(EVERY[name], distances, pairs)
    first, again, other = draw(key=KEY), draw(key=KEY), draw(key=jax.random.key(1))
    np.testing.assert_array_equal(first.negatives, again.negatives)
    assert (first.negatives != other.negatives).any()


# --- properties of all --------------------------------------------------------------------------


# A pair of `across_halves` is never part of a triplet, and a dropped row moves the second half.
SOME = [n for n in EVERY if ":" not in n or n.endswith(("easy,semihard", ":semihard"))]
SOME.remove("across_halves")
each_miner = pytest.mark.parametrize("name", SOME)


def test_some_is_one_of_each():
    assert len(SOME) == len(miners.__all__) - 1


@functools.cache
def _loss(name):
    """A loss that hands the miner's choice on to the gradient."""
    return jax.jit(
        jax.value_and_grad(functools.partial(losses.triplet, margin=1.0, mine_fn=EVERY[name]))
    )


def _batch(seed, b=9, d=4):
    x = np.random.default_rng(seed).normal(size=(b, d)).astype(np.float32)
    return x, np.arange(b) // 2


def _distances(x):
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
    return np.linalg.norm(unit[:, None] - unit[None], axis=-1).astype(np.float32)


@each_miner
def test_a_masked_row_is_a_dropped_row(name):
    x, labels = _batch(3)
    where = np.array([1, 1, 0, 1, 1, 1, 0, 1, 1], bool)
    distances = _distances(x)
    chosen = _compiled(name)(distances, ops.pairs(labels, where=where))
    for mask in chosen:
        for axis in range(mask.ndim):
            assert not np.compress(~where, mask, axis=axis).any()
    if name in DRAWS:
        return
    fewer = _compiled(name)(distances[where][:, where], ops.pairs(labels[where]))
    for mask, dropped in zip(chosen, fewer, strict=True):
        for axis in range(mask.ndim):
            mask = np.compress(where, mask, axis=axis)
        np.testing.assert_array_equal(mask, dropped)


@pytest.mark.parametrize("name", [name for name in SOME if name not in TRIPLET_MINERS])
def test_no_gradient_flows_through_the_choice_of_pairs(name):
    x, labels = _batch(4)
    chosen = ops.Pairs(*_compiled(name)(_distances(x), ops.pairs(labels)))
    value, gradient = _loss(name)(x, labels)
    fixed, slope = jax.jit(jax.value_and_grad(functools.partial(losses.triplet, margin=1.0)))(
        x, chosen
    )
    assert value > 0
    np.testing.assert_allclose(value, fixed, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in SOME if name in TRIPLET_MINERS])
def test_no_gradient_flows_through_the_choice_of_triplets(name):
    x, labels = _batch(4)
    slope = jax.grad(lambda d: EVERY[name](d, ops.pairs(labels)).distances.sum())(_distances(x))
    assert not slope.any()


@each_miner
@pytest.mark.parametrize("labels", ([0] * 9, range(9), [0] * 5 + [1] * 4), ids=str)
def test_degenerate_batches(name, labels):
    labels = np.array(labels)
    for x in (_batch(5)[0], np.ones((9, 4), np.float32), np.zeros((9, 4), np.float32)):
        for where in (np.ones(9, bool), np.zeros(9, bool)):
            pairs = ops.pairs(labels, where=where)
            chosen = _compiled(name)(_distances(x), pairs)
            for mask, possible in zip(chosen, pairs, strict=len(chosen) == 2):
                possible = possible[..., None] if mask.ndim == 3 else possible
                assert not (mask & ~possible).any()
            value, gradient = _loss(name)(x, labels, where=where)
            assert np.isfinite(value) and np.isfinite(gradient).all()


@each_miner
@pytest.mark.parametrize("row", range(3))
def test_a_nan_is_kept(name, row):
    x, _ = _batch(6)
    x[row, 0] = np.nan
    assert np.isnan(_loss(name)(x, np.arange(9) // 3)[0])


@each_miner
def test_vmap_and_half_precision(name):
    labels = np.arange(9) // 2
    x = jnp.stack([_batch(seed)[0] for seed in range(2)]).astype(jnp.bfloat16)
    values, gradients = jax.vmap(_loss(name), in_axes=(0, None))(x, labels)
    single = [_loss(name)(np.asarray(one, np.float32), labels)[0] for one in x]
    np.testing.assert_allclose(values, single, rtol=1e-5)
    assert gradients.dtype == jnp.bfloat16


# --- inside losses ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("all", "hard", "semihard", "easy"))
def test_triplet_loss_over_selected_triplets(kind):
    x = np.random.default_rng(8).normal(size=(9, 3))
    labels = np.array([0, 0, 0, 1, 1, 2, 2, 2, 5])
    mine_fn = functools.partial(miners.triplet_margin, margin=0.3, kind=kind)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    d = np.linalg.norm(unit[:, None] - unit[None], axis=-1)
    terms = []
    for a, p, n in itertools.product(range(9), repeat=3):
        if a != p and labels[a] == labels[p] and labels[a] != labels[n]:
            gap = d[a, n] - d[a, p]
            kinds = {"all": gap <= 0.3, "hard": gap <= 0, "semihard": 0 < gap <= 0.3}
            if kinds.get(kind, gap > 0.3):
                terms.append(max(0, 0.5 - gap))
    expected = np.mean([term for term in terms if term > 0])
    with jax.enable_x64(True):
        value = losses.triplet(jnp.asarray(x), labels, margin=0.5, mine_fn=mine_fn)
        dense = losses.triplet(jnp.asarray(x), labels, margin=0.5, mine_fn=mine_fn, reduce_fn=None)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    np.testing.assert_allclose(np.asarray(dense).sum(), sum(terms), rtol=1e-9)


def test_batch_hard_triplet_loss():
    x = np.random.default_rng(9).normal(size=(8, 3))
    labels = np.arange(8) % 3
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    d = np.linalg.norm(unit[:, None] - unit[None], axis=-1)
    alike = labels[:, None] == labels[None]
    farthest = np.where(alike, d, -1).max(axis=1)
    nearest = np.where(alike, 9, d).min(axis=1)
    with jax.enable_x64(True):
        value = losses.triplet(
            jnp.asarray(x), labels, margin=0.4, mine_fn=miners.batch_hard, reduce_fn=ops.mean
        )
    expected = np.mean(np.maximum(0, farthest - nearest + 0.4))
    np.testing.assert_allclose(value, expected, rtol=1e-9)


def test_references_are_mined_too():
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(4, 3)), rng.normal(size=(7, 3))
    labels, others = np.arange(4), np.array([0, 1, 2, 3, 0, 1, 2])
    unit, others_unit = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
    d = np.linalg.norm(unit[:, None] - others_unit[None], axis=-1)
    alike = labels[:, None] == others[None]
    farthest, nearest = np.where(alike, d, -1).max(axis=1), np.where(alike, 9, d).min(axis=1)
    loss = functools.partial(losses.triplet, margin=2.0, mine_fn=miners.batch_hard)
    value = jax.jit(loss)(x, labels, references=y, reference_labels=others)
    np.testing.assert_allclose(value, np.mean(farthest - nearest + 2), rtol=1e-5)


# --- errors -------------------------------------------------------------------------------------


def test_wrong_arguments_are_named(unchecked):
    distances, pairs = np.ones((3, 4), np.float32), ops.Pairs(*np.zeros((2, 3, 4), bool))
    wrong = [
        (miners.triplet_margin, {"kind": "soft"}, "'soft' does not exist; there are all, hard"),
        (miners.batch_easy_hard, {"pos": "soft"}, "pos='soft' does not exist; there are easy"),
        (miners.batch_easy_hard, {"neg": "soft"}, "neg='soft' does not exist; there are easy"),
        (miners.batch_easy_hard, {"pos": "semihard"}, "semihard is relative to one pair"),
        (miners.batch_easy_hard, {"pos": "all"}, "semihard is relative to one pair"),
        (miners.hardest_fraction, {"fraction": 50}, "must be between 0 and 1, not 50"),
        (miners.angular, {"angle": 90}, "between 0 and 90, not 90"),
        (miners.angular, {}, r"must be \[b b\], not \[3, 4\]"),
        (miners.across_halves, {}, r"across_halves works .* must be \[b b\], not \[3, 4\]"),
        (miners.next_in_batch, {}, r"next_in_batch works .* must be \[b b\], not \[3, 4\]"),
        (miners.distance_weighted, {"key": KEY, "dim": 1}, "at least 2, not 1"),
        (miners.uniform_histogram, {"key": KEY, "num_bins": 0}, "num_bins must be at least 1"),
    ]
    for miner, keywords, message in wrong:
        with pytest.raises(ValueError, match=message):
            miner(distances, pairs, **keywords)
    with pytest.raises(ValueError, match=r"positives must be bool \[3, 4\].*not int.. \[3, 3\]"):
        miners.batch_hard(distances, ops.Pairs(np.zeros((3, 3), int), pairs.negatives))
