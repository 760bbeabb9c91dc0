"""TinyImageNet: triplets with mined pairs against ArcFace, as in a review of 2022."""

from typing import Any

from dmljax.recipes.arguments import check_choice


def tinyimagenet(*, loss: str = "triplet") -> dict[str, Any]:
    """Trains a ResNet-50 for retrieval of 200 known classes by `loss` triplet or arcface.

    Both halves have the same classes: this is retrieval of known classes. Neither form can be
    called faithful: the review (pento.ai, 2022) gives a ResNet-50, 512 dimensions, the
    multi-similarity miner, Adam, batches of 64 by class, and 150 epochs of 100,000 images. It does
    not give rates, margins, images per class or crops. This recipe takes them from the example of
    pytorch-metric-learning: 1e-5 for the net, 1e-4 for the head, a coupled decay of 1e-4 on all
    parameters as in PyTorch's Adam, 4 images of a class, crops of 64, and its default margins and
    scale. ArcFace's class vectors learn at 100 times the rate of the head, without decay. Only
    triplets have a miner.

    Frames of the embedding (`frames/`, `movie.gif`) are drawn at every evaluation, and 2,000 images
    go to TensorBoard's projector. The weights are torchvision's ResNet-50 V1: docs/weights.md.
    """
    check_choice("loss", loss, ("triplet", "arcface"))
    groups: list[dict[str, Any]] = [{"path": "^net/", "factor": 0.1}]
    if loss == "triplet":
        method, function = "pairs", {"name": "triplet", "margin": 0.05}
        miner = {"name": "multi_similarity", "epsilon": 0.1}
    else:
        method, function = "proxies", {"name": "arcface", "margin": 28.6, "scale": 64.0}
        miner = None
        groups.append({"path": "^proxies", "factor": 100.0, "l2": 0.0})
    return {
        "dataset": {"name": "tiny_imagenet", "root": None},
        "size": 64,
        "transform": "small_train",
        "eval_transform": "small_eval",
        "sampler": {"name": "class_balanced", "classes": 16, "per_class": 4},
        "net": {"name": "resnet50", "weights": None},
        "method": {"name": method, "dim": 512},
        "loss": function,
        "miner": miner,
        "optimizer": {"name": "adam", "rate": 1e-4, "l2": 1e-4, "groups": groups},
        "schedule": "constant",
        "steps": "150 epochs",
        "evaluate": {"every": "5 epochs", "ks": (1, 2, 4, 8), "depth": "max_bin_count"},
        "pictures": {"name": "movie", "projector": 2000},
    }
