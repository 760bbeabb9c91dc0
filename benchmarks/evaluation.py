"""All retrieval scores of a set of the size of Stanford Online Products, next to faiss.

`python benchmarks/evaluation.py` prints one table and needs the `bench` extra. One process times
both on the same cores: in seconds of the clock and, since other programs may use the machine, in
seconds of processor time over all cores. A child process that generates the same data measures the
peak memory.
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
    """Unit vectors and labels: 2 to 12 vectors around the center of each class, plus noise.

    The centers lie in 32 dimensions. Classes overlap (R@1 near 0.9), as those of images do.
    """
    rng = np.random.default_rng(seed)
    sizes = np.full(classes, 2)
    while (missing := n - sizes.sum()) > 0:
        count = min(missing, classes // 4)
        sizes[rng.choice(np.flatnonzero(sizes < 12), size=count, replace=False)] += 1
    labels = rng.permutation(np.repeat(np.arange(classes), sizes))
    latent = rng.standard_normal((classes, 32), dtype=np.float32)[labels]
    latent += 0.7 * rng.standard_normal((n, 32), dtype=np.float32)
    x = latent @ rng.standard_normal((32, dimensions), dtype=np.float32)
    for i in range(0, n, 4096):
        rows = x[i : i + 4096]
        rows += 1.2 * rng.standard_normal(rows.shape, dtype=np.float32)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return x, labels


def seconds(function, *args) -> np.ndarray:
    """Seconds that a call takes: by the clock, and of processor time."""
    start = np.array([time.perf_counter(), time.process_time()])
    function(*args)
    return np.array([time.perf_counter(), time.process_time()]) - start


def product_rate(x: np.ndarray, side: int = 1024, repeats: int = 60) -> np.ndarray:
    """Operations per second of a jitted product of two matrices as large as a search's tiles."""
    product = jax.jit(lambda a, b: jnp.matmul(a, b.T, precision="highest"))
    a, b = jnp.asarray(x[:side]), jnp.asarray(x[side : 2 * side])
    product(a, b).block_until_ready()
    duration = seconds(lambda: [product(a, b).block_until_ready() for _ in range(repeats)])
    return repeats * 2 * side * side * x.shape[1] / duration


def peak_memory() -> float:
    """Peak resident memory of this process so far, in GB."""
    # Not getrusage: it counts the peak of the process that started this one.
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
    small_data = products(2048 + 10, 400, args.dimensions)
    compile_seconds = seconds(lambda: metrics.retrieval(*small_data, ks=KS))
    rows, operations = [], 2 * args.items**2 * args.dimensions
    for _ in range(args.repeats):
        rate_before = product_rate(x)
        ours = seconds(lambda: metrics.retrieval(x, labels, ks=KS))
        rate = (rate_before + product_rate(x)) / 2
        peer = seconds(index.search, x, 1001)
        rows += zip(("clock", "processor"), ours, peer, rate, strict=True)
    command = [sys.executable, __file__, "--memory", "--items", str(args.items)]
    command += ["--classes", str(args.classes), "--dimensions", str(args.dimensions)]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    memory_before, memory_peak = map(float, child.stdout.split())
    print(
        f"{args.items} x {args.dimensions}, {args.classes} classes; "
        f"compiling took {compile_seconds[0]:.1f} s"
    )
    print("| time | all scores, s | faiss k=1001, s | faiss / dmljax | product, GFLOP/s | share |")
    print("|---|---|---|---|---|---|")
    for kind, ours, peer, rate in rows:
        share = operations / ours / rate
        print(
            f"| {kind} | {ours:.1f} | {peer:.1f} | {peer / ours:.2f} | {rate / 1e9:.0f} "
            f"| {share:.0%} |"
        )
    print(
        f"peak memory {memory_peak:.2f} GB, of which {memory_before:.2f} GB before the call "
        "(data, libraries)"
    )


if __name__ == "__main__":
    main()
