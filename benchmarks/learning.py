"""Scores after equal seconds of training: dmljax's methods, and the loop in `learning_peer.py`.

    pip install -e '.[bench]'
    python benchmarks/learning.py --data omniglot8.npz --seconds 100 --seeds 0 1 2

The file holds images, labels, class_names and class_is_test (`datasets.npz`). Scores are of the
test classes, by one evaluator. The clock runs from before the first compilation to the last step
and leaves out the evaluation. The schedule of a rate follows the clock. All runs have the same
32 x 32 images with the same affine distortions, five 3x3 convolutions of 32-64-64-128-128 features
with strides 2 1 2 1 2, 64 dimensions, batches of 32 classes x 4 images, and AdamW at 3e-3 falling
by a cosine. `METHODS` has the differences of each method. `--validation 0.3` scores held-out
training classes instead; `--held-out Greek Latin` holds out training classes by the first part of
names such as Greek/character01. The settings were chosen on these. `--steps` sets the number of
steps instead of the seconds.
"""

import argparse
import collections
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import learning_peer
import numpy as np

PEER = "torch + PML"
_TICKS = 100_000  # of a schedule
AFFINE = {"name": "distort", "rotation": 10, "shear": 0.15, "scale": (0.85, 1.15), "shift": 2}
AFFINE |= {"invert": 0, "noise": 0, "outside": "nearest"}
GRAPH = {"name": "graph", "dim": 64, "pool": "flatten", "neck": True}
GRAPH |= {"attention": "gatv2", "heads": 4}
PAIRS = {
    "method": {"name": "pairs", "dim": 64},
    "loss": {"name": "multi_similarity"},
    "miner": {"name": "multi_similarity", "epsilon": 0.1},
}
METHODS = {
    "pairs": PAIRS,
    "pairs, flattened": PAIRS | {"method": PAIRS["method"] | {"pool": "flatten"}},
    "proxies, proxy-anchor": {
        "method": {"name": "proxies", "dim": 64, "pool": "flatten"},
        "loss": {"name": "proxy_anchor"},
        "optimizer": {"groups": [{"path": "^proxies", "factor": 10.0}]},
    },
    "graph, gatv2": {
        "method": GRAPH,
        "loss": {"name": "label_smoothed_cross_entropy"},
    },
    "graph, backbone only": {
        "method": GRAPH | {"graph_weight": 0},
        "loss": {"name": "label_smoothed_cross_entropy"},
    },
    # The published weights are for sums of triplets, which are larger than this loss.
    "dvml": {
        "method": {
            "name": "dvml",
            "dim": 64,
            "samples": 4,
            "phase_at": 0,
            "lambdas": ((1e-3, 1e-2, 0.1, 1),) * 2,
        },
        "loss": {"name": "multi_similarity"},
    },
}
METHODS["dvml, flattened"] = METHODS["dvml"] | {
    "method": METHODS["dvml"]["method"] | {"pool": "flatten"}
}
# Half the work a step, so twice the steps: that pays with more distortion only.
QUICK = {
    "net": {"name": "convnet", "strides": (2, 2, 1, 2, 1)},
    "transform": AFFINE | {"rotation": 15, "shear": 0.25, "scale": (0.75, 1.25), "shift": 3},
}
METHODS["dvml, quicker net"] = METHODS["dvml"] | QUICK
ENSEMBLE = {"name": "abe", "dim": 64, "split": ["conv3", "conv4"], "attention": "conv4"}
ENSEMBLE |= {"lambda_div": 0.1}
for title, change in {
    "abe, 4 learners": {"learners": 4},
    "abe, 4 learners, no divergence": {"learners": 4, "lambda_div": 0},
    "4 heads": {"learners": 4, "heads": True, "lambda_div": 0},
    "1 head": {"learners": 1, "heads": True, "lambda_div": 0},
}.items():
    METHODS[title] = PAIRS | {"method": ENSEMBLE | change}
LATER = {"split": ["conv4", "conv5"], "attention": "conv5"}
METHODS["abe, quicker net"] = PAIRS | QUICK | {"method": ENSEMBLE | LATER | {"learners": 4}}
METHODS["abe, 2 learners, flattened"] = PAIRS | {
    "method": ENSEMBLE | {"learners": 2, "pool": "flatten"}
}


