"""Runs that reproduce no paper: characters that need no download, and folders of photographs."""

from __future__ import annotations

from typing import Any

__all__ = ["folder", "glyphs"]


def glyphs() -> dict[str, Any]:
    """Characters in sixteen typefaces, drawn by the program; a minute on two cores.

    Half of the characters are for training; the scores are of the other half. More
    than 650 steps improve the scores further.
    """
    return {
        "dataset": {"name": "glyphs"},
        "transform": "glyphs_train",
        "eval_transform": "unchanged",
        "normalize": "unit",
        "sampler": {"name": "plan", "classes": 32, "per_class": 4},
        "net": {"name": "convnet", "strides": (2, 2, 1, 2, 1)},
        "method": {"name": "pairs", "dim": 64},
        "loss": {"name": "multi_similarity"},
        "optimizer": {"name": "adam", "rate": 3e-3, "decay": 1e-4},
        "schedule": {"name": "cosine", "warmup": 20},
        "steps": 650,
        "evaluate": {"every": 325},
        "runtime": {"cache": True},
    }


def folder() -> dict[str, Any]:
    """Your own images, a folder for each class: a ResNet-50 and a multi-similarity loss.

    The first half of the classes, in the order of their names, is for training; the scores are of
    the others. A fifth of the training classes is held out and chooses the step whose scores are
    reported: on few images, the scores of new classes fall again if training takes too long.
    Batches have 16 classes, or as many as there are, with 4 images. Images that cannot be read are
    left out.
    """
    return {
        "dataset": {"name": "folder", "root": "photos", "split": 0.5},
        "transform": {"name": "standard_train", "size": 224},
        "eval_transform": {"name": "standard_eval", "size": 224},
        "sampler": {"name": "plan", "classes": 16, "per_class": 4},
        "net": {"name": "resnet50", "weights": None},
        "method": {"name": "pairs", "dim": 512},
        "loss": {"name": "multi_similarity"},
        "miner": {"name": "multi_similarity", "epsilon": 0.1},
        "optimizer": {
            "name": "adam",
            "rate": 1e-4,
            "decay": 1e-4,
            "groups": [{"path": "^net/", "factor": 0.1}],
        },
        "schedule": {"name": "cosine", "warmup": 50},
        "steps": "30 epochs",
        "validation": 0.2,
        "select": "val/MAP@R",
        "evaluate": {"every": "5 epochs", "batch_size": 64},
        "unreadable": "skip",
    }
