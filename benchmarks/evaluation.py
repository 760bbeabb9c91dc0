"""All retrieval scores of a set of the size of Stanford Online Products, next to faiss.

`python benchmarks/evaluation.py` prints one table; needs the `bench` extra. Everything is timed in
one process on the same cores, in seconds of the clock and, for machines that others use as well, in
seconds of processor time over all cores. Peak memory is read in a child process that has made the
data.
"""

import argparse
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from dmljax import metrics

KS = (1, 10, 100, 1000)


def products(n: int, classes: int, dimensions: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors around class centres, 2 to 12 a class, most of them in a space of 32 dimensions.

    As in embeddings of images, classes overlap (R@1 near 0.9), so that k-means has work to do.
    """
    rng = np.random.default_rng(seed)
    sizes = np.full(classes, 2)
    while (left := n - sizes.sum()) > 0:
        chosen = rng.choice(np.flatnonzero(sizes < 12), size=min(left, classes // 4), replace=False)
        sizes[chosen] += 1
    labels = rng.permutation(np.repeat(np.arange(classes), sizes))
    latent = rng.standard_normal((classes, 32), dtype=np.float32)[labels]
    latent += 0.7 * rng.standard_normal((n, 32), dtype=np.float32)
    x = latent @ rng.standard_normal((32, dimensions), dtype=np.float32)
    for i in range(0, n, 4096):
        part = x[i : i + 4096]
        part += 1.2 * rng.standard_normal(part.shape, dtype=np.float32)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return x, labels


def seconds(function, *args) -> np.ndarray:
    """What a call takes by the clock, and in processor time."""
    start = np.array([time.perf_counter(), time.process_time()])
    function(*args)
    return np.array([time.perf_counter(), time.process_time()]) - start


def product_rate(x: np.ndarray, side: int = 1024, repeats: int = 60) -> np.ndarray:
    """Operations a second of a plain jitted product of the evaluator's tile size."""
    product = jax.jit(lambda a, b: jnp.matmul(a, b.T, precision="highest"))
    a, b = jnp.asarray(x[:side]), jnp.asarray(x[side : 2 * side])
    product(a, b).block_until_ready()
    took = seconds(lambda: [product(a, b).block_until_ready() for _ in range(repeats)])
    return repeats * 2 * side * side * x.shape[1] / took


def peak_memory() -> float:
    """Peak resident memory of this process so far, in GB."""
    # Not getrusage: its peak is inherited from the process that started this one.
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=60_502)
    parser.add_argument("--classes", type=int, default=11_316)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="only measure memory")
    args = parser.parse_args()
    x, labels = products(args.items, args.classes, args.dimensions)
    if args.memory:
        before = peak_memory()
        metrics.retrieval(x, labels, ks=KS)
        print(f"{before:.2f} {peak_memory():.2f}")
        return

    import faiss

    faiss.omp_set_num_threads(len(os.sched_getaffinity(0)))
    index = faiss.IndexFlatIP(args.dimensions)
    index.add(x)
    few = products(2048 + 10, 400, args.dimensions)
    first = seconds(lambda: metrics.retrieval(*few, ks=KS))
    rows, operations = [], 2 * args.items**2 * args.dimensions
    for _ in range(args.repeats):
        before = product_rate(x)
        took = seconds(lambda: metrics.retrieval(x, labels, ks=KS))
        rate = (before + product_rate(x)) / 2
        peer = seconds(index.search, x, 1001)
        rows += zip(("clock", "processor"), took, peer, rate, strict=True)
    command = [sys.executable, __file__, "--memory", "--items", str(args.items)]
    command += ["--classes", str(args.classes), "--dimensions", str(args.dimensions)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded, peak = map(float, done.stdout.split())
    print(
        f"{args.items} x {args.dimensions}, {args.classes} classes; compiling took {first[0]:.1f} s"
    )
    print("| time | all scores, s | faiss k=1001, s | faiss / dmljax | product, GFLOP/s | share |")
    print("|---|---|---|---|---|---|")
    for kind, took, peer, rate in rows:
        share = operations / took / rate
        print(
            f"| {kind} | {took:.1f} | {peer:.1f} | {peer / took:.2f} | {rate / 1e9:.0f} "
            f"| {share:.0%} |"
        )
    print(f"peak memory {peak:.2f} GB, of which {loaded:.2f} GB before the call (data, libraries)")


if __name__ == "__main__":
    main()
