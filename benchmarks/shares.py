"""One host's part of an exact evaluation: the time of a share of the queries beside that of all.

`python benchmarks/shares.py` ranks random vectors among themselves, once with all queries and once
with the first of n shares, as each of n hosts does. The shares are measured in turns.
"""

import argparse
import statistics
import time

import numpy as np

from dmljax import metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=30_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--each", type=int, default=10, help="images of a class")
    parser.add_argument("--shares", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    labels = np.arange(args.images) // args.each
    x = (
        rng.normal(size=(args.images, args.dimension))
        + 0.5 * rng.normal(size=(labels.max() + 1, args.dimension))[labels]
    )
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    seconds: dict[int, list[float]] = {shares: [] for shares in args.shares}
    for _ in range(args.rounds + 1):  # the first round compiles
        for shares in args.shares:
            options = {} if shares == 1 else {"share": (0, shares), "sum_fn": lambda array: array}
            start = time.perf_counter()
            metrics.retrieval(x, labels, **options)
            seconds[shares].append(time.perf_counter() - start)
    print("| hosts | s | of one host | sent by a host, MB |")
    print("|---|---|---|---|")
    base = statistics.median(seconds[args.shares[0]][1:])
    scores = len(metrics.RANKING_FNS) + 5  # R@1, R@2, R@4, R@8, and which queries were scored
    for shares, times in seconds.items():
        median = statistics.median(times[1:])
        sent = 8 * scores * args.images / 1e6 if shares > 1 else 0
        print(f"| {shares} | {median:.2f} | {median / base:.2f} | {sent:.1f} |")


if __name__ == "__main__":
    main()
