"""Runs that reproduce no paper: characters that need no download, and folders of photographs."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from dmljax import at_hand
from dmljax.hints import check_known
from dmljax.recipes.arguments import check_choice
from dmljax.recipes.backbones import photo_fields, published_backbone

# With a thousand classes, proxies learn only if a batch has many classes, and if they turn neither
# too slowly nor too quickly: docs/choosing.md has the measurements. A step of Adam turns a proxy by
# about rate / size, so both are set, and do not depend on the number of classes.
_PROXY_RATE, _PROXY_STD = 30.0, 1.0
_DIM = 512  # width of the embedding
_TRAINED: dict[str, Any] = {
    "all": "all",
    "last4": {"name": "blocks", "count": 4},
    "lora": "lora",
    "bitfit": "biases",
    "prompts": "prompts",
}
# From this number of training images on, all layers train for this number of steps.
_LENGTHS = {"1": 60, "1000": "3 epochs", "10000": "2 epochs", "100000": "1 epoch"}


def glyphs(*, loss: str = "multi_similarity") -> dict[str, Any]:
    """Trains on characters in sixteen typefaces, drawn by the program: a minute on two cores.

    Half of the characters are for training; the scores are of the other half. More than 650 steps
    improve the scores further. `loss` is a function of `losses`: losses of pairs get 32 classes
    with 4 images in a batch, losses against proxies 128 classes with one image, and proxies that
    learn at 30 times the rate.
    """
    return {
        **_by_loss(loss, classes=32, dim=64, optimizer={"rate": 3e-3, "decay": 1e-4}),
        "dataset": {"name": "glyphs"},
        "transform": "glyphs_train",
        "eval_transform": "unchanged",
        "normalize": "unit",
        "net": {"name": "convnet", "strides": (2, 2, 1, 2, 1)},
        "schedule": {"name": "cosine", "warmup": 20},
        "steps": 650,
        "evaluate": {"every": 325},
        "runtime": {"cache": True},
    }


def folder(
    *, loss: str | None = None, train: str | None = None, net: str | None = None
) -> dict[str, Any]:
    """Trains a head on a frozen pretrained backbone for your images, a folder for each class.

    The first half of the classes, in the order of their names, is for training; the scores are of
    the others. Images that cannot be read are left out.

    * `net`: the name of published weights (`dmljax weights`). By default the last ones that were
      downloaded, else installed ones; else a small net is trained from scratch.
    * `train`: "head" computes the features of all images once, and trains a linear layer of 512 on
      them in seconds; this is the default where weights are there. "ladder" goes on from the best
      head: all layers at a low rate, then averages of their weights with those before, and keeps
      what is best for training classes that it holds out. "all", "last4" (blocks), "lora",
      "bitfit" and "prompts" train that much in one run. "vptsp" trains prompts against semantic
      proxies (`methods.semantic_proxies`). docs/finetune.md has measurements.
    * `loss`: supcon; multi_similarity for a net from scratch; proxy_anchor for "vptsp", which needs
      a loss against proxies.
    """
    backbone = published_backbone(net)
    if train is not None:
        check_choice("train", train, ("head", "ladder", *_TRAINED, "vptsp"))
    if backbone is None:
        if train not in (None, "all"):
            raise ValueError(f"train={train} needs a pretrained backbone: {at_hand.GET_BACKBONE}")
        return _from_scratch(loss or "multi_similarity")
    if train == "ladder":
        return _ladder(loss or "supcon", backbone)
    if train == "vptsp":
        return _vptsp(loss or "proxy_anchor", backbone)
    if train in _TRAINED:
        return _tuned(loss or "supcon", backbone) | {"trained": _TRAINED[train]}
    return _head(loss or "supcon", backbone)


def _of_data_set(name: str, dataset: str, title: str) -> Callable[..., dict[str, Any]]:
    def recipe(
        *, train: str | None = None, net: str | None = None, loss: str | None = None
    ) -> dict[str, Any]:
        config = folder(loss=loss, train=train, net=net)
        return {**config, "dataset": dataset, "unreadable": "raise"}

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = f"Fine-tunes a pretrained backbone on {title}; arguments as for `folder`."
    return recipe


cub = _of_data_set("cub", "cub200", "CUB-200-2011")
cars = _of_data_set("cars", "cars196", "Cars196")
sop = _of_data_set("sop", "sop", "Stanford Online Products")
inshop = _of_data_set("inshop", "inshop", "In-Shop Clothes")


def _head(loss: str, backbone: dict[str, Any]) -> dict[str, Any]:
    """Trains a linear layer on cached features; docs/choosing.md has measurements.

    150 steps at this rate turn the layer a little; more of them make it worse for new classes.
    """
    return {
        **photo_fields(backbone),
        **_by_loss(loss, dense_fn="centered_dense"),
        "sampler": {"name": "class_balanced", "classes": 32, "per_class": 4},
        "trained": "last",
        "features": "cached",
        "schedule": "constant",
        "steps": 150,
        "log_every": 50,
        "evaluate": {"batch_size": 32},
    }


def _tuned(loss: str, backbone: dict[str, Any]) -> dict[str, Any]:
    """Trains all layers at a low rate for a short time, from a head fitted to the features.

    Batch norms keep their statistics. Nets of convolutions see smaller images than in the
    evaluation: a random crop shows objects larger than they are then (Touvron et al., NeurIPS 2019,
    FixRes), and a step takes half the time. docs/finetune.md has the measurements behind it.
    """
    from dmljax import nets  # imports jax, which other recipes do not need

    fields = photo_fields(backbone)
    if "patch" not in inspect.signature(getattr(nets, backbone["net"]["name"])).parameters:
        size = fields["transform"]["size"]
        fields["transform"]["size"] = min(size, max(32, round(size * 5 / 7 / 32) * 32))
    return {
        **fields,
        **_by_loss(loss, dense_fn="centered_dense", optimizer={"clip": 1.0}),
        "schedule": {"name": "cosine", "warmup": 10},
        "steps": "3 epochs",
        "log_every": 10,
        "evaluate": {"batch_size": 32},
    }


def _vptsp(loss: str, backbone: dict[str, Any]) -> dict[str, Any]:
    """Trains prompts of a vision transformer with semantic proxies (VPTSP-G, Ren et al., 2024).

    Rates, batch and the share of learned proxies are from the published code for Cars196 and
    CUB-200-2011, where 50 to 60 epochs are published. Biases of the net do not learn here.
    """
    if not _takes_proxies(loss):
        raise ValueError(f"train=vptsp needs a loss against proxies, such as arcface, not {loss}")
    rate, proxy_rate = 5e-4, 1e-2
    groups = [{"path": "^proxies", "factor": proxy_rate / rate, "decay": 0.0}]
    return {
        **_tuned(loss, backbone),
        "trained": {"name": "prompts", "count": 20},
        "method": {"name": "semantic_proxies", "dim": _DIM, "share": 0.4},
        "sampler": {"name": "class_balanced", "classes": 32, "per_class": 2},
        "optimizer": {"name": "adam", "rate": rate, "clip": 1.0, "groups": groups},
        "steps": "30 epochs",
    }


def _ladder(loss: str, backbone: dict[str, Any]) -> dict[str, Any]:
    """Trains a head, from it all layers, and averages both: the stages of `runs.ladder`."""
    head = _head(loss, backbone)
    of_head = ("sampler", "trained", "features", "schedule", "log_every", "optimizer")
    return {
        **_tuned(loss, backbone),
        "held_out": 0.2,
        "evaluate": {"batch_size": 32, "clustering": None},
        "ladder": [
            {
                "name": "head",
                **{name: head[name] for name in of_head},
                "rates": [3e-5, 1e-4, 3e-4],
                "steps": 300,
                "evaluate": {"every": 50},
                "select": "val/MAP@R",
            },
            {"name": "all", "steps": _LENGTHS},
            {"name": "mix", "shares": [0.25, 0.5, 0.75]},
        ],
    }


def _from_scratch(loss: str) -> dict[str, Any]:
    """Trains a small net from random values, if no pretrained one is on this machine."""
    eval_transform = {"name": "standard_eval", "size": 64, "scaled_decode": True}
    backbone = {"net": {"name": "convnet"}, "eval_transform": eval_transform}
    miner = {"name": "multi_similarity", "epsilon": 0.1}
    return {
        **photo_fields(backbone),
        **_by_loss(loss, optimizer={"decay": 1e-4}),
        "miner": miner if loss == "multi_similarity" else None,
        "schedule": {"name": "cosine", "warmup": 50},
        "steps": "30 epochs",
        "held_out": 0.2,
        "select": "val/MAP@R",
        "evaluate": {"every": "5 epochs", "batch_size": 64},
    }


def _takes_proxies(loss: str) -> bool:
    from dmljax import losses  # imports jax, which other recipes do not need

    check_known("loss: there is no", [loss], losses.__all__)
    return "proxies" in inspect.signature(getattr(losses, loss)).parameters


def _by_loss(
    loss: str,
    *,
    classes: int = 16,
    dim: int = _DIM,
    optimizer: Mapping[str, Any] = MappingProxyType({}),
    **method: Any,
) -> dict[str, Any]:
    """Returns the fields of a config that depend on the loss; a batch has 4 images of a class."""
    fields: dict[str, Any] = {
        "method": {"name": "pairs", "dim": dim, **method},
        "loss": {"name": loss},
        "sampler": {"name": "class_balanced", "classes": classes, "per_class": 4},
        "optimizer": {"name": "adam", "rate": 1e-4, **optimizer},
    }
    if _takes_proxies(loss):
        fields["method"] |= {"name": "proxies", "proxy_init": _PROXY_STD}
        fields["sampler"] |= {"classes": 4 * classes, "per_class": 1}
        group = {"path": "^proxies", "factor": _PROXY_RATE, "decay": 0.0}
        fields["optimizer"] |= {"groups": [group]}
    return fields
