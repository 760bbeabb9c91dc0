"""The ladder of fine-tuning from small nets, which take a minute of training on other classes.

    dmljax study run studies/small_ladder.py:data=omniglot8
    dmljax study run studies/small_ladder.py:pretrain=omniglot8,data=glyphs

`glyphs` are drawn by the program. Another name is a file NAME.npz in the current folder, with
images, labels, class_names and class_is_test. A net of five 3x3 convolutions learns from the
classes of `pretrain`; it is scored on its own test classes. The other rows start from its
backbone, and columns `frozen/...` are the scores of this backbone without further training. The
ladder chooses its step on a fifth of the training classes, which it holds out; the other rows train
on all of them, with fixed steps. No step is chosen by test scores.
"""

from __future__ import annotations

_SIZE = 32  # pixels, as glyphs have


def get_study(pretrain: str = "glyphs", data: str = "images", steps: int = 300, seeds: int = 5):
    start = {
        "start_from": "pretraining",
        "start.takes": "backbone",
        "net.norm": "frozen_batch_norm",
        "method": {"name": "pairs", "dim": 128, "dense_fn": "centered_dense"},
        "loss": {"name": "supcon"},
        "schedule": "constant",
        **_of(data),
    }
    head = {
        "trained": "last",
        "features": "cached",
        "optimizer": {"name": "adam", "rate": 1e-4},
        "steps": 150,
        "evaluate.every": 150,
    }
    everything = {
        "optimizer": {"name": "adam", "rate": 3e-4, "clip": 1.0},
        "schedule": {"name": "cosine", "warmup": 10},
        "steps": steps,
        "evaluate.every": steps,
    }
    ladder = [
        {
            "name": "head",
            **{name: head[name] for name in ("trained", "features", "optimizer")},
            "schedule": "constant",
            "rates": [3e-5, 1e-4, 3e-4],
            "steps": 300,
            "evaluate": {"every": 50},
            "select": "val/MAP@R",
        },
        {"name": "all"},
        {"name": "mix", "shares": [0.25, 0.5, 0.75]},
    ]
    return {
        "title": f"Fine-tuning a small net: from {pretrain} to {data}, {steps} steps",
        "base": "glyphs",
        "all": {"pictures": None, "evaluate.clustering": None},
        "rows": {
            "pretraining": {**_of(pretrain), "steps": steps, "evaluate.every": steps},
            "head": {**start, **head},
            "all": {**start, **everything},
            "ladder": {**start, **everything, "held_out": 0.2, "ladder": ladder},
        },
        "seeds": seeds,
        "baseline": "head",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "frozen/R@1", "frozen/MAP@R"),
    }


def _of(name: str):
    """Returns the fields of a set of images."""
    if name == "glyphs":
        return {"dataset": {"name": "glyphs"}}
    train = {"name": "standard_train", "size": _SIZE, "area": [0.6, 1.0], "flip": 0.0}
    return {
        "dataset": {"name": "npz", "path": f"{name}.npz"},
        "transform": train,
        "eval_transform": {"name": "standard_eval", "size": _SIZE, "shorter": _SIZE},
    }
