"""Miners against double loops."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miner_cases import (
    BY_POSITION,
    EVERY,
    PAIR_MINERS,
    TRIPLET_MINERS,
    compiled_miners,
    mined,
    triplet_mask,
)

from dmljax import miners, ops


def test_every_miner_is_tested():
    assert {name.partition(":")[0] for name in EVERY} == set(miners.__all__)


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
    return {
        "triplet_margin": gap <= 0.25,
        "hard_triplets": gap <= 0,
        "semihard_triplets": 0 < gap <= 0.25,
        "easy_triplets": gap > 0.25,
    }[name]


# Distances on a grid, so that there are ties, which floats represent exactly.
GRIDS = st.lists(st.integers(0, 16), min_size=30, max_size=30)


MASKS = st.lists(st.sampled_from(["p", "n", "-"]), min_size=30, max_size=30)


def _grid(steps, kinds):
    distances = np.reshape(steps, (5, 6)).astype(np.float32) / 8
    kinds = np.reshape(kinds, (5, 6))
    return distances, ops.Pairs(kinds == "p", kinds == "n")


@settings(deadline=None, max_examples=60, derandomize=True)
@given(steps=GRIDS, kinds=MASKS)
def test_pairs_are_those_of_the_loop(steps, kinds):
    distances, pairs = _grid(steps, kinds)
    masks_of_all = compiled_miners(*PAIR_MINERS)(distances, pairs)
    for name, chosen in zip(PAIR_MINERS, masks_of_all, strict=True):
        for mask, expected in zip(chosen, _naive(name, distances, *pairs), strict=True):
            assert {*map(tuple, np.argwhere(mask))} == {*map(tuple, expected)}, name


@settings(deadline=None, max_examples=20, derandomize=True)
@given(steps=st.lists(st.integers(4, 12), min_size=15, max_size=15), seed=st.integers(0, 99))
def test_triplets_are_those_of_the_loop(steps, seed):
    distances = np.zeros((6, 6), np.float32)
    distances[np.triu_indices(6, 1)] = np.array(steps) / 8
    distances += distances.T
    pairs = ops.pairs(np.random.default_rng(seed).integers(0, 3, 6))
    masks_of_all = jax.device_get(compiled_miners(*TRIPLET_MINERS)(distances, pairs))
    d, pairs = distances.astype(float), ops.Pairs(*map(np.asarray, pairs))
    for name, (selected,) in zip(TRIPLET_MINERS, masks_of_all, strict=True):
        for i, j, k in itertools.product(range(6), repeat=3):
            expected = pairs.positives[i, j] and pairs.negatives[i, k]
            expected = expected and _naive_triplet(name, d[i, j], d[i, k], d[j, k])
            assert selected[i, j, k] == expected, name


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
def test_pairs_by_position_are_those_of_the_loop(name, size):
    rng = np.random.default_rng(size)
    for _ in range(10):
        labels = rng.integers(0, 3, size)
        distances = rng.uniform(size=(size, size)).astype(np.float32)
        chosen = mined(name, distances, ops.pairs(labels))
        for mask, expected in zip(chosen, _naive(name, labels), strict=True):
            assert [*map(tuple, np.argwhere(mask))] == sorted(expected)


def test_angle_is_measured_at_the_negative():
    # An isosceles triangle over a base of length 1: half the angle at the tip is atan(1 / (2 h)).
    for angle, is_selected in ((25, False), (35, True)):
        height = 1 / (2 * math.tan(math.radians(angle)))
        x = np.array([[-0.5, 0], [0.5, 0], [0, height]])
        distances = np.linalg.norm(x[:, None] - x[None], axis=-1)
        pairs = ops.pairs(np.array([0, 0, 1]))
        assert triplet_mask(miners.angular(distances, pairs, angle=30)).any() == is_selected
