"""Runs that reproduce no paper: characters that need no download, and folders of photographs."""

from __future__ import annotations

from typing import Any

from dmljax.recipes.arguments import check_choice

__all__ = ["folder", "glyphs"]

_OF_PAIRS = ("multi_similarity", "contrastive", "triplet", "ntxent", "circle")
_OF_PROXIES = ("normalized_softmax", "proxy_anchor", "proxy_nca_pp", "cosface", "arcface")
# With a thousand classes, proxies learn only if a batch has many classes, and if they turn neither
# too slowly nor too quickly: docs/choosing.md has the measurements. A step of Adam turns a proxy by
# about rate / size, so both are set, and do not depend on the number of classes.
_PROXY_RATE, _PROXY_STD = 30.0, 1.0


def glyphs(*, loss: str = "multi_similarity") -> dict[str, Any]:
    """Characters in sixteen typefaces, drawn by the program; a minute on two cores.

    Half of the characters are for training; the scores are of the other half. More
    than 650 steps improve the scores further. `loss` is one of pairs (multi_similarity,
    contrastive, triplet, ntxent, circle; 32 classes with 4 images in a batch) or one against
    proxies (normalized_softmax, proxy_anchor, proxy_nca_pp, cosface, arcface; 128 classes with one
    image, and proxies that learn at 30 times the rate).
    """
    by_loss = _fields_of(loss, classes=32, per_class=4, dim=64)
    return {
        "dataset": {"name": "glyphs"},
        "transform": "glyphs_train",
        "eval_transform": "unchanged",
        "normalize": "unit",
        "sampler": by_loss["sampler"],
        "net": {"name": "convnet", "strides": (2, 2, 1, 2, 1)},
        "method": by_loss["method"],
        "loss": by_loss["loss"],
        "optimizer": {"name": "adam", "rate": 3e-3, "decay": 1e-4, **by_loss["optimizer"]},
        "schedule": {"name": "cosine", "warmup": 20},
        "steps": 650,
        "evaluate": {"every": 325},
        "runtime": {"cache": True},
    }


def folder(*, loss: str = "multi_similarity") -> dict[str, Any]:
    """Your own images, a folder for each class: a ResNet-50 and a multi-similarity loss.

    The first half of the classes, in the order of their names, is for training; the scores are of
    the others. A fifth of the training classes is held out and chooses the step whose scores are
    reported: on few images, the scores of new classes fall again if training takes too long.
    Batches have 16 classes, or as many as there are, with 4 images. Images that cannot be read are
    left out. `loss` as in `glyphs`; against proxies, batches have 64 classes with one image.
    """
    by_loss = _fields_of(loss, classes=16, per_class=4, dim=512)
    groups = [{"path": "^net/", "factor": 0.1}, *by_loss["optimizer"].get("groups", ())]
    miner = {"name": "multi_similarity", "epsilon": 0.1}
    return {
        "dataset": {"name": "folder", "root": "photos", "split": 0.5},
        "size": 224,
        "transform": "standard_train",
        "eval_transform": "standard_eval",
        "sampler": by_loss["sampler"],
        "net": {"name": "resnet50", "weights": None},
        "method": by_loss["method"],
        "loss": by_loss["loss"],
        "miner": miner if loss == "multi_similarity" else None,
        "optimizer": {"name": "adam", "rate": 1e-4, "decay": 1e-4, "groups": groups},
        "schedule": {"name": "cosine", "warmup": 50},
        "steps": "30 epochs",
        "validation": 0.2,
        "select": "val/MAP@R",
        "evaluate": {"every": "5 epochs", "batch_size": 64},
        "unreadable": "skip",
    }


def _fields_of(loss: str, *, classes: int, per_class: int, dim: int) -> dict[str, Any]:
    """The fields of a config that depend on the kind of the loss."""
    check_choice("loss", loss, (*_OF_PAIRS, *_OF_PROXIES))
    if loss in _OF_PAIRS:
        return {
            "method": {"name": "pairs", "dim": dim},
            "loss": {"name": loss},
            "sampler": {"name": "class_balanced", "classes": classes, "per_class": per_class},
            "optimizer": {},
        }
    return {
        "method": {"name": "proxies", "dim": dim, "proxy_init": _PROXY_STD},
        "loss": {"name": loss},
        "sampler": {"name": "class_balanced", "classes": classes * per_class, "per_class": 1},
        "optimizer": {"groups": [{"path": "^proxies", "factor": _PROXY_RATE, "decay": 0.0}]},
    }
