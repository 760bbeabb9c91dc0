"""Writes ranking.npz: ranking losses and miners of pytorch-metric-learning 2.9.0, in float64.

    python tests/golden/ranking.py

Needs torch and pytorch-metric-learning, which the tests do not. Every case holds its inputs, a
value and a gradient per loss (NaN where the peer raises or is known to be wrong), and a mask per
miner. Gradients are stored as float32, masks as bits.
"""

import pathlib

import numpy as np
import torch
from pytorch_metric_learning import losses, miners

PNP = {f"pnp:{v}": losses.PNPLoss(variant=v) for v in ("O", "Ds", "Dq", "Iu", "Ib")}
LOSSES = {
    "fast_ap": losses.FastAPLoss(),
    "fast_ap:7": losses.FastAPLoss(num_bins=7),
    "smooth_ap": losses.SmoothAPLoss(),
    "smooth_ap:.1": losses.SmoothAPLoss(temperature=0.1),
    **PNP,
    "pnp:warm": losses.PNPLoss(b=3, alpha=2, anneal=0.2, variant="Dq"),
    "histogram": losses.HistogramLoss(),
    "histogram:20": losses.HistogramLoss(n_bins=20),
    "triplet+semihard": losses.TripletMarginLoss(),
    "triplet+angular": losses.TripletMarginLoss(),
    "margin+all": losses.MarginLoss(),
    "multi_similarity+multi_similarity": losses.MultiSimilarityLoss(),
    "contrastive+pair_margin": losses.ContrastiveLoss(),
}
PAIR_MINERS = {
    "multi_similarity": miners.MultiSimilarityMiner(),
    "multi_similarity:.3": miners.MultiSimilarityMiner(epsilon=0.3),
    "batch_hard": miners.BatchHardMiner(),
    "pair_margin": miners.PairMarginMiner(),
    "pair_margin:.9,1.3": miners.PairMarginMiner(pos_margin=0.9, neg_margin=1.3),
    "hardest_fraction": miners.HDCMiner(),
    "hardest_fraction:.2": miners.HDCMiner(filter_percentage=0.2),
}
for pos in ("easy", "semihard", "hard", "all"):
    for neg in ("easy", "semihard", "hard", "all"):
        if "semihard" not in (pos, neg) or (pos != neg and "all" not in (pos, neg)):
            PAIR_MINERS[f"batch_easy_hard:{pos},{neg}"] = miners.BatchEasyHardMiner(pos, neg)
PAIR_MINERS["batch_easy_hard:ranges"] = miners.BatchEasyHardMiner(
    "hard", "hard", allowed_pos_range=[0.3, 1.3], allowed_neg_range=[0.9, 1.6]
)
TRIPLET_MINERS = {
    f"triplet_margin:{kind}": miners.TripletMarginMiner(type_of_triplets=kind)
    for kind in ("all", "hard", "semihard", "easy")
}
TRIPLET_MINERS["triplet_margin:.5"] = miners.TripletMarginMiner(margin=0.5)
TRIPLET_MINERS["angular"] = miners.AngularMiner()
TRIPLET_MINERS["angular:35"] = miners.AngularMiner(angle=35)
MINED = {
    "semihard": TRIPLET_MINERS["triplet_margin:semihard"],
    "angular": TRIPLET_MINERS["angular"],
    "all": TRIPLET_MINERS["triplet_margin:all"],
    "multi_similarity": PAIR_MINERS["multi_similarity"],
    "pair_margin": PAIR_MINERS["pair_margin"],
}


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    balanced = np.repeat(np.arange(4), 4)
    unbalanced = np.array([0] * 5 + [1] * 3 + [2] * 2 + [7, 9, 4])
    labels = {
        "balanced": balanced,
        "square": np.repeat(np.arange(3), 3),
        "unbalanced": unbalanced,
        "shuffled": rng.permutation(balanced),
        "shuffled_unbalanced": rng.permutation(unbalanced),
        "extreme": rng.permutation(np.repeat([-5, 2**31 - 1, -(2**31), 0], 3)),
        "one_class": np.full(6, 3),
        "all_distinct": np.arange(6),
        "one": np.array([3]),
        "two_alike": np.array([1, 1]),
        "two_unlike": np.array([0, 1]),
    }
    built = {name: (rng.normal(size=(len(y), 6)), y) for name, y in labels.items()}
    centers = rng.normal(size=(4, 6))
    built["clumped"] = centers[balanced] + 0.05 * rng.normal(size=(16, 6)), balanced
    x = rng.normal(size=(12, 6))
    x[[1, 4, 8]] = x[[0, 0, 7]]  # of one class, and of two
    built["duplicates"] = x, np.repeat(np.arange(4), 3)
    # Rounded to float32, so that storing them does not change them.
    return {n: (x.astype(np.float32).astype(np.float64), y) for n, (x, y) in built.items()}


def loss_and_gradient(name: str, x: np.ndarray, labels: torch.Tensor):
    x = torch.tensor(x, requires_grad=True)
    y = x
    # This miner reads embeddings as they are, where losses and other miners normalize.
    mined = name.partition("+")[2]
    if mined:
        unit = torch.nn.functional.normalize(x.detach())
        loss = LOSSES[name](y, labels, MINED[mined](unit, labels))
    else:
        loss = LOSSES[name](y, labels)
    if loss.requires_grad:
        loss.backward()
    gradient = np.zeros(x.shape) if x.grad is None else x.grad.numpy()
    return loss.item(), gradient


def is_right(name: str, case: str) -> bool:
    if name.startswith("smooth_ap"):  # classes = samples per class, contiguous; labels from 0
        return case in ("balanced", "square", "clumped", "one")
    if name.startswith("histogram"):  # out of range
        return case != "duplicates"
    return True


def main() -> None:
    torch.set_default_dtype(torch.float64)
    names = {
        "losses": [*LOSSES],
        "pair_miners": [*PAIR_MINERS],
        "triplet_miners": [*TRIPLET_MINERS],
    }
    out = {name: np.array(value) for name, value in names.items()}
    for case, (x, y) in cases().items():
        labels, b = torch.tensor(y), len(y)
        values = np.full(len(LOSSES), np.nan)
        gradients = np.full((len(LOSSES), *x.shape), np.nan, np.float32)
        for i, name in enumerate(LOSSES):
            if is_right(name, case):
                values[i], gradients[i] = loss_and_gradient(name, x, labels)
        unit = torch.nn.functional.normalize(torch.tensor(x))
        pairs = np.zeros((len(PAIR_MINERS), 2, b, b), bool)
        for i, miner in enumerate(PAIR_MINERS.values()):
            chosen = miner(unit, labels)
            chosen = chosen if len(chosen) == 4 else (chosen[0], chosen[1], chosen[0], chosen[2])
            pairs[i, 0, chosen[0], chosen[1]] = True
            pairs[i, 1, chosen[2], chosen[3]] = True
        triplets = np.zeros((len(TRIPLET_MINERS), b, b, b), bool)
        for i, miner in enumerate(TRIPLET_MINERS.values()):
            a, p, n = miner(unit, labels)
            triplets[i, a, p, n] = True
        out |= {
            f"{case}.embeddings": x.astype(np.float32),
            f"{case}.labels": y.astype(np.int32),
            f"{case}.values": values,
            f"{case}.gradients": gradients,
            f"{case}.pairs": np.packbits(pairs),
            f"{case}.triplets": np.packbits(triplets),
        }
    path = pathlib.Path(__file__).with_suffix(".npz")
    np.savez_compressed(path, **out)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
