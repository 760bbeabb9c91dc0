"""Images per second on the host: ours, a torch DataLoader with Pillow, and a pool of threads.

    pip install -e '.[fast,bench]'
    python benchmarks/input.py

Each contestant decodes, takes a random resized crop of 227 and a flip, and returns uint8 batches of
64. `no antialiasing` is the same crop with `antialias=False`, which torch does not have. The rows
`squash` are the transform of DVML: squashed to 256x256, a random crop of 227, a flip. The originals
are 500x375 JPEGs of about 60 kB, created here; `prepared` are the same images after
`dmljax.data.prepare`. The contestants take turns in rounds, and the ratios are medians over the
rounds, so that other work on the machine affects all of them equally. If there is much of it,
compare images per CPU second.

    python benchmarks/input.py --large

reads JPEGs of 4000 x 3000 pixels instead, each contestant in a new process: in full and with
`scaled_decode`, without metadata and with an EXIF orientation, which Pillow decodes.
"""

import argparse
import collections
import concurrent.futures
import functools
import itertools
import multiprocessing
import pathlib
import statistics
import tempfile
import time

import numpy as np
import psutil
import torch
from PIL import Image

from dmljax import main as dmljax_main
from dmljax.data import datasets, decode, pipeline, prepare, sampling, transforms
from dmljax.data.batches import TrainBatch
from dmljax.data.records import Reader
from dmljax.data.transforms.transform import bind
from dmljax.files import machine

dmljax_main.tune_cpu()  # as in a run
BATCH, SIZE, CORES = 64, 227, machine.core_count()
TRANSFORM = functools.partial(transforms.standard_train, size=SIZE)
PLAIN = functools.partial(TRANSFORM, antialias=False)


def photographs(root: pathlib.Path, count: int, *, width: int = 500, **options) -> None:
    """Writes JPEGs of noise at several scales, which are about as large as photographs."""
    size = width, width * 3 // 4
    for i in range(count):
        rng = np.random.default_rng(i)
        image = np.zeros((*size[::-1], 3), np.float32)
        for scale in (4, 16, 64, width // 2):
            small = rng.standard_normal((scale * 3 // 4, scale, 3)) * 127 / np.sqrt(scale) + 128
            small = Image.fromarray(np.clip(small, 0, 255).astype(np.uint8))
            image += np.asarray(small.resize(size, Image.Resampling.BICUBIC)) - 128.0
        path = root / f"class {i % 10}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        pixels = np.clip(image + 128, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path, quality=92, **options)


def pillow_resized_crop(picture):
    w, h = picture.size
    for _ in range(10):
        area = w * h * torch.empty(1).uniform_(0.08, 1).item()
        ratio = np.exp(torch.empty(1).uniform_(np.log(3 / 4), np.log(4 / 3)).item())
        width, height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < width <= w and 0 < height <= h:
            top = torch.randint(0, h - height + 1, ()).item()
            left = torch.randint(0, w - width + 1, ()).item()
            break
    else:
        width, height, left, top = w, h, 0, 0
    picture = picture.crop((left, top, left + width, top + height))
    return picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR)


def pillow_squash(picture):
    picture = picture.resize((256, 256), Image.Resampling.BILINEAR)
    left, top = torch.randint(0, 256 - SIZE + 1, (2,)).tolist()
    return picture.crop((left, top, left + SIZE, top + SIZE))


class TorchSet(torch.utils.data.Dataset):
    """The usual data set of PyTorch: Pillow throughout, crop and flip as in torchvision."""

    def __init__(self, paths, crop_fn):
        self.paths, self.crop_fn = paths, crop_fn

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        picture = self.crop_fn(Image.open(self.paths[i]).convert("RGB"))
        if torch.rand(1).item() < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(picture))


class Repeated(torch.utils.data.Sampler):
    def __init__(self, n, length):
        self.n, self.length = n, length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randint(0, self.n, (self.length,)).tolist())


def ours(split, transform_fn=TRANSFORM):
    return pipeline.train(
        split,
        sample_fn=functools.partial(sampling.uniform, batch_size=BATCH),
        transform_fn=transform_fn,
        seed=0,
    )


def bare(split, threads):
    """The same batches by as many threads without grain, one batch ahead per thread."""
    batch_fn = TrainBatch(
        reader=Reader(split),
        sample_fn=functools.partial(sampling.uniform, batch_size=BATCH),
        transform=bind(TRANSFORM),
        seed=0,
        size=BATCH,
        offset=0,
        global_size=BATCH,
        skip=False,
    )

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        ahead = collections.deque(pool.submit(batch_fn, b) for b in range(threads))
        for b in range(threads, 1 << 30):
            batch = ahead.popleft().result()
            ahead.append(pool.submit(batch_fn, b))
            yield batch


def cpu_seconds() -> float:
    """CPU time of this process and its running children."""
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))


def rates_of(batches, count: int) -> tuple[float, float]:
    """Images per second and per CPU second, after the batches that were computed ahead."""
    iterator = iter(batches)
    for _ in range(2 * max(CORES, 4)):
        next(iterator)
    start, start_cpu = time.perf_counter(), cpu_seconds()
    for _ in range(count):
        next(iterator)
    seconds, seconds_cpu = time.perf_counter() - start, cpu_seconds() - start_cpu
    if hasattr(batches, "close"):
        batches.close()
    return count * BATCH / seconds, count * BATCH / seconds_cpu


LARGE = {
    "evaluation": functools.partial(transforms.standard_eval, size=224),
    "training, area 0.4 to 1": functools.partial(transforms.standard_train, area=(0.4, 1.0)),
    "training, area 0.08 to 1": functools.partial(transforms.standard_train),
}


