"""The Proxy-Anchor loss (Kim et al., CVPR 2020): a strong baseline."""

from typing import Any

from dmljax.recipes.arguments import check_choice, with_values


def _each(epochs: int) -> list[str]:
    """Returns the multiples of `epochs` before the last epoch, 60."""
    return [f"{epoch} epochs" for epoch in range(epochs, 60, epochs)]


# Where a data set and a net differ from CUB-200-2011 with BN-Inception in the official code.
_RESNET = {"sampler.batch_size": 120, "optimizer.groups.1.from": "5 epochs"}
_LARGE = {
    "net": {"name": "bn_inception", "weights": None},
    "optimizer.rate": 6e-4,
    "schedule.at": _each(20),
    "schedule.divide": 4.0,
    "evaluate.clustering": None,
}
_VALUES: dict[tuple[str, str], dict[str, Any]] = {
    ("cub200", "bn_inception"): {},
    ("cub200", "resnet50"): {**_RESNET, "schedule.at": _each(5)},
    ("cars196", "bn_inception"): {"schedule.at": _each(20)},
    ("cars196", "resnet50"): _RESNET,
    ("sop", "bn_inception"): {**_LARGE, "evaluate.ks": (1, 10, 100, 1000)},
    ("inshop", "bn_inception"): {**_LARGE, "evaluate.ks": (1, 10, 20, 30, 40)},
}


def proxy_anchor(*, dataset: str = "cub200", net: str = "bn_inception") -> dict[str, Any]:
    """Trains with Proxy-Anchor (Kim et al., 2020); `net`: bn_inception or resnet50 (CUB, Cars).

    From the official code, Proxy-Anchor-CVPR2020: AdamW, everything decays, proxies learn at 100
    times the rate, the sum of mean and maximum pooling, random batches, 60 epochs. In the first
    epoch (ResNet-50: five) the linear layer and the proxies learn alone, at the full rate.
    Gradients are clipped at 10, number by number. Proxies and linear layer are drawn by Kaiming's
    rule. On CUB and Cars batch norms keep the statistics that they were pretrained with; their
    scales and biases learn, since the code lets everything learn when the new layers are warm.

    The code evaluates after every epoch on the test classes and reports the best, and so does this
    recipe.

    BN-Inception has weights converted from Caffe, ResNet-50 has torchvision's V1: docs/weights.md.
    """
    check_choice("dataset", dataset, dict.fromkeys(name for name, _ in _VALUES))
    check_choice("net", net, [n for name, n in _VALUES if name == dataset])
    config = {
        "dataset": {"name": dataset, "root": None},
        "size": 224,
        "transform": "standard_train",
        "eval_transform": "standard_eval",
        "sampler": {"name": "uniform", "batch_size": 180},
        "net": {"name": net, "norm": "frozen_batch_norm", "weights": None},
        "method": {
            "name": "proxies",
            "dim": 512,
            "pool_fn": "global_mean_max",
            "dense_fn": "kaiming_dense",
        },
        "loss": {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0},
        "optimizer": {
            "name": "adam",
            "rate": 1e-4,
            "decay": 1e-4,
            "clip_value": 10.0,
            "groups": [
                {"path": "^proxies", "factor": 100.0, "decay": 1e-4},
                {"path": "^net/", "from": "1 epoch", "decay": 1e-4},
                {"path": ".", "decay": 1e-4},
            ],
        },
        "schedule": {"name": "steps", "at": _each(10), "divide": 2.0},
        "steps": "60 epochs",
        "select": "test/R@1",
        "evaluate": {"every": "1 epoch", "ks": (1, 2, 4, 8)},
    }
    return with_values(config, _VALUES[dataset, net])
