"""The Proxy-Anchor loss (Kim et al., CVPR 2020): a strong baseline."""

from typing import Any

from dmljax.recipes.arguments import check_choice

# Epochs between two steps of the learning rate, and the K of R@K, as in the official code.
_INTERVALS = {
    ("cub200", "bn_inception"): 10,
    ("cub200", "resnet50"): 5,
    ("cars196", "bn_inception"): 20,
    ("cars196", "resnet50"): 10,
    ("sop", "bn_inception"): 20,
    ("inshop", "bn_inception"): 20,
}
_KS = {"sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 40)}


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
    check_choice("dataset", dataset, dict.fromkeys(name for name, _ in _INTERVALS))
    check_choice("net", net, [n for name, n in _INTERVALS if name == dataset])
    is_resnet, is_large = net == "resnet50", dataset in _KS
    interval = _INTERVALS[dataset, net]
    config: dict[str, Any] = {
        "dataset": {"name": dataset, "root": None},
        "size": 224,
        "transform": "standard_train",
        "eval_transform": "standard_eval",
        "sampler": {"name": "uniform", "batch_size": 120 if is_resnet else 180},
        "net": {"name": net, "weights": None},
        "method": {
            "name": "proxies",
            "dim": 512,
            "pool_fn": "global_mean_max",
            "dense_fn": "kaiming_dense",
        },
        "loss": {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0},
        "optimizer": {
            "name": "adam",
            "rate": 6e-4 if is_large else 1e-4,
            "decay": 1e-4,
            "clip_value": 10.0,
            "groups": [
                {"path": "^proxies", "factor": 100.0, "decay": 1e-4},
                {"path": "^net/", "from": "5 epochs" if is_resnet else "1 epoch", "decay": 1e-4},
                {"path": ".", "decay": 1e-4},
            ],
        },
        "schedule": {
            "name": "steps",
            "at": [f"{epoch} epochs" for epoch in range(interval, 60, interval)],
            "divide": 4.0 if is_large else 2.0,
        },
        "steps": "60 epochs",
        "select": "test/R@1",
        "evaluate": {"every": "1 epoch", "ks": _KS.get(dataset, (1, 2, 4, 8))},
    }
    if is_large:
        config["evaluate"]["clustering"] = None
    else:
        config["net"]["norm"] = "frozen_batch_norm"
    return config
