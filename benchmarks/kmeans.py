"""k-means at the size of Stanford Online Products, next to faiss.

`python benchmarks/kmeans.py` prints one table and needs the `bench` extra. Both run in one process
on the same cores: 20 iterations on all points, from one start. faiss starts from random points,
dmljax from k-means++, and its time includes the start.
"""

import argparse
import os

import numpy as np
from evaluation import products, seconds

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
    rows, results = [], {}
    for seed in range(args.repeats):

        def run(seed=seed):
            results[seed] = retrieval.kmeans(
                x, k=args.classes, seed=seed, iterations=args.iterations
            )

        peer = faiss.Kmeans(
            args.dimensions,
            args.classes,
            niter=args.iterations,
            nredo=1,
            seed=seed,
            min_points_per_centroid=1,
            max_points_per_centroid=args.items,
        )
        our_seconds, peer_seconds = seconds(run), seconds(peer.train, x)
        distances, peer_assignment = peer.index.search(x, 1)
        inertia = results[seed].inertia / float(np.sum(distances, dtype=np.float64))
        assignments = results[seed].assignment, peer_assignment[:, 0]
        scores = [metrics.nmi(labels, assignment) for assignment in assignments]
        for kind, ours, theirs in zip(
            ("clock", "processor"), our_seconds, peer_seconds, strict=True
        ):
            rows.append((kind, ours, theirs, theirs / ours, len(peer.obj), inertia, *scores))
    print(
        f"{args.items} x {args.dimensions}, k = {args.classes}, up to {args.iterations} iterations"
    )
    print(
        "| time | dmljax, s | faiss, s | faiss / dmljax | iterations of faiss "
        "| inertia, dmljax / faiss | NMI | NMI of faiss |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print("| {} | {:.1f} | {:.1f} | {:.2f} | {} | {:.3f} | {:.4f} | {:.4f} |".format(*row))


if __name__ == "__main__":
    main()
