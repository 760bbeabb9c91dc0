"""Two steps of every recipe on 1, 3, 8 and 16 devices, in a process of its own with 16 devices.

Its arguments are a folder, the numbers of devices beside one, such as `3,16`, and names of recipes,
config files or mechanisms of `more`. It prints what each number of devices computes, compared with
one device, as JSON for each program. Names with the same program share a line.
"""

import json
import pathlib
import sys
from unittest import mock

import jax
import numpy as np
from quick import save_time
from train.pixels import as_float64, drawn

from dmljax.adapt import path_of
from dmljax.config import files as config_files
from dmljax.config.build import build
from dmljax.methods import base
from dmljax.recipes import photos
from dmljax.train import devices as placement
from dmljax.train import loop
from dmljax.train.devices import Shardings, put
from dmljax.train.step import init_state

SIDE, CLASSES, EACH = 12, 130, 5
KEPT = ("seed", "normalize", "sampler", "loss", "miner", "optimizer", "trained")
# Compiling takes most of the time.
QUICK = {"xla_backend_optimization_level": 0}
# Fields of a published backbone; its small net replaces it.
BACKBONE = {"net": {"name": "convnet", "norm": "frozen_batch_norm"}}
BACKBONE["eval_transform"] = {"name": "standard_eval", "size": 64, "scaled_decode": True}
VIT = {"name": "vit_s16", "patch": 4, "image_size": SIDE, "width": 8, "heads": 2, "depth": 5}
# Softmax cancels a bias of the keys: its gradient is rounding alone, which Adam would make large.
VIT["biased"] = "qv"


