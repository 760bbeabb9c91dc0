"""A data set and a config so small that a whole run takes seconds."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
from PIL import Image


def load_module(path: pathlib.Path):
    """Returns the module of a file outside the packages, which may import its neighbors.

    Their folder is on `sys.path` only meanwhile: `benchmarks/losses.py` would hide `tests/losses`.
    """
    specification = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(path.parent))
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def blobs(folder: pathlib.Path, *, classes: int = 8, each: int = 8, size: int = 12) -> str:
    """An npz of noisy colored patterns, one for each class."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 256, (classes, size, size, 3))
    labels = np.repeat(np.arange(classes), each)
    noise = rng.normal(size=(len(labels), size, size, 3)) * 40
    images = np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8)
    path = folder / "blobs.npz"
    if not path.exists():
        np.savez(path, images=images, labels=labels)
    return str(path)


def photos(folder: pathlib.Path, place_fn=lambda i, label: f"c{label}") -> pathlib.Path:
    """The images of `blobs` as PNG files `000.png` and so on, in folders by `place_fn`."""
    with np.load(blobs(folder)) as arrays:
        for i, (image, label) in enumerate(zip(arrays["images"], arrays["labels"], strict=True)):
            file = folder / "photos" / place_fn(i, label) / f"{i:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
    return folder / "photos"


def tiny(folder: pathlib.Path, **fields) -> dict:
    """A config of 6 steps over `blobs`."""
    config = {
        "dataset": {"name": "npz", "path": blobs(folder), "split": 0.5},
        "transform": "unchanged",
        "eval_transform": "unchanged",
        "normalize": "unit",
        "sampler": {"name": "class_balanced", "classes": 4, "per_class": 2},
        "net": {"name": "convnet", "widths": [4, 8], "strides": [2, 2]},
        "method": {"name": "pairs", "dim": 4},
        "loss": {"name": "triplet", "margin": 0.2},
        "optimizer": {"name": "adam", "rate": 1e-2},
        "steps": 6,
        "log_every": 2,
        "evaluate": {"every": 3, "ks": [1, 2], "clustering": {"seeds": [0]}, "batch_size": 16},
        "checkpoint": {"every": 2, "keep": 3},
        "pictures": None,
    }
    return config | fields


def brief(folder: pathlib.Path, **fields) -> dict:
    """`tiny` where a test looks at the end alone: one evaluation, and few checkpoints."""
    evaluate = {
        "every": 6,
        "ks": [1],
        "clustering": None,
        "batch_size": 16,
    }
    return tiny(folder, **{"evaluate": evaluate, "checkpoint": {"every": 6}} | fields)


def write_config(folder: pathlib.Path, config: dict) -> str:
    """As a file for `--config=`."""
    path = folder / "tiny.py"
    path.write_text(
        '"""A small run."""\nimport json\nfrom ml_collections import ConfigDict\n\n\n'
        f"def get_config():\n    return ConfigDict(json.loads({json.dumps(config)!r}))\n"
    )
    return str(path)


# The fields of `tiny` for one run of every method.
METHODS = {
    "pairs": {"method": {"name": "pairs", "dim": 4, "memory": 16}},
    "proxies": {
        "method": {"name": "proxies", "dim": 4},
        "loss": {"name": "proxy_anchor"},
        "optimizer": {"name": "adam", "rate": 1e-2, "groups": [{"path": "^proxies", "factor": 9}]},
    },
    "semantic_proxies": {
        "method": {"name": "semantic_proxies", "dim": 4, "count": 2, "depth": 1},
        "loss": {"name": "proxy_anchor"},
        "net": {"name": "vit_s16", "width": 8, "heads": 2, "depth": 1, "patch": 4}
        | {"image_size": 12},
    },
    "graph": {
        "method": {"name": "graph", "dim": 8, "heads": 2},
        "loss": {"name": "label_smoothed_cross_entropy"},
    },
    "dvml": {"method": {"name": "dvml", "dim": 4, "hidden": 8, "samples": 2}},
    "abe": {
        "method": {"name": "abe", "learners": 2, "dim": 8, "attention": "conv2"}
        | {"split": ["conv1", "conv2"]},
        "loss": {"name": "dmljax.methods.abe:contrastive", "margin": 1.0},
        "net": {"name": "convnet", "widths": [4, 8], "strides": [2, 1]},
        "optimizer": {"name": "sgd", "rate": 1e-2, "momentum": 0.9},
    },
}
