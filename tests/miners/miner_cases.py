"""Every public miner with its options. A new one has a row here and a loop in test_miner_loops."""

import functools
import itertools

import jax

from dmljax import miners, ops

KEY = jax.random.key(0)


# The peer's names of strategies.
SELECTIONS = {
    "easy": miners.selections.easiest,
    "semihard": miners.selections.semihardest,
    "hard": miners.selections.hardest,
    "all": miners.selections.every,
}


STRATEGIES = [
    (pos, neg)
    for pos, neg in itertools.product(SELECTIONS, repeat=2)
    if "semihard" not in (pos, neg) or (pos != neg and "all" not in (pos, neg))
]


PAIR_MINERS = {
    "multi_similarity": functools.partial(miners.multi_similarity, epsilon=0.125),
    "batch_hard": miners.batch_hard,
    **{
        f"batch_easy_hard:{pos},{neg}": functools.partial(
            miners.batch_easy_hard,
            pos_fn=SELECTIONS[pos],
            neg_fn=SELECTIONS[neg],
            allowed_pos_range=(0.25, 1.5),
            allowed_neg_range=(0.5, 1.75),
        )
        for pos, neg in STRATEGIES
    },
    "pair_margin": functools.partial(miners.pair_margin, pos_margin=0.25, neg_margin=1.25),
    "hardest_fraction": functools.partial(miners.hardest_fraction, fraction=0.3),
}


TRIPLET_MINERS = {
    "triplet_margin": functools.partial(miners.triplet_margin, margin=0.25),
    "hard_triplets": miners.hard_triplets,
    "semihard_triplets": functools.partial(miners.semihard_triplets, margin=0.25),
    "easy_triplets": functools.partial(miners.easy_triplets, margin=0.25),
    "angular": functools.partial(miners.angular, angle=31),
}


DRAWS = {
    "distance_weighted": functools.partial(miners.distance_weighted, key=KEY, dim=8),
    "uniform_histogram": functools.partial(miners.uniform_histogram, key=KEY, num_bins=5),
}


BY_POSITION = {"next_in_batch": miners.next_in_batch, "across_halves": miners.across_halves}


EVERY = PAIR_MINERS | TRIPLET_MINERS | DRAWS | BY_POSITION


def triplet_mask(chosen):
    """[b n n]: the chosen triplets."""
    (positives, negatives), d, select_fn = chosen
    between = d[None] if d.shape[0] == d.shape[1] else None
    selected = select_fn(d[:, :, None], d[:, None, :], between)
    return selected & positives[:, :, None] & negatives[:, None, :]


def as_masks(chosen):
    return tuple(chosen) if isinstance(chosen, ops.Pairs) else (triplet_mask(chosen),)


@functools.cache
def compiled_miners(*names):
    """The masks of some miners: of pairs, or of triplets."""
    return jax.jit(lambda *args: [as_masks(EVERY[name](*args)) for name in names])


def mined(name, *args):
    return compiled_miners(name)(*args)[0]