def train(
    title: str,
    data: str,
    seed: int,
    steps: int,
    validation: float,
    seconds: float,
    changes: dict,
) -> dict:
    """Scores, steps and seconds of one of `METHODS`, with `changes` to its config."""
    import grain  # noqa: F401  (imports are not on the clock, nor are torch's)
    import jax
    import optax

    from dmljax import main, metrics
    from dmljax.config.build import build
    from dmljax.train import loop
    from dmljax.train.devices import prefetch
    from dmljax.train.evaluation import Evaluator
    from dmljax.train.start import first_state
    from dmljax.train.step import train_step

    main.tune_cpu()
    fields = METHODS[title] | changes
    optimizer = {"name": "adam", "rate": 3e-3, "decay": 1e-2} | fields.get("optimizer", {})
    fields = fields | {"optimizer": optimizer}
    start = time.perf_counter()
    run = build(
        {
            "dataset": {"name": "npz", "path": data},
            "transform": AFFINE,
            "eval_transform": "unchanged",
            "normalize": "unit",
            "sampler": {"name": "class_balanced", "classes": 32, "per_class": 4},
            "net": {"name": "convnet"},
            "steps": _TICKS,
            "seed": seed,
            "held_out": validation,
            **fields,
        }
    )
    state = first_state(run)
    step_fn = train_step(run.method, run.optimizer, normalize_fn=run.normalize_fn, seed=seed)
    step_fn = jax.jit(step_fn, donate_argnums=0)
    first, step, pending = 0.0, 0, collections.deque()

    def at(state, share):
        """The state, with the schedule at this share of the run."""
        tick = jax.device_put(np.int32(share * _TICKS), run.shards.everywhere)
        counter = optax.ScaleByScheduleState
        return jax.tree.map(
            lambda s: counter(tick) if isinstance(s, counter) else s,
            state,
            is_leaf=lambda s: isinstance(s, counter),
        )

    with loop.batches(run) as batches:
        for batch in prefetch(batches, run.shards.rows):
            share = step / steps if steps else (time.perf_counter() - start) / seconds
            if step and share >= 1:
                break
            state, step_metrics = step_fn(at(state, share), batch)
            step += 1
            pending.append(step_metrics)
            if step == 1 or len(pending) > 2:  # two in flight, as in a run
                jax.block_until_ready(pending.popleft())
            first = first or time.perf_counter() - start
        jax.block_until_ready(state)
    duration = time.perf_counter() - start
    split = run.held_out if validation else run.test
    embeddings = Evaluator(run).embeddings(state, split)
    scores = metrics.retrieval(embeddings["embedding"], split.labels, ks=(1,))
    parts = [
        metrics.retrieval(learner, split.labels, ks=(1,))["R@1"]
        for name, learner in embeddings.items()
        if name.startswith("learner")
    ]
    row = {"steps": step, "seconds": duration, "first": first, "loss": float(step_metrics["loss"])}
    row |= {k: scores[k] for k in ("R@1", "MAP@R")}
    if parts:
        row |= {
            "R@1 of a learner": float(np.mean(parts)),
            "self": float(step_metrics["self_cosine"]),
        }
    return row


def small(path: str, folder: pathlib.Path, held_out: list[str]) -> str:
    """The same file with images of 32 x 32: each pixel the mean of those it covers.

    Of its training classes alone, where some of them are `held_out`.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {k: file[k] for k in ("images", "labels", "class_names", "class_is_test")}
    if held_out:
        train = ~arrays["class_is_test"]
        groups = np.array([name.partition("/")[0] for name in arrays["class_names"]])
        train_groups = sorted(set(groups[train].tolist()))
        if unknown := sorted(set(held_out) - set(train_groups)):
            raise SystemExit(
                f"training classes are of {', '.join(train_groups)}, not of {unknown[0]}"
            )
        rows = train[arrays["labels"]]
        arrays["images"] = arrays["images"][rows]
        arrays["labels"] = (np.cumsum(train) - 1)[arrays["labels"][rows]]
        arrays["class_names"] = arrays["class_names"][train]
        arrays["class_is_test"] = np.isin(groups, held_out)[train]
    images = arrays["images"]
    times = images.shape[1] // 32
    n, channels = len(images), images.shape[3:]
    parts = images.reshape(n, 32, times, 32, times, *channels)
    arrays["images"] = np.rint(parts.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)
    np.savez(folder / "small.npz", **arrays)
    return str(folder / "small.npz")


def in_new_process(args: argparse.Namespace, **options) -> dict:
    """The result of one run in a new process."""
    command = [sys.executable, __file__, "--one", json.dumps(options), "--data", args.data]
    completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode:
        raise SystemExit(completed.stderr)
    return json.loads(completed.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    titles = [PEER, *METHODS]
    parser.add_argument("--methods", nargs="+", default=titles, choices=titles)
    parser.add_argument("--validation", type=float, default=0.0)
    parser.add_argument("--held-out", nargs="+", default=[])
    parser.add_argument("--set", default="{}", help="config fields as JSON, over those of METHODS")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not pathlib.Path(args.data).is_file():
        parser.error(f"--data: there is no file {args.data}")
    if args.one:
        options = json.loads(args.one)
        title = options.pop("title")
        run = learning_peer.train if title == PEER else functools.partial(train, title)
        print(json.dumps(run(args.data, **options)))
        return
    rows: dict[str, list] = {title: [] for title in args.methods}
    with tempfile.TemporaryDirectory() as folder:
        name = pathlib.Path(args.data).stem
        args.data = small(args.data, pathlib.Path(folder), args.held_out)
        for seed in args.seeds:
            for title in args.methods:
                options = {"title": title, "seed": seed, "validation": args.validation}
                options |= {"steps": args.steps, "seconds": args.seconds}
                options |= {} if title == PEER else {"changes": json.loads(args.set)}
                row = in_new_process(args, **options)
                rows[title].append(row)
                print(f"{title}, seed {seed}: {json.dumps(row)}", file=sys.stderr, flush=True)
    held_out = args.validation or args.held_out
    print(f"{name}, {'held-out training' if held_out else 'unseen'} classes")
    print("| method | seconds | steps | R@1 | MAP@R | R@1 of each seed |")
    print("|---|---|---|---|---|---|")
    for title, results in rows.items():
        means = [np.mean([row[k] for row in results]) for k in ("seconds", "steps", "R@1", "MAP@R")]
        recalls = ", ".join(f"{row['R@1']:.3f}" for row in results)
        numbers = "{:.0f} | {:.0f} | {:.3f} | {:.3f}".format(*means)
        print(f"| {title} | {numbers} | {recalls} |")


if __name__ == "__main__":
    main()
