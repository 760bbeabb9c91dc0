"""The index next to faiss and hnswlib: build, memory, disk, and time of a query.

`python benchmarks/index.py --items=100000` prints one table and needs the extras `index` and
`bench`, and `pip install hnswlib` (which compiles). Vectors are clustered unit vectors; queries
come from the same clusters and are asked one at a time. Every engine runs in a process of its own.
HNSW has M = 16 and ef_construction = 128 everywhere, and a search uses the smallest ef of 16, 32,
64, ... that reaches a recall@10 of 0.95 on 200 further queries. dmljax chooses its ef itself when
it builds. `dmljax-bits` and `dmljax-64` search in two stages: by bits, or by the first 64 numbers,
and then by whole vectors. Memory is that of the process without pages of mapped files. `--exact`
leaves all but exact searches out.
"""

import argparse
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

K, RECALL = 10, 0.95
_TUNING = 200  # queries that choose the ef of the peers
_TURN = 50  # queries of one search before the next search has its turn
ENGINES = ("dmljax", "dmljax-bits", "dmljax-64", "faiss", "hnswlib")
_FIRST = {"dmljax-bits": "bits", "dmljax-64": 64}


def clustered(items: int, dimensions: int, queries: int) -> np.ndarray:
    """Unit vectors around random centers; the spectrum decays as that of trained embeddings."""
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
    parser.add_argument("--queries", type=int, default=1200)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--exact", action="store_true", help="build no graphs")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args.engine, args.folder, exact=args.exact)))
        return
    print(f"{args.items:,} x {args.dimensions}, {args.queries - _TUNING:,} queries, k = {K}\n")
    print(
        "| engine | search | recall@10 | p50 ms | p99 ms | build CPU s | build s | memory MB "
        "| disk MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        x = clustered(args.items, args.dimensions, args.queries)
        items, queries = x[: args.items], x[args.items :]
        np.save(folder / "items.npy", items)
        np.save(folder / "queries.npy", queries)
        truth = np.concatenate(
            [
                np.argpartition(-(queries[i : i + 50] @ items.T), K, axis=1)[:, :K]
                for i in range(0, len(queries), 50)
            ]
        )
        np.save(folder / "truth.npy", truth)
        del x, items, queries
        for engine in args.engines:
            if args.exact and engine not in ("dmljax", "faiss"):
                continue
            command = [sys.executable, __file__, f"--engine={engine}", f"--folder={folder}"]
            command += ["--exact"] if args.exact else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            for row in json.loads(done.stdout.splitlines()[-1]):
                print("| {} | {} | {:.3f} | {:.3f} | {:.3f} | {} |".format(*row), flush=True)


def measure(engine: str, folder: pathlib.Path, *, exact: bool) -> list:
    """Rows of the table: engine, search, recall, p50, p99, and the others as text."""
    items, queries, truth = (np.load(folder / f"{n}.npy") for n in ("items", "queries", "truth"))
    place = folder / engine
    place.mkdir()
    before = _memory()
    makers = {"dmljax": _dmljax, "faiss": _faiss, "hnswlib": _hnswlib}
    makers |= {name: functools.partial(_two_stages, first) for name, first in _FIRST.items()}
    make = makers[engine]
    tuning = queries[:_TUNING], truth[:_TUNING]
    queries, truth = queries[_TUNING:], truth[_TUNING:]
    searches, mark = make(items, place, None if exact else tuning)
    seconds, results = ([[] for _ in searches] for _ in range(2))
    for start in range(0, len(queries), _TURN):  # other jobs of the machine disturb all searches
        for (_, search, _), times, nearest in zip(searches, seconds, results, strict=True):
            for query in queries[:5]:
                search(query)
            for query in queries[start : start + _TURN]:
                begin = time.perf_counter()
                nearest.append(search(query))
                times.append(time.perf_counter() - begin)
    rows = []
    memory, disk = _memory() - before, _disk(place)
    for (name, _, (clock, processor)), times, nearest in zip(
        searches, seconds, results, strict=True
    ):
        recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(nearest, truth, strict=True)])
        p50, p99 = (1e3 * np.quantile(times, q) for q in (0.5, 0.99))
        others = f"{processor:.0f} | {clock:.0f} | {memory:.0f} | {disk:.0f}"
        rows.append([engine, name, float(recall), p50, p99, others])
    del mark
    return rows


