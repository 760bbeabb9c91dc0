"""The multi-similarity loss (Wang et al., CVPR 2019) on BN-Inception: a strong baseline."""

from typing import Any

from dmljax.recipes.arguments import check_choice

_LARGE = {"every": 1000, "clustering": None}
# Steps, and the evaluation.
_VALUES: dict[str, tuple[int, dict[str, Any]]] = {
    "cub200": (3000, {"every": 200, "ks": (1, 2, 4, 8, 16, 32)}),
    "cars196": (6000, {"every": 200, "ks": (1, 2, 4, 8)}),
    "sop": (40000, {**_LARGE, "ks": (1, 10, 100, 1000)}),
    "inshop": (40000, {**_LARGE, "ks": (1, 10, 20, 30, 40, 50)}),
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
    check_choice("dataset", dataset, _VALUES)
    steps, evaluate = _VALUES[dataset]
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
