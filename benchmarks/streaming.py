"""Searches a gallery in a memory-mapped file tile by tile, in bounded memory.

`python benchmarks/streaming.py` writes a gallery of 1,000,000 x 128 to a temporary file and prints
one table. A separate process measures each row. `anonymous` is by how much the anonymous memory
grows during the calls, at its peak. It does not include the pages of the mapped file, which the
system can drop at any time.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from dmljax.files import machine

DIMENSIONS, QUERIES, PER_CLASS = 128, 2000, 10


def write(folder: pathlib.Path, n: int, seed: int = 0) -> None:
    """Writes gallery, labels and queries, without keeping the gallery in memory."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((n // PER_CLASS, DIMENSIONS), dtype=np.float32)
    labels = np.repeat(np.arange(n // PER_CLASS), PER_CLASS)
    gallery = np.lib.format.open_memmap(folder / "gallery.npy", "w+", np.float32, (n, DIMENSIONS))
    for i in range(0, n, 10_000):
        rows = centers[labels[i : i + 10_000]]
        gallery[i : i + len(rows)] = rows + 1.5 * rng.standard_normal(rows.shape, dtype=np.float32)
    gallery.flush()
    query_labels = rng.integers(0, n // PER_CLASS, QUERIES)
    queries = centers[query_labels] + 1.5 * rng.standard_normal(
        (QUERIES, DIMENSIONS), dtype=np.float32
    )
    np.savez(folder / "queries.npz", labels=labels, query_labels=query_labels, queries=queries)


def memory(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


class Peak:
    """By how much anonymous memory grows in a `with` block, at its peak."""

    def __enter__(self):
        self._start = self._peak = memory("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.005):
            self._peak = max(self._peak, memory("RssAnon"))

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.growth = self._peak - self._start


def child(folder: pathlib.Path, resident: int) -> None:
    from dmljax import metrics, retrieval
    from dmljax.retrieval import tiles

    tiles.RESIDENT_BYTES = resident
    gallery = np.load(folder / "gallery.npy", mmap_mode="r")
    content = np.load(folder / "queries.npz")
    labels, query_labels, queries = (
        content[name] for name in ("labels", "query_labels", "queries")
    )
    few = slice(0, 20_000)  # compile the programs before measuring
    metrics.retrieval(
        queries, query_labels, gallery=gallery[few], gallery_labels=labels[few], ks=(1,)
    )
    retrieval.nearest(queries, gallery[few], k=10)
    row = {}
    with Peak() as peak:
        start = time.perf_counter()
        scores = metrics.retrieval(
            queries, query_labels, gallery=gallery, gallery_labels=labels, ks=(1, 10, 100)
        )
        row["scores"] = time.perf_counter() - start
        start = time.perf_counter()
        near, _ = retrieval.nearest(queries, gallery, k=10)
        row["nearest"] = time.perf_counter() - start
    row |= {"anonymous": peak.growth, "resident": memory("VmHWM"), "check": int(near.sum())}
    print(json.dumps(row | {"R@1": scores["R@1"], "mAP": scores["mAP"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gallery", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument(
        "--resident", type=int, default=64, help="MiB that may be kept on the device"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(pathlib.Path(args.child), args.resident << 20)
        return
    print(f"{QUERIES:,} queries, {DIMENSIONS} dimensions, {PER_CLASS} items per class")
    print(f"{machine.core_count()} cores")
    print(
        "| gallery | MB | kept on the device | all scores, s | 10 nearest, s | anonymous, MB ",
        end="",
    )
    print("| VmHWM, MB | R@1 | mAP |\n|---|---|---|---|---|---|---|---|---|")
    for n in args.gallery:
        with tempfile.TemporaryDirectory() as name:
            write(pathlib.Path(name), n)
            checks = []
            for resident in (args.resident, 1 << 14):
                command = [sys.executable, __file__, f"--child={name}", f"--resident={resident}"]
                out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                row = json.loads(out.splitlines()[-1])
                checks.append((row["R@1"], row["mAP"], row["check"]))
                size = n * DIMENSIONS * 4
                kept = "nothing" if size > resident << 20 else "all"
                print(
                    f"| {n:,} | {size / 1e6:.0f} | {kept} | {row['scores']:.1f} "
                    f"| {row['nearest']:.1f} | {row['anonymous'] / 1e6:.0f} "
                    f"| {row['resident'] / 1e6:.0f} | {row['R@1']:.4f} | {row['mAP']:.6f} |"
                )
            assert checks[0] == checks[1], "streaming changes a score"


if __name__ == "__main__":
    main()
