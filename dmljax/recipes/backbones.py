"""Published backbones with their preprocessing, as fields of a config."""

import inspect
from typing import Any

from dmljax import at_hand
from dmljax.hints import check_known

_RATE = 1e-5  # of all pretrained layers of a transformer


def published_backbone(name: str | None) -> dict[str, Any] | None:
    """Returns the net, its weights and its preprocessing as fields of a config, or None."""
    from dmljax import nets, weights  # they import jax, which other recipes do not need
    from dmljax.data.transforms.recipes import shorter_of

    paths = at_hand.weights_at_hand()
    if name is None and not paths:
        return None
    name = next(iter(paths)) if name is None else name
    check_known("net: there is no", [name], weights.PUBLISHED)
    if name not in paths:
        command = weights.published.get_command(name)
        raise ValueError(f"the weights of {name} are not here: {command}")
    published = weights.PUBLISHED[name]
    eval_transform = published.preprocessing.transform
    # `--config.size` keeps the share that the default cuts, which an explicit `shorter` would not.
    if eval_transform.get("shorter") == shorter_of(eval_transform["size"]):
        del eval_transform["shorter"]
    has_batch_norm = "norm" in inspect.signature(getattr(nets, published.net)).parameters
    return {
        "net": {"name": published.net, "weights": str(paths[name])}
        | ({"norm": "frozen_batch_norm"} if has_batch_norm else {}),
        "eval_transform": eval_transform,
    }


def photo_fields(backbone: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of folders of photos; a training crop takes 40 % of the area or more."""
    names = ("size", "filter", "scaled_decode")
    options = {k: v for k, v in backbone["eval_transform"].items() if k in names}
    return {
        "dataset": {"name": "folder", "root": "photos", "split": None},
        **backbone,
        "transform": {"name": "standard_train", "area": [0.4, 1.0], **options},
        "unreadable": "skip",
    }


def with_net(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with published weights on this machine, and their preprocessing.

    Everything learns by Adam at 1e-5, with gradients cut to the norm 1; groups and decay stay.
    """
    backbone = published_backbone(name)
    assert backbone is not None  # only without a name
    config = {k: v for k, v in config.items() if k != "normalize"}  # the weights say what they need
    optimizer = {
        k: v for k, v in config["optimizer"].items() if k in ("groups", "decay") and v is not None
    }
    return {
        **config,
        "transform": photo_fields(backbone)["transform"],
        "eval_transform": backbone["eval_transform"],
        "net": backbone["net"],
        "optimizer": {"name": "adam", "rate": _RATE, "clip": 1.0, **optimizer},
    }


def split_of(net: dict[str, Any]) -> tuple[tuple[str, str], str]:
    """Returns the stages between which ABE's learners split, and the last of the attention.

    The first half of a transformer's blocks is shared, and the attention has a quarter of them. In
    ConvNeXt both lie in the long stage, where maps keep their size.
    """
    from dmljax import nets

    module = getattr(nets, net["name"])()
    if hasattr(module, "depth") and hasattr(module, "patch"):
        first = module.depth // 2
        return (str(first - 1), str(first)), str(first + max(1, module.depth // 4) - 1)
    if net["name"].startswith("convnext"):
        blocks = module.blocks[2]
        return (f"2.{blocks // 2}", f"2.{blocks // 2 + 1}"), f"2.{blocks - 1}"
    raise ValueError(
        f"net={net['name']}: ABE with published weights knows where to split transformers and "
        "ConvNeXt; for another net set method.split and method.attention yourself"
    )
