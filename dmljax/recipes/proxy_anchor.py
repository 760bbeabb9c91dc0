"""The Proxy-Anchor loss (Kim et al., CVPR 2020): a strong baseline."""

from __future__ import annotations

from typing import Any, NamedTuple

from dmljax.recipes.checks import check_choice

__all__ = ["proxy_anchor"]


class _Setting(NamedTuple):
    """The official code's numbers for a data set and a net."""

    epochs: int  # between two divisions of the rate
    evaluate: dict[str, Any]
    batch_size: int = 180
    warmup: str = "1 epoch"  # of the new layers alone
    rate: float = 1e-4
    divide: float = 2.0
    frozen: bool = True


_FEW = {"ks": (1, 2, 4, 8), "clustering": True}
_SOP = {"ks": (1, 10, 100, 1000), "clustering": False}
_INSHOP = {"ks": (1, 10, 20, 30, 40), "clustering": False}
_SETTINGS = {
    ("cub200", "bn_inception"): _Setting(10, _FEW),
    ("cub200", "resnet50"): _Setting(5, _FEW, batch_size=120, warmup="5 epochs"),
    ("cars196", "bn_inception"): _Setting(20, _FEW),
    ("cars196", "resnet50"): _Setting(10, _FEW, batch_size=120, warmup="5 epochs"),
    ("sop", "bn_inception"): _Setting(20, _SOP, rate=6e-4, divide=4.0, frozen=False),
    ("inshop", "bn_inception"): _Setting(20, _INSHOP, rate=6e-4, divide=4.0, frozen=False),
}


def proxy_anchor(*, dataset: str = "cub200", net: str = "bn_inception") -> dict[str, Any]:
    """Proxy-Anchor (Kim et al., 2020); `net`: bn_inception or (CUB and Cars) resnet50.

    From the official code, Proxy-Anchor-CVPR2020: AdamW, everything decays, proxies learn at 100
    times the rate, the sum of mean and maximum pooling, random batches, 60 epochs. In the first
    epoch (ResNet-50: five) the linear layer and the proxies learn alone, at the full rate.
    Gradients are clipped at 10, number by number. Proxies and linear layer are drawn by Kaiming's
    rule. On CUB and Cars batch norms keep the statistics that they were pretrained with; their
    scales and biases learn, since the code lets everything learn when the new layers are warm.

    The code evaluates after every epoch on the test classes and reports the best, and so does this
    recipe.

    The weights of BN-Inception were converted from Caffe; those of ResNet-50 are torchvision's V1:
    docs/weights.md.
    """
    check_choice("dataset", dataset, dict.fromkeys(name for name, _ in _SETTINGS))
    check_choice("net", net, [n for name, n in _SETTINGS if name == dataset])
    numbers = _SETTINGS[dataset, net]
    backbone = {"name": net, "frozen": True} if numbers.frozen else {"name": net}
    return {
        "dataset": {"name": dataset, "root": None},
        "transform": {"name": "standard_train", "size": 224},
        "eval_transform": {"name": "standard_eval", "size": 224},
        "sampler": {"name": "uniform", "batch_size": numbers.batch_size},
        "net": {**backbone, "weights": None},
        "method": {
            "name": "proxies",
            "dim": 512,
            "pool_fn": "global_mean_max",
            "dense_fn": "kaiming_dense",
        },
        "loss": {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0},
        "optimizer": {
            "name": "adam",
            "rate": numbers.rate,
            "decay": 1e-4,
            "clip_value": 10.0,
            "groups": [
                {"path": "^proxies", "factor": 100.0, "decay": 1e-4},
                {"path": "^net/", "from": numbers.warmup, "decay": 1e-4},
                {"path": ".", "decay": 1e-4},
            ],
        },
        "schedule": {
            "name": "steps",
            "at": [f"{epoch} epochs" for epoch in range(numbers.epochs, 60, numbers.epochs)],
            "divide": numbers.divide,
        },
        "steps": "60 epochs",
        "select": "test/R@1",
        "evaluate": {"every": "1 epoch", **numbers.evaluate},
    }
