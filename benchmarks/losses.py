"""Times losses with their gradients beside pytorch-metric-learning.

    pip install -e '.[bench]' && python benchmarks/losses.py [--batch 128 512 2048]

Both libraries take turns on the same batch: 4 images per class, 128 dimensions, float32, all cores.
Times are medians over the rounds, in milliseconds, and the last column is their ratio. MiB is the
temporary memory of the compiled step. A loss of the peer is skipped if its triplets need more than
--memory GiB, or if one step takes longer than --patience.
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
ROWS = {
    "triplet": (losses.triplet, peer_losses.TripletMarginLoss, None),
    "triplet + semihard": (
        functools.partial(losses.triplet, mine_fn=miners.semihard_triplets),
        peer_losses.TripletMarginLoss,
        functools.partial(peer_miners.TripletMarginMiner, type_of_triplets="semihard"),
    ),
    "triplet + batch_hard": (
        functools.partial(losses.triplet, mine_fn=miners.batch_hard),
        peer_losses.TripletMarginLoss,
        peer_miners.BatchHardMiner,
    ),
    "triplet + batch_easy_hard": (
        functools.partial(losses.triplet, mine_fn=miners.batch_easy_hard),
        peer_losses.TripletMarginLoss,
        peer_miners.BatchEasyHardMiner,
    ),
    "triplet + multi_similarity": (
        functools.partial(losses.triplet, mine_fn=miners.multi_similarity),
        peer_losses.TripletMarginLoss,
        peer_miners.MultiSimilarityMiner,
    ),
    "contrastive": (losses.contrastive, peer_losses.ContrastiveLoss, None),
    "contrastive + pair_margin": (
        functools.partial(losses.contrastive, mine_fn=miners.pair_margin),
        peer_losses.ContrastiveLoss,
        peer_miners.PairMarginMiner,
    ),
    "ntxent": (losses.ntxent, peer_losses.NTXentLoss, None),
    "supcon": (losses.supcon, peer_losses.SupConLoss, None),
    "multi_similarity": (losses.multi_similarity, peer_losses.MultiSimilarityLoss, None),
    "multi_similarity + miner": (
        functools.partial(losses.multi_similarity, mine_fn=miners.multi_similarity),
        peer_losses.MultiSimilarityLoss,
        peer_miners.MultiSimilarityMiner,
    ),
    "circle": (losses.circle, peer_losses.CircleLoss, None),
    "margin": (losses.margin, peer_losses.MarginLoss, None),
    "lifted_structure": (losses.lifted_structure, peer_losses.LiftedStructureLoss, None),
    "angular": (losses.angular, peer_losses.AngularLoss, None),
    "nca": (losses.nca, peer_losses.NCALoss, None),
    "tuplet_margin": (losses.tuplet_margin, peer_losses.TupletMarginLoss, None),
    "fast_ap": (losses.fast_ap, peer_losses.FastAPLoss, None),
    "pnp": (losses.pnp, peer_losses.PNPLoss, None),
    "normalized_softmax": (losses.normalized_softmax, peer_losses.NormalizedSoftmaxLoss, None),
    "arcface": (losses.arcface, peer_losses.ArcFaceLoss, None),
    "cosface": (losses.cosface, peer_losses.CosFaceLoss, None),
    "subcenter_arcface": (losses.subcenter_arcface, peer_losses.SubCenterArcFaceLoss, None),
    "proxy_anchor": (losses.proxy_anchor, peer_losses.ProxyAnchorLoss, None),
    "proxy_nca": (losses.proxy_nca, peer_losses.ProxyNCALoss, None),
    "soft_triple": (losses.soft_triple, peer_losses.SoftTripleLoss, None),
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
            our_step, memory = ours(name, x, labels, classes)
            our_step()
            peer_step = None
            if peer_bytes(name, b) < args.memory * 2**30:
                peer_step = peers(name, x, labels, classes)
                if seconds(peer_step) > args.patience:
                    peer_step = None
            our_times, peer_times = [], []
            for _ in range(args.rounds):
                our_times.append(seconds(our_step))
                if peer_step:
                    peer_times.append(seconds(peer_step))
            our_ms = 1e3 * np.median(our_times)
            row = f"| {b} | {name} | {memory:.0f} | {our_ms:.2f} |"
            if peer_step:
                peer_ms = 1e3 * np.median(peer_times)
                print(f"{row} {peer_ms:.2f} | {peer_ms / our_ms:.1f} |", flush=True)
            else:
                print(f"{row} too large | - |", flush=True)


if __name__ == "__main__":
    main()
