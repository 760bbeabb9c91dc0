"""k-means at the size of Stanford Online Products, next to faiss.

`python benchmarks/kmeans.py` prints one table; needs the `bench` extra. Both run in one process on
the same cores, 20 iterations, one start, on all points. faiss starts from random points and
dmljax from k-means++, whose time is included.
"""

import argparse
import os
import time

import numpy as np
from evaluation import products

from dmljax import metrics, retrieval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=60_502)
    parser.add_argument("--classes", type=int, default=11_316)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    x, labels = products(args.items, args.classes, args.dimensions)

    import faiss

    faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))
    retrieval.kmeans(x[:2048], k=1024, iterations=2)  # compiles
    rows = []
    for seed in range(args.repeats):
        start = time.perf_counter()
        found = retrieval.kmeans(x, k=args.classes, seed=seed, iterations=args.iterations)
        took = time.perf_counter() - start
        start = time.perf_counter()
        peer = faiss.Kmeans(
            args.dimensions,
            args.classes,
            niter=args.iterations,
            nredo=1,
            seed=seed,
            min_points_per_centroid=1,
            max_points_per_centroid=args.items,
        )
        peer.train(x)
        peer_took = time.perf_counter() - start
        gaps, assignment = peer.index.search(x, 1)
        own = [metrics.agreement(labels, a)["NMI"] for a in (found.assignment, assignment[:, 0])]
        ratio = found.inertia / float(np.sum(gaps, dtype=np.float64))
        rows.append((took, peer_took, peer_took / took, ratio, *own))
    print(f"{args.items} x {args.dimensions}, k = {args.classes}, {args.iterations} iterations")
    print(
        "| dmljax, s | faiss, s | faiss / dmljax | inertia, dmljax / faiss | NMI | NMI of faiss |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        print("| {:.1f} | {:.1f} | {:.2f} | {:.3f} | {:.4f} | {:.4f} |".format(*row))


if __name__ == "__main__":
    main()