def _dmljax(items, place, tuning):
    names = {"exact": False} if tuning is None else {"exact": False, "approximate": True}
    reader, times = _filled(items, place, *({"approximate": x} for x in names.values()))
    pairs = zip(names, times, strict=True)
    return [(name, _find(reader, exact=name == "exact"), time) for name, time in pairs], reader


def _two_stages(first, items, place, tuning):
    del tuning
    reader, times = _filled(items, place, {"first": first})
    candidates = reader.facts()["approximate"]["candidates"]
    name = f"{candidates} candidates by {first if first == 'bits' else f'{first} numbers'}"
    rows = [(name, _find(reader, exact=False), times[0])]
    return [*rows, ("exact, same process", _find(reader, exact=True), times[0])], reader


def _filled(items, place, *builds):
    """A reader of an index of the items, and the seconds (clock, processor) until each build."""
    from dmljax import index

    store = index.create(place / "photos.index", model="ab" * 32, dimension=items.shape[1])
    start, cpu, times = time.perf_counter(), time.process_time(), []
    for i in range(0, len(items), 10_000):
        block = items[i : i + 10_000]
        store.add([str(i + j) for j in range(len(block))], block)
    for options in builds:
        store.build(**options)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
    store.close()
    return index.open(place / "photos.index"), times


def _find(reader, *, exact):
    return lambda q: [int(hit.id) for hit in reader.search(q[None], K, exact=exact)[0]]


def _tuned(search, set_width, queries, truth):
    """The search with the smallest width that reaches the recall on `queries`."""
    for width in (16, 32, 64, 128, 256, 512):
        set_width(width)
        found = [len(set(search(q)) & set(t)) / K for q, t in zip(queries, truth, strict=True)]
        if np.mean(found) >= RECALL:
            break
    return f"HNSW, ef {width}", search


def _faiss(items, place, tuning):
    import faiss

    flat = faiss.IndexFlatIP(items.shape[1])
    start, cpu = time.perf_counter(), time.process_time()
    flat.add(items)
    exact = time.perf_counter() - start, time.process_time() - cpu
    rows = [("exact", lambda q: flat.search(q[None], K)[1][0].tolist(), exact)]
    if tuning is None:
        return rows, flat
    graph = faiss.IndexHNSWFlat(items.shape[1], 16, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = 128
    start, cpu = time.perf_counter(), time.process_time()
    graph.add(items)
    built = time.perf_counter() - start, time.process_time() - cpu
    faiss.write_index(graph, str(place / "hnsw"))
    faiss.omp_set_num_threads(1)

    def width(ef):
        graph.hnsw.efSearch = ef

    near = _tuned(lambda q: graph.search(q[None], K)[1][0].tolist(), width, *tuning)
    return [*rows, (*near, built)], (flat, graph)


def _hnswlib(items, place, tuning):
    import hnswlib

    graph = hnswlib.Index(space="ip", dim=items.shape[1])
    start, cpu = time.perf_counter(), time.process_time()
    graph.init_index(max_elements=len(items), M=16, ef_construction=128)
    graph.add_items(items, np.arange(len(items)))
    built = time.perf_counter() - start, time.process_time() - cpu
    graph.save_index(str(place / "hnsw"))
    search = lambda q: graph.knn_query(q, K, num_threads=1)[0][0].tolist()  # noqa: E731
    near = _tuned(search, graph.set_ef, *tuning)
    return [(*near, built)], graph


def _memory() -> float:
    """MB of this process, without pages of mapped files."""
    fields = dict(
        line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) / 1024


def _disk(folder: pathlib.Path) -> float:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e6


if __name__ == "__main__":
    main()
