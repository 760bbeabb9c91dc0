"""Strong baselines: multi-similarity (CVPR 2019) and Proxy-Anchor (CVPR 2020)."""

from typing import Any

from dmljax.recipes.arguments import check_choice

_MS_LARGE = {"every": 1000, "clustering": None}
# Multi-similarity: steps, and the evaluation.
_MS_VALUES: dict[str, tuple[int, dict[str, Any]]] = {
    "cub200": (3000, {"every": 200, "ks": (1, 2, 4, 8, 16, 32)}),
    "cars196": (6000, {"every": 200, "ks": (1, 2, 4, 8)}),
    "sop": (40000, {**_MS_LARGE, "ks": (1, 10, 100, 1000)}),
    "inshop": (40000, {**_MS_LARGE, "ks": (1, 10, 20, 30, 40, 50)}),
}


def multi_similarity(*, dataset: str = "cub200") -> dict[str, Any]:
    """Trains BN-Inception with the multi-similarity loss and miner (Wang et al., 2019).

    The official code (research-ms-loss) has a config for CUB-200-2011 alone, which this recipe
    follows: maximum pooling; Adam at 3e-5 for the whole net, divided by 10 after 1,200 and 2,400 of
    3,000 steps; an L2 term of 5e-4 in the gradient of every parameter, biases and norms too;
    batches of 16 classes with 5 images; shorter side 256, then crops of 227 pixels from 16 % to all
    of the image; a linear layer drawn by Kaiming's rule without a bias at the start. Batch norms
    keep the statistics that they were pretrained with; their scales and biases learn. The code
    scales negatives by 40; the paper says 50.

    For the other sets no config was published. This recipe keeps the loss, miner, rate and batches
    there, and the length of training is a guess that no run has tested.

    The official code reports the best of its evaluations on the test classes, and so does this
    recipe. The weights of BN-Inception were converted from Caffe: docs/weights.md.
    """
    check_choice("dataset", dataset, _MS_VALUES)
    steps, evaluate = _MS_VALUES[dataset]
    return {
        "dataset": {"name": dataset, "root": None},
        "size": 227,
        "transform": {"name": "standard_train", "shorter": 256, "area": (0.16, 1.0)},
        "eval_transform": "standard_eval",
        "sampler": {"name": "class_balanced", "classes": 16, "per_class": 5},
        "net": {"name": "bn_inception", "norm": "frozen_batch_norm", "weights": None},
        "method": {
            "name": "pairs",
            "dim": 512,
            "pool_fn": "global_max",
            "dense_fn": "kaiming_dense",
        },
        "loss": {"name": "multi_similarity", "alpha": 2.0, "beta": 40.0, "base": 0.5},
        "miner": {"name": "multi_similarity", "epsilon": 0.1},
        "optimizer": {"name": "adam", "rate": 3e-5, "l2": 5e-4},
        "schedule": {"name": "steps", "at": (steps * 2 // 5, steps * 4 // 5), "divide": 10.0},
        "steps": steps,
        "select": "test/R@1",
        "evaluate": dict(evaluate),
    }


# Proxy-Anchor: epochs between two steps of the rate, and the K of R@K, as in the official code.
_PA_INTERVALS = {
    ("cub200", "bn_inception"): 10,
    ("cub200", "resnet50"): 5,
    ("cars196", "bn_inception"): 20,
    ("cars196", "resnet50"): 10,
    ("sop", "bn_inception"): 20,
    ("inshop", "bn_inception"): 20,
}
_PA_KS = {"sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 40)}


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
    check_choice("dataset", dataset, dict.fromkeys(name for name, _ in _PA_INTERVALS))
    check_choice("net", net, [n for name, n in _PA_INTERVALS if name == dataset])
    is_resnet, is_large = net == "resnet50", dataset in _PA_KS
    interval = _PA_INTERVALS[dataset, net]
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
        "evaluate": {"every": "1 epoch", "ks": _PA_KS.get(dataset, (1, 2, 4, 8))},
    }
    if is_large:
        config["evaluate"]["clustering"] = None
    else:
        config["net"]["norm"] = "frozen_batch_norm"
    return config
