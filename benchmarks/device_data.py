"""How fast is training with images on the host, in windows, and on the device?

    python benchmarks/device_data.py

trains a very small net on crops of 224 of prepared JPEGs of 256 x 256, so that input takes most of
the time, and prints images per second of the same steps in turns. Processor-seconds are of all
threads of the process. `waiting` is the share of the time in which the loop waits for a batch.

    python benchmarks/device_data.py --differences

prints by how many of the 255 gray levels each transform on a device differs from its host form.
"""

import argparse
import functools
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from PIL import Image

from dmljax import main as dmljax_main
from dmljax.config.build import build
from dmljax.data import datasets, prepare, transforms
from dmljax.data.transforms.transform import bind
from dmljax.train import augment, loop, resident
from dmljax.train.devices import prefetch

dmljax_main.tune_cpu()  # as in a run
# Options of `runtime`, and blocks of steps that are sent ahead.
CONTESTANTS = {
    "host": ({}, 1),
    "host, one more batch ahead": ({}, 2),
    "host, decoded images in memory": ({"cache": True}, 1),
    "host, decoded images in memory, windows of 4 steps": (
        {"cache": True, "data": {"name": "host", "window": 4}},
        1,
    ),
    "device": ({"data": "device"}, 1),
}


def photograph(rng, height, width):
    """Noise at several scales, which is about as smooth as a photograph."""
    image = np.zeros((height, width, 3), np.float32)
    for side in (4, 16, 64):
        small = rng.standard_normal((side, side, 3)) * 127 / np.sqrt(side) + 128
        small = Image.fromarray(np.clip(small, 0, 255).astype(np.uint8))
        image += np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)) - 128.0
    return np.clip(image + 128, 0, 255).astype(np.uint8)


def prepared(folder, count):
    for i in range(count):
        path = folder / "photographs" / f"class {i % 16:02}" / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        pixels = photograph(np.random.default_rng(i), 375, 500)
        Image.fromarray(pixels).save(path, quality=92)
    splits = datasets.folder(root=folder / "photographs", split=0.875)
    prepare.prepare(splits, out=folder / "prepared", settings={}, geometry="squash")
    return folder / "prepared"


def config_of(root, antialias, **runtime):
    return {
        "dataset": {"name": "prepared", "root": str(root)},
        "transform": {"name": "standard_train", "antialias": antialias},
        "sampler": {"name": "class_balanced", "classes": 8, "per_class": 8},
        "net": {"name": "convnet", "widths": [4, 8], "strides": [4, 4]},
        "method": {"name": "pairs", "dim": 16},
        "loss": {"name": "triplet", "margin": 0.2},
        "steps": 1_000_000,
        "runtime": runtime,
    }


class Contestant:
    """A run of which some steps are timed at a time."""

    def __init__(self, config, ahead):
        self.run = build(config)
        start = time.perf_counter()
        data = resident.choose(self.run, say=lambda line: print(line, flush=True))
        self.loading = time.perf_counter() - start
        self._arrays = {} if data is None else data.arrays
        self._data, self._ahead = data, ahead
        self._step_fn = loop.compiled_step(self.run, data)
        self._state = start.first_state(self.run)
        self._signal = jax.device_put(
            np.zeros(self.run.shards.size, np.int32), self.run.shards.rows
        )

    def rate(self, steps):
        """Images per second and per processor-second, and the share of the time spent waiting."""
        waited = 0.0
        with loop.batches(self.run, 0, resident=self._data) as host_batches:
            batches = prefetch(
                host_batches,
                self.run.shards.rows,
                ahead=self._ahead,
                window=self.run.options.runtime.data.window,
            )
            for step in range(-8, steps):  # the first ones use what was read ahead
                if step == 0:
                    jax.block_until_ready(self._state)
                    start, waited, processor = time.perf_counter(), 0.0, time.process_time()
                before = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - before
                self._state, _ = self._step_fn(self._state, {**batch, **self._arrays}, self._signal)
            jax.block_until_ready(self._state)
            seconds = time.perf_counter() - start
            images = steps * self.run.batch_size
            return images / seconds, images / (time.process_time() - processor), waited / seconds


def speeds(args):
    with tempfile.TemporaryDirectory() as folder:
        root = prepared(pathlib.Path(folder), args.images)
        for antialias in (True, False):
            contestants = {
                name: Contestant(config_of(root, antialias, **runtime), ahead)
                for name, (runtime, ahead) in CONTESTANTS.items()
            }
            rates = {name: [] for name in contestants}
            for turn in range(args.rounds + 1):  # the first round compiles
                order = list(contestants.items())
                for name, contestant in order if turn % 2 else order[::-1]:
                    rates[name].append(contestant.rate(args.steps if turn else 1))
            print(f"\n| antialias={antialias} | images/s | x host | images/processor-s | waiting |")
            print("|---|---|---|---|---|")
            base = rates["host"]
            for name, pairs in rates.items():
                rate, of_processor, waiting = (
                    statistics.median(x) for x in zip(*pairs[1:], strict=True)
                )
                ratio = statistics.median(
                    a[0] / b[0] for a, b in zip(pairs[1:], base[1:], strict=True)
                )
                cells = f"{name} | {rate:.0f} | {ratio:.2f} | {of_processor:.0f} | {waiting:.0%}"
                print(f"| {cells} |", flush=True)


def differences(args):
    rng = np.random.default_rng(0)
    sizes = [(256, 256, 3), (256, 341, 3), (341, 256, 3)]
    cases = {name: bind(getattr(transforms, name)) for name in transforms.__all__}
    variants = ({"color": 0.4}, {"filter": "bicubic"}, {"antialias": False}, {"shorter": 240})
    for options in variants:
        transform = bind(transforms.standard_train, **options)
        cases[transform.title] = transform
    print("| transform | largest | mean | pixels that differ |\n|---|---|---|---|")
    images = [photograph(rng, *sizes[i % 3][:2]) for i in range(args.images)]
    for name, transform in cases.items():
        shapes = {transform.shapes(shape)[-1] for shape in sizes}
        photos = images if len(shapes) == 1 and "distort" not in name else images[::3]
        program = augment.program(transform, [x.shape for x in photos])
        apply_fn = jax.jit(functools.partial(augment.apply, program))
        differences = []
        for i in range(0, len(photos), 32):
            part = photos[i : i + 32]
            canvas = np.zeros((len(part), *program.bounds[0]), np.uint8)
            for row, image in zip(canvas, part, strict=True):
                row[: image.shape[0], : image.shape[1]] = image
            rngs = [np.random.default_rng(i + j) for j in range(len(part))]
            draws = [transform.draws(x.shape, r) for x, r in zip(part, rngs, strict=True)]
            actual = apply_fn(canvas, np.array([sum(x, ()) for x in draws], np.float32))
            expected = [transform(x, np.random.default_rng(i + j)) for j, x in enumerate(part)]
            differences.append(np.abs(np.asarray(actual, int) - np.stack(expected)))
        differences = np.concatenate(differences)
        print(
            f"| {name} | {differences.max()} | {differences.mean():.5f} "
            f"| {(differences > 0).mean():.3%} |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--differences", action="store_true")
    args = parser.parse_args()
    (differences if args.differences else speeds)(args)


if __name__ == "__main__":
    main()
