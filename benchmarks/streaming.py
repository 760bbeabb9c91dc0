"""A gallery in a memory-mapped file, searched tile by tile in bounded memory.

`python benchmarks/streaming.py` writes a gallery of 1,000,000 x 128 to a temporary file and prints
one table. Each row is a process of its own. `anonymous` is the peak of the memory that the system
cannot take back, over what there was before the call; pages of the mapped file are not of it.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

D, QUERIES, EACH = 128, 2000, 10  # dimensions, queries, items to a class


def write(folder: pathlib.Path, n: int, seed: int = 0) -> None:
    """`gallery.npy`, labels and queries, without ever holding the gallery."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n // EACH, D), dtype=np.float32)
    labels = np.repeat(np.arange(n // EACH), EACH)
    gallery = np.lib.format.open_memmap(folder / "gallery.npy", "w+", np.float32, (n, D))
    for i in range(0, n, 10_000):
        part = centres[labels[i : i + 10_000]]
        gallery[i : i + len(part)] = part + 1.5 * rng.standard_normal(part.shape, dtype=np.float32)
    gallery.flush()
    asked = rng.integers(0, n // EACH, QUERIES)
    queries = centres[asked] + 1.5 * rng.standard_normal((QUERIES, D), dtype=np.float32)
    np.savez(folder / "rest.npz", labels=labels, asked=asked, queries=queries)


def memory(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) * 1024


class Peak:
    """The highest anonymous memory while it is open, over what it was."""

    def __enter__(self):
        self._before = self.most = memory("RssAnon")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._end.wait(0.005):
            self.most = max(self.most, memory("RssAnon"))

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()
        self.grown = self.most - self._before


def child(folder: pathlib.Path, resident: int) -> None:
    from dmljax import metrics, retrieval
    from dmljax.retrieval import tiles

    tiles.RESIDENT_BYTES = resident
    gallery = np.load(folder / "gallery.npy", mmap_mode="r")
    rest = np.load(folder / "rest.npz")
    labels, asked, queries = (rest[name] for name in ("labels", "asked", "queries"))
    few = slice(0, 20_000)  # compiles, and warms nothing else up
    metrics.retrieval(queries, asked, gallery=gallery[few], gallery_labels=labels[few], ks=(1,))
    retrieval.nearest(queries, gallery[few], k=10)
    found = {}
    with Peak() as peak:
        start = time.perf_counter()
        scores = metrics.retrieval(
            queries, asked, gallery=gallery, gallery_labels=labels, ks=(1, 10, 100)
        )
        found["scores"] = time.perf_counter() - start
        start = time.perf_counter()
        near, _ = retrieval.nearest(queries, gallery, k=10)
        found["nearest"] = time.perf_counter() - start
    found |= {"anonymous": peak.grown, "whole": memory("VmHWM"), "check": int(near.sum())}
    print(json.dumps(found | {"R@1": scores["R@1"], "mAP": scores["mAP"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gallery", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--resident", type=int, default=64, help="MiB that may stay on the device")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(pathlib.Path(args.child), args.resident << 20)
        return
    print(f"{QUERIES:,} queries, {D} dimensions, {EACH} items to a class, {os.cpu_count()} cores")
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
                found = json.loads(out.splitlines()[-1])
                checks.append((found["R@1"], found["mAP"], found["check"]))
                size = n * D * 4
                kept = "nothing" if size > resident << 20 else "all"
                print(
                    f"| {n:,} | {size / 1e6:.0f} | {kept} | {found['scores']:.1f} "
                    f"| {found['nearest']:.1f} | {found['anonymous'] / 1e6:.0f} "
                    f"| {found['whole'] / 1e6:.0f} | {found['R@1']:.4f} | {found['mAP']:.6f} |"
                )
            assert checks[0] == checks[1], "streaming has changed a number"


if __name__ == "__main__":
    main()