def read_all(root, transform, scaled):
    """Images per second and per CPU second, and the memory in MB that reading takes."""
    split = datasets.folder(root=root, split=1.0).train
    transform_fn = functools.partial(LARGE[transform], scaled_decode=scaled)

    def read(rows):
        with pipeline.evaluation(
            split, transform_fn=transform_fn, batch_size=4, rows=rows
        ) as batches:
            for _ in batches:
                pass

    read(range(4))  # imports and starts threads
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, start, start_cpu = (
        psutil.Process().memory_info().rss,
        time.perf_counter(),
        cpu_seconds(),
    )
    read(range(len(split)))
    seconds, seconds_cpu = time.perf_counter() - start, cpu_seconds() - start_cpu
    status = pathlib.Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return len(split) / seconds, len(split) / seconds_cpu, peak - before / 2**20


def large(rounds: int, count: int = 24) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    names = ("images/s", "images/cpu-s", "MB")
    with tempfile.TemporaryDirectory() as folder:
        roots = {"no metadata": f"{folder}/plain", "EXIF": f"{folder}/exif"}
        photographs(pathlib.Path(roots["no metadata"]), count, width=4000)
        photographs(pathlib.Path(roots["EXIF"]), count, width=4000, exif=exif)
        sizes = [path.stat().st_size for path in pathlib.Path(folder).rglob("*.jpg")]
        print(f"{CORES} cores, {np.mean(sizes) / 1e6:.1f} MB an image", flush=True)
        print("| | " + " | ".join(f"{name}, in full | scaled" for name in names) + " |")
        print("|---|" + "---|" * 2 * len(names))
        for (kind, root), transform in itertools.product(roots.items(), LARGE):
            results = {False: [], True: []}
            for scaled in [False, True] * rounds:
                context = multiprocessing.get_context("spawn")
                with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
                    task = pool.submit(read_all, root, transform, scaled)
                    results[scaled].append(task.result())
            medians = np.median([results[False], results[True]], axis=1).T
            cells = " | ".join(f"{full:.3g} | {fast:.3g}" for full, fast in medians)
            print(f"| {kind}, {transform} | {cells} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument(
        "--batches", type=int, default=30, help="timed batches per contestant and round"
    )
    parser.add_argument("--large", action="store_true", help="12-megapixel photographs")
    args = parser.parse_args()
    if args.large:
        large(args.rounds)
        return
    threads = max(CORES, 4)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "photographs"
        root.mkdir()
        photographs(root, args.images)
        kilobytes = np.mean([p.stat().st_size for p in root.rglob("*.jpg")]) / 1e3
        splits = datasets.folder(root=root, split=0.9)
        originals = splits.train
        prepare.prepare(splits, out=f"{folder}/prepared", settings={})
        prepared = datasets.prepared(root=f"{folder}/prepared").train
        paths = list(originals.records)

        out = f"{folder}/squashed"
        prepare.prepare(splits, out=out, settings={}, geometry="squash")
        squashed = datasets.prepared(root=out).train

        def dataloader(crop_fn):
            return torch.utils.data.DataLoader(
                TorchSet(paths, crop_fn),
                BATCH,
                sampler=Repeated(len(paths), 10**6),
                num_workers=CORES,
                prefetch_factor=2,
            )

        contestants = {
            "torch, originals": lambda: dataloader(pillow_resized_crop),
            "dmljax, originals": lambda: ours(originals),
            "dmljax, prepared": lambda: ours(prepared),
            "dmljax, originals, no antialiasing": lambda: ours(originals, PLAIN),
            "dmljax, prepared, no antialiasing": lambda: ours(prepared, PLAIN),
            "bare threads, prepared": lambda: bare(prepared, threads),
            "bare threads, originals": lambda: bare(originals, threads),
            "torch, originals, squash": lambda: dataloader(pillow_squash),
            "dmljax, originals, squash": lambda: ours(originals, transforms.dvml_train),
            "dmljax, prepared, squash": lambda: ours(squashed, transforms.dvml_train),
        }
        fast = "simplejpeg" if decode.simplejpeg else "Pillow"
        print(f"{CORES} cores, {kilobytes:.0f} kB an original, our decoder: {fast}", flush=True)
        rates = {name: [] for name in contestants}
        for turn in range(args.rounds):
            order = list(contestants.items())
            for name, contestant in order if turn % 2 == 0 else order[::-1]:
                rates[name].append(rates_of(contestant(), args.batches))
                line = "{:6.0f} images/s, {:6.0f} /cpu-s".format(*rates[name][-1])
                print(f"round {turn + 1}  {name:34s} {line}", flush=True)

    def ratio(one, two, kind):
        pairs = zip(rates[one], rates[two], strict=True)
        return statistics.median(a[kind] / b[kind] for a, b in pairs)

    print("| | images/s | x torch | images/cpu-s | x torch |\n|---|---|---|---|---|")
    for name, rounds in rates.items():
        peer = "torch, originals, squash" if "squash" in name else "torch, originals"
        cells = [name]
        for kind in (0, 1):
            median = statistics.median(pair[kind] for pair in rounds)
            cells += [f"{median:.0f}", f"{ratio(name, peer, kind):.2f}"]
        print(f"| {' | '.join(cells)} |")
    for source in ("originals", "prepared"):
        wall, cpu = (
            100 * (ratio(f"bare threads, {source}", f"dmljax, {source}", kind) - 1)
            for kind in (0, 1)
        )
        print(f"grain's overhead over bare threads, {source}: {wall:.0f} % time, {cpu:.0f} % cpu")


if __name__ == "__main__":
    main()
