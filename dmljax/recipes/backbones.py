"""A published backbone in place of the net of a recipe."""

from typing import Any

from dmljax.recipes.photos import _backbone, _of_photos

_RATE = 1e-5  # of all pretrained layers of a transformer


def with_net(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with published weights on this machine, and their preprocessing.

    Everything learns by Adam at 1e-5, with gradients cut to the norm 1; groups and decay stay.
    """
    backbone = _backbone(name)
    assert backbone is not None  # only without a name
    config = {k: v for k, v in config.items() if k != "normalize"}  # the weights say what they need
    optimizer = {
        k: v for k, v in config["optimizer"].items() if k in ("groups", "decay") and v is not None
    }
    return {
        **config,
        "transform": _of_photos(backbone)["transform"],
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