def images_file(folder):
    """An npz of which one half has enough classes for the batch of every recipe."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), EACH)
    colors = rng.integers(0, 128, (CLASSES, SIDE, SIDE, 3))[labels]
    images = colors + rng.integers(0, 128, (len(labels), SIDE, SIDE, 3))
    np.savez(pathlib.Path(folder) / "images.npz", images=images.astype(np.uint8), labels=labels)
    return str(pathlib.Path(folder) / "images.npz")


def shrunken(name, images):
    """The config with its own batch, sampler, loss and optimizer; a small net and small images."""
    config = config_files.read(name)
    if "ladder" in config:
        config |= next(step for step in config["ladder"] if step["name"] == "all")
    method = config["method"] | {"dim": 8}
    if method["name"] == "abe":
        method |= {"split": ["conv1", "conv2"], "learners": 4, "dim": 32}
        method["attention"] = method["attention"] and "conv2"
    net = {"name": "convnet", "widths": [4, 8], "strides": [3, 1]}
    net |= {name: config["net"][name] for name in ("norm",) if name in config["net"]}
    if config.get("trained") not in (None, "all", "last"):  # parts of a vision transformer
        net = VIT | {"weights": images}  # which nobody reads: parameters are drawn here
    changes = {"method": method, "net": net, "dataset": {"name": "npz", "path": images}}
    changes |= {"transform": "unchanged", "eval_transform": "unchanged", "select": "last"}
    changes |= {"steps": 100, "schedule": "constant", "evaluate": {"every": 100}}
    if config.get("trained") == "last":  # with a pretrained backbone on this machine
        changes["trained"] = "all"
    return {name: config[name] for name in KEPT if name in config} | changes


def more(images):
    """Mechanisms that no recipe has: chunks, a memory, sharded states, drawn triplets."""
    pairs = {"dataset": {"name": "npz", "path": images}, "transform": "unchanged"}
    pairs |= {"eval_transform": "unchanged", "normalize": "unit", "steps": 100, "select": "last"}
    pairs |= {
        "net": {"name": "convnet", "widths": [4, 8], "strides": [3, 1], "norm": "frozen_batch_norm"}
    }
    pairs |= {"optimizer": {"name": "adam", "rate": 1e-2}, "evaluate": {"every": 100}}
    pairs |= {"method": {"name": "pairs", "dim": 4, "memory": 120}, "loss": "multi_similarity"}
    pairs |= {"sampler": {"name": "uniform", "batch_size": 50}}
    proxies = {"method": {"name": "proxies", "dim": 4, "tile": 20}, "loss": "proxy_anchor"}
    # Gated layers, as in the large nets; rotary positions in one of them.
    small = {"patch": 4, "image_size": SIDE, "width": 16, "hidden": 48, "heads": 2, "depth": 2}
    transformer = {"sampler": {"name": "uniform", "batch_size": 10}}
    transformer["optimizer"] = {"name": "adam", "rate": 1e-2, "eps": 1e-3}
    sharded = {"runtime": {"sharded": "all"}}
    methods = ("abe", "dvml", "graph")
    return {f"{name}, all sharded": shrunken(name, images) | sharded for name in methods} | {
        "memory in chunks of 7": pairs | {"chunk": 7},
        "sharded proxies": pairs | proxies | sharded,
        "drawn negatives": pairs
        | {"loss": "margin", "miner": {"name": "distance_weighted", "dim": 4}},
        "g/14, all sharded": pairs
        | transformer
        | sharded
        | {"net": {"name": "dinov2_g14", **small}},
        "H+, state sharded": pairs
        | transformer
        | {"net": {"name": "dinov3_hplus16", **small}, "runtime": {"sharded": "state"}},
        "5 images": pairs | {"sampler": {"name": "uniform", "batch_size": 5}},
    }


def after_two_steps(run, first, count, *, padding=0):
    """The state, the metrics, and the compiled step; rows of padding hold the number `padding`."""
    shards, sharded = Shardings(jax.devices()[:count]), run.options.runtime.sharded
    class_rows = placement.class_rows(
        run.method,
        first.params,
        classes=run.class_rows.classes,
        shards=shards,
        sharded=sharded,
    )
    params = class_rows.padded(first.params)
    first = jax.device_get(init_state(params, first.model_state, run.optimizer))
    places = placement.of_state(first, shards, sharded=sharded, class_rows=class_rows)
    run = run._replace(shards=shards, placements=places, class_rows=class_rows)
    signal = put({"signal": np.zeros(count, np.int32)}, shards.rows)["signal"]
    state, step_fn = jax.device_put(first, places), None
    rows = shards.padded(run.batch_size, chunk=run.options.chunk)
    for step in range(2):
        indices = run.sample_fn(run.train.labels, seed=0, step=step)
        batch = {"images": run.train.records[indices], "labels": run.train.labels[indices]}
        batch = {
            name: np.concatenate([x, np.full((rows - len(x), *x.shape[1:]), padding, x.dtype)])
            for name, x in batch.items()
        }
        arguments = state, put(batch, shards.rows), signal
        if step_fn is None:
            step_fn = loop.compiled_step(run)
            step_fn = step_fn.lower(*arguments).compile(QUICK)
        state, (metrics, _) = step_fn(*arguments)

    def cut(keys, x):
        return x[: class_rows.classes] if class_rows.contains(path_of(keys)) else x

    held = {
        name: sum(x.addressable_shards[0].data.size for x in leaves) / sum(x.size for x in leaves)
        for name in ("params", "opt_state")
        if (leaves := jax.tree.leaves(getattr(state, name)))
    }
    state = jax.tree_util.tree_map_with_path(cut, jax.device_get(state))
    return (state, jax.device_get(metrics)), step_fn, held


def change(first, after):
    """What two steps have changed, as one vector: of parameters, statistics, optimizer state."""
    vectors = []
    for name in ("params", "model_state", "opt_state"):
        pairs = zip(
            jax.tree.leaves(getattr(after, name)),
            jax.tree.leaves(getattr(first, name)),
            strict=True,
        )
        moved = [np.ravel(np.float64(new) - np.float64(old)) for new, old in pairs]
        vectors.append(np.concatenate([np.zeros(1), *moved]))
    return vectors


def compared(run, counts):
    """By the number of devices: how far the change is from that of one device, and its costs."""
    params, model_state = as_float64(drawn((run.shapes.params, run.shapes.model_state)))
    params = run.class_rows.cut(params)
    first = jax.device_get(init_state(params, model_state, run.optimizer))
    (one, metrics), step_fn, _ = after_two_steps(run, first, 1)
    expected, cost = change(first, one), step_fn.cost_analysis()["flops"]
    result = {
        "net": run.options.net["name"],
        "batch": run.batch_size,
        "chunk": run.options.chunk,
        "devices": {},
    }
    result["moved"] = float(np.linalg.norm(expected[0]))
    for count in counts:
        (state, values), step_fn, held = after_two_steps(run, first, count)
        gaps = [
            float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1))
            for a, b in zip(change(first, state), expected, strict=True)
        ]
        gaps += [abs(float(values[k] - metrics[k])) / (1e-3 + abs(metrics[k])) for k in metrics]
        share = step_fn.cost_analysis()["flops"] / cost
        result["devices"][count] = {
            "distance": float(max(gaps)),
            "share": share,
            "held": held,
        }
    return result


def main(folder, counts, *names):
    images = images_file(folder)
    mechanisms, programs = more(images), {}
    for name in names:
        config = mechanisms.get(name) or shrunken(name, images)
        programs.setdefault(json.dumps(config, sort_keys=True), []).append(name)
    counts = [int(count) for count in counts.split(",")]
    for text, same in programs.items():
        run = build(json.loads(text))
        print(json.dumps({"names": same, **compared(run, counts)}), flush=True)


if __name__ == "__main__":
    save_time()
    without_diagnostics = mock.patch.object(base, "diagnostics", lambda *_, **__: {})
    backbones = mock.patch.object(photos, "published_backbone", lambda name: name and BACKBONE)
    with without_diagnostics, backbones, jax.enable_x64(True):
        main(*sys.argv[1:])
