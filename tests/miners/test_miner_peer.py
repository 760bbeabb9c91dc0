"""Miners against pytorch-metric-learning (the peer), and where the peer is wrong."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from miner_cases import SELECTIONS, as_masks, triplet_mask

from dmljax import miners, ops

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "ranking.npz")


TRIPLET_MINERS = {
    "all": miners.triplet_margin,
    "hard": miners.hard_triplets,
    "semihard": miners.semihard_triplets,
    "easy": miners.easy_triplets,
}


CASES = sorted(name.removesuffix(".values") for name in GOLDEN.files if name.endswith(".values"))


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
        keywords |= {"pos_fn": miners.selections.hardest, "neg_fn": miners.selections.hardest}
    elif name == "batch_easy_hard":
        pos, neg = argument.split(",")
        keywords = {"pos_fn": SELECTIONS[pos], "neg_fn": SELECTIONS[neg]}
    elif name == "triplet_margin" and argument == ".5":
        keywords = {"margin": 0.5}
    elif name == "triplet_margin":
        return TRIPLET_MINERS[argument]
    else:
        keywords = {"angle": float(argument)} if argument else {}
    return functools.partial(getattr(miners, name), **keywords)


@functools.cache
def _all_as_peer():
    names = [str(name) for key in ("pair_miners", "triplet_miners") for name in GOLDEN[key]]
    return names, jax.jit(lambda *args: [as_masks(_as_peer(name)(*args)) for name in names])


@pytest.mark.parametrize("case", CASES)
def test_mined_pairs_and_triplets_are_those_of_the_peer(case):
    # Padded to one shape with rows that do not count, because compiling takes longest.
    b = len(GOLDEN[f"{case}.labels"])
    x, labels, where = np.zeros((16, 6)), np.zeros(16, np.int32), np.arange(16) < b
    x[:b], labels[:b] = GOLDEN[f"{case}.embeddings"], GOLDEN[f"{case}.labels"]
    names, all_miners = _all_as_peer()
    with jax.enable_x64(True):
        x = jnp.asarray(x)
        chosen = all_miners(ops.unit_euclidean(x, x), ops.pairs(labels, where=where))
    pairs, triplets = len(GOLDEN["pair_miners"]), len(GOLDEN["triplet_miners"])
    expected = np.unpackbits(GOLDEN[f"{case}.pairs"], count=pairs * 2 * b * b)
    expected = [*expected.reshape(pairs, 2, b, b).astype(bool)]
    expected_triplets = np.unpackbits(GOLDEN[f"{case}.triplets"], count=triplets * b**3)
    expected += [*expected_triplets.reshape(triplets, 1, b, b, b).astype(bool)]
    for name, masks, expected_masks in zip(names, chosen, expected, strict=True):
        if case == "duplicates" and name.startswith(("batch_", "hardest_", "angular")):
            continue  # the peer takes any of equal candidates; for angular see below
        for mask, peer in zip(map(np.asarray, masks), expected_masks, strict=True):
            assert mask.sum() == peer.sum(), name
            mask = mask[(slice(b),) * mask.ndim]
            if name.startswith("hardest_"):
                # The two directions of a pair are equal, and an odd count splits one pair.
                mask, peer = mask | mask.T, peer | peer.T
            np.testing.assert_array_equal(mask, peer, err_msg=name)


def test_three_equal_points_have_no_angle():
    # The peer adds 1e-6 to all differences of coordinates, which gives an angle of 26.6 degrees.
    noise = np.random.default_rng(1).uniform(0, 1e-7, (6, 6)).astype(np.float32)
    for distances in (noise + noise.T, np.zeros((6, 6), np.float32)):
        assert not triplet_mask(
            miners.angular(distances, ops.pairs(np.arange(6) // 3), angle=1)
        ).any()
