"""Exact search of the index next to faiss: time of a query, memory and disk.

`python benchmarks/index.py --items=1000000` prints one table; faiss needs the extra `bench`.
Vectors are clustered unit vectors; queries come from the same clusters and are asked one at a time.
Every engine runs in its own process. Memory is that of the process without pages of mapped
files.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

K = 10
ENGINES = ("dmljax", "faiss")


def clustered(items: int, dimensions: int, queries: int) -> np.ndarray:
    """Returns unit vectors around random centers, with a spectrum as in trained embeddings."""
    rng = np.random.default_rng(0)
    scale = (1 + np.arange(dimensions)) ** -0.5
    centers = (rng.normal(size=(5000, dimensions)) * scale).astype(np.float32)
    x = np.empty((items + queries, dimensions), np.float32)
    for start in range(0, len(x), 50_000):
        block = x[start : start + 50_000]
        noise = rng.normal(size=block.shape).astype(np.float32) * (0.5 * scale).astype(np.float32)
        block[:] = centers[rng.integers(0, len(centers), len(block))] + noise
        block /= np.linalg.norm(block, axis=1, keepdims=True)
    return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, default=128)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args.engine, args.folder)))
        return
    print(f"{args.items:,} x {args.dimensions}, {args.queries:,} queries, k = {K}\n")
    print("| engine | recall@10 | p50 ms | p99 ms | build s | memory MB | disk MB |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        x = clustered(args.items, args.dimensions, args.queries)
        items, queries = x[: args.items], x[args.items :]
        np.save(folder / "items.npy", items)
        np.save(folder / "queries.npy", queries)
        truth = [
            np.argpartition(-(queries[i : i + 50] @ items.T), K, axis=1)[:, :K]
            for i in range(0, len(queries), 50)
        ]
        np.save(folder / "truth.npy", np.concatenate(truth))
        for engine in args.engines:
            command = [sys.executable, __file__, f"--engine={engine}", f"--folder={folder}"]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            print(
                "| {} | {:.3f} | {:.1f} | {:.1f} | {:.0f} | {:.0f} | {:.0f} |".format(
                    *json.loads(out.splitlines()[-1])
                ),
                flush=True,
            )


def measure(engine: str, folder: pathlib.Path) -> list:
    """Returns a row of the table."""
    items, queries, truth = (np.load(folder / f"{n}.npy") for n in ("items", "queries", "truth"))
    place = folder / engine
    place.mkdir()
    before, start = _memory(), time.perf_counter()
    search = {"dmljax": _dmljax, "faiss": _faiss}[engine](items, place)
    built, times, recalls = time.perf_counter() - start, [], []
    for query in queries[:5]:
        search(query)
    for query, expected in zip(queries, truth, strict=True):
        start = time.perf_counter()
        nearest = search(query)
        times.append(time.perf_counter() - start)
        recalls.append(len({*nearest} & {*expected.tolist()}) / K)
    p50, p99 = (1e3 * np.quantile(times, q) for q in (0.5, 0.99))
    disk = sum(p.stat().st_size for p in place.rglob("*") if p.is_file()) / 1e6
    return [engine, float(np.mean(recalls)), p50, p99, built, _memory() - before, disk]


def _dmljax(items, place):
    from dmljax import index

    with index.create(place / "a.index", model="ab" * 32, dimension=items.shape[1]) as store:
        for i in range(0, len(items), 10_000):
            block = items[i : i + 10_000]
            store.add([str(i + j) for j in range(len(block))], block)
    reader = index.open(place / "a.index")
    return lambda query: [int(hit.id) for hit in reader.search(query[None], K)[0]]


def _faiss(items, place):
    import faiss

    flat = faiss.IndexFlatIP(items.shape[1])
    flat.add(items)
    return lambda query: flat.search(query[None], K)[1][0].tolist()


def _memory() -> float:
    """Returns the MB of this process, without pages of mapped files."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
