"""How losses learn with about a thousand classes, by the batch and by the rate of the proxies.

    python benchmarks/many_classes.py [--data omniglot8.npz] [--steps 600] [--seeds 0]

Each training class is taken eight times, as a class of its own for each rotation by 90 degrees and
each mirror image. Every fifth training class is held out, in the same way; test classes are not
used. Without `--data` the characters are those of the data set glyphs (1,056 training classes with
16 images). Nets, images and schedule are those of `learning.py`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import learning
import numpy as np

ONE_EACH = {"sampler": {"name": "class_balanced", "classes": 128, "per_class": 1}}
SOFTMAX = {"loss": {"name": "normalized_softmax"}}
PROXIES = "proxies, proxy-anchor"


def _rate(factor: float, std: float | None = 1.0) -> dict:
    """Proxies drawn with a deviation (None: as published), and their rate relative to the net's."""
    method = learning.METHODS[PROXIES]["method"] | {"proxy_std": std}
    optimizer = {"groups": [{"path": "^proxies", "factor": factor}]}
    return {"method": method, "optimizer": optimizer}


# Title -> a method of learning.py, and changes of its fields. Its batches are 32 classes x 4.
ROWS = {
    "multi-similarity, 32 x 4": ("pairs", {}),
    "proxy-anchor, 32 x 4, rate x 10": (PROXIES, _rate(10)),
    "proxy-anchor, 128 x 1, rate x 1": (PROXIES, ONE_EACH | _rate(1)),
    "proxy-anchor, 128 x 1, rate x 10": (PROXIES, ONE_EACH | _rate(10)),
    "proxy-anchor, 128 x 1, rate x 30": (PROXIES, ONE_EACH | _rate(30)),
    "proxy-anchor, 128 x 1, rate x 100": (PROXIES, ONE_EACH | _rate(100)),
    "normalized softmax, 32 x 4, rate x 10": (PROXIES, SOFTMAX | _rate(10)),
    "normalized softmax, 128 x 1, rate x 10": (PROXIES, ONE_EACH | SOFTMAX | _rate(10)),
    "normalized softmax, 128 x 1, rate x 30": (PROXIES, ONE_EACH | SOFTMAX | _rate(30)),
    "normalized softmax, 128 x 1, rate x 100": (PROXIES, ONE_EACH | SOFTMAX | _rate(100)),
    "proxy-anchor, 128 x 1, published values, rate x 1": (PROXIES, ONE_EACH | _rate(1, None)),
    "proxy-anchor, 128 x 1, published values, rate x 30": (PROXIES, ONE_EACH | _rate(30, None)),
    "normalized softmax, 128 x 1, published values, rate x 1": (
        PROXIES,
        ONE_EACH | SOFTMAX | _rate(1, None),
    ),
}


def eightfold(data: str | None, path: pathlib.Path) -> int:
    """Writes the training classes of the file, eight times each; returns how many train."""
    from dmljax.data import datasets

    train = (datasets.npz(path=data) if data else datasets.glyphs()).train
    images = np.stack([train.records[i] for i in range(len(train))])
    times = images.shape[1] // 32
    parts = images.reshape(len(images), 32, times, 32, times, -1)
    images = np.rint(parts.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)
    labels, classes = np.asarray(train.labels), int(np.max(train.labels)) + 1
    turned = [np.rot90(images, i % 4, axes=(1, 2))[:, :, :: -1 if i > 3 else 1] for i in range(8)]
    held_out = np.tile(np.arange(classes) % 5 == 4, 8)
    np.savez(
        path,
        images=np.concatenate(turned),
        labels=np.concatenate([labels + i * classes for i in range(8)]).astype(np.int32),
        class_names=np.array([f"{i}/{c}" for i in range(8) for c in range(classes)]),
        class_is_test=held_out,
    )
    return int(np.sum(~held_out))


def one(data: str, title: str, seed: int, steps: int) -> dict:
    method, changes = ROWS[title]
    run = {"seed": seed, "steps": steps, "validation": 0.0, "seconds": 0.0}
    return learning.train(method, data, changes=changes, **run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.data, steps=args.steps, **json.loads(args.one))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "many.npz"
        print(f"{eightfold(args.data, path)} training classes, {args.steps} steps")
        print("| loss, classes x images, rate of the proxies | R@1 | MAP@R |\n|---|---|---|")
        for title in args.rows:
            scores = []
            for seed in args.seeds:  # in a process of its own: nothing is kept between runs
                options = json.dumps({"title": title, "seed": seed})
                command = [sys.executable, __file__, "--one", options, "--data", str(path)]
                command += ["--steps", str(args.steps)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                row = json.loads(done.stdout.splitlines()[-1])
                scores.append([row["R@1"], row["MAP@R"]])
            print("| {} | {:.3f} | {:.3f} |".format(title, *np.mean(scores, axis=0)), flush=True)


if __name__ == "__main__":
    main()
