"""Losses with their gradient against pytorch-metric-learning, in one run.

    pip install -e '.[bench]' && python benchmarks/losses.py [--batch 128 512 2048]

Both libraries take turns on the same batch: 4 images per class, 128 dimensions, float32, all cores.
Figures are medians of the rounds in milliseconds, the ratio is of medians; MiB is what the compiled
step needs beside its arguments. A peer that would need
more than --memory GiB for its triplets is left out, and so is one slower than --patience.
"""

import argparse
import functools
import time

import jax
import numpy as np
import pytorch_metric_learning.losses as peer_losses
import pytorch_metric_learning.miners as peer_miners
import torch

from dmljax import losses, miners

# name -> (our loss, peer's loss, peer's miner)
semihard = functools.partial(miners.triplet_margin, kind="semihard")
P, M = peer_losses, peer_miners
MINED = functools.partial
ROWS = {
    "triplet": (losses.triplet, P.TripletMarginLoss, None),
    "triplet + semihard": (
        MINED(losses.triplet, mine_fn=semihard),
        P.TripletMarginLoss,
        MINED(M.TripletMarginMiner, type_of_triplets="semihard"),
    ),
    "triplet + batch_hard": (
        MINED(losses.triplet, mine_fn=miners.batch_hard),
        P.TripletMarginLoss,
        M.BatchHardMiner,
    ),
    "triplet + batch_easy_hard": (
        MINED(losses.triplet, mine_fn=miners.batch_easy_hard),
        P.TripletMarginLoss,
        M.BatchEasyHardMiner,
    ),
    "triplet + multi_similarity": (
        MINED(losses.triplet, mine_fn=miners.multi_similarity),
        P.TripletMarginLoss,
        M.MultiSimilarityMiner,
    ),
    "contrastive": (losses.contrastive, P.ContrastiveLoss, None),
    "contrastive + pair_margin": (
        MINED(losses.contrastive, mine_fn=miners.pair_margin),
        P.ContrastiveLoss,
        M.PairMarginMiner,
    ),
    "ntxent": (losses.ntxent, P.NTXentLoss, None),
    "supcon": (losses.supcon, P.SupConLoss, None),
    "multi_similarity": (losses.multi_similarity, P.MultiSimilarityLoss, None),
    "multi_similarity + miner": (
        MINED(losses.multi_similarity, mine_fn=miners.multi_similarity),
        P.MultiSimilarityLoss,
        M.MultiSimilarityMiner,
    ),
    "circle": (losses.circle, P.CircleLoss, None),
    "margin": (losses.margin, P.MarginLoss, None),
    "lifted_structure": (losses.lifted_structure, P.LiftedStructureLoss, None),
    "angular": (losses.angular, P.AngularLoss, None),
    "nca": (losses.nca, P.NCALoss, None),
    "tuplet_margin": (losses.tuplet_margin, P.TupletMarginLoss, None),
    "fast_ap": (losses.fast_ap, P.FastAPLoss, None),
    "pnp": (losses.pnp, P.PNPLoss, None),
    "normalized_softmax": (losses.normalized_softmax, P.NormalizedSoftmaxLoss, None),
    "arcface": (losses.arcface, P.ArcFaceLoss, None),
    "cosface": (losses.cosface, P.CosFaceLoss, None),
    "subcenter_arcface": (losses.subcenter_arcface, P.SubCenterArcFaceLoss, None),
    "proxy_anchor": (losses.proxy_anchor, P.ProxyAnchorLoss, None),
    "proxy_nca": (losses.proxy_nca, P.ProxyNCALoss, None),
    "soft_triple": (losses.soft_triple, P.SoftTripleLoss, None),
}
PROXIES = set(list(ROWS)[-7:])
DIM, PER_CLASS = 128, 4
# Bytes of the peer's largest arrays, as powers of the batch: anchors x positives x negatives masks
# are int64 products; pairs x pairs ones are float32.
CUBES = {"triplet": 1, "triplet + semihard": 1, "margin": 1, "pnp": 16}
CUBES["triplet + multi_similarity"] = 1
SQUARED_PAIRS = {"ntxent", "lifted_structure", "tuplet_margin", "angular"}


def peer_bytes(name: str, b: int) -> float:
    if name in SQUARED_PAIRS:
        return 8.0 * (b * (PER_CLASS - 1)) * (b * b if name != "angular" else b * DIM)
    return 8.0 * CUBES.get(name, 0) * b**3


def ours(name, x, labels, classes):
    loss = ROWS[name][0]
    if name in PROXIES:
        shape = (classes, DIM)
        if name in ("subcenter_arcface", "soft_triple"):
            shape = (classes, 3 if name == "subcenter_arcface" else 10, DIM)
        proxies = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 2)))
        arguments = jax.device_put((x, labels, proxies))
    else:
        step = jax.jit(jax.value_and_grad(loss))
        arguments = jax.device_put((x, labels))
    step = step.lower(*arguments).compile()
    memory = step.memory_analysis().temp_size_in_bytes / 2**20
    return lambda: jax.block_until_ready(step(*arguments)), memory


def peers(name, x, labels, classes):
    _, kind, miner = ROWS[name]
    loss = kind(num_classes=classes, embedding_size=DIM) if name in PROXIES else kind()
    miner = miner() if miner else None
    x, labels = torch.tensor(x, requires_grad=True), torch.tensor(labels)

    def step():
        x.grad = None
        loss(x, labels, miner(x, labels) if miner else None).backward()

    return step


def seconds(step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--losses", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", type=float, default=4.0, help="GiB a peer may need")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds a peer may take")
    args = parser.parse_args()
    print("| batch | loss with gradient | dmljax MiB | dmljax ms | peer ms | peer / dmljax |")
    print(f"|{'---|' * 6}")
    for b in args.batch:
        x = np.random.default_rng(0).normal(size=(b, DIM)).astype(np.float32)
        labels, classes = np.arange(b) // PER_CLASS, b // PER_CLASS
        for name in args.losses:
            own, memory = ours(name, x, labels, classes)
            own()
            other = None
            if peer_bytes(name, b) < args.memory * 2**30:
                other = peers(name, x, labels, classes)
                if seconds(other) > args.patience:
                    other = None
            mine, theirs = [], []
            for _ in range(args.rounds):
                mine.append(seconds(own))
                if other:
                    theirs.append(seconds(other))
            mine = 1e3 * np.median(mine)
            row = f"| {b} | {name} | {memory:.0f} | {mine:.2f} |"
            if other:
                theirs = 1e3 * np.median(theirs)
                print(f"{row} {theirs:.2f} | {theirs / mine:.1f} |", flush=True)
            else:
                print(f"{row} too large | - |", flush=True)


if __name__ == "__main__":
    main()
