"""Systems of blog posts: MNIST in a plane, and TinyImageNet (pento.ai, 2022)."""

import copy
from typing import Any

from dmljax.hints import check_all
from dmljax.recipes.arguments import check_choice

_CONTRASTIVE = {"name": "contrastive", "neg_margin": 1.0, "power": 2.0}
_TRIPLET = {"name": "triplet", "margin": 1.0}
_LOSSES: dict[str, dict[str, Any]] = {
    "contrastive": {
        "loss": {**_CONTRASTIVE, "distance_fn": "euclidean", "reduce_fn": "sum"},
        "miner": "across_halves",
    },
    "triplet": {
        "loss": {**_TRIPLET, "distance_fn": "squared_euclidean", "reduce_fn": "sum"},
        "miner": "next_in_batch",
    },
}


def mnist(
    *,
    loss: str = "contrastive",
    labels: str = "0123456789",
    positive_weight: float = 0.5,
    repeat_frames: int = 2,
    repeat_last: int = 30,
) -> dict[str, Any]:
    """Embeds MNIST in a plane by contrastive or triplet loss; `labels` are the digits to keep.

    The post trains ten epochs on all digits, on 159 and on 125689, and shows pictures but no
    numbers. Here R@1, the other scores and the accuracy of the five nearest training images (`knn`)
    come with the pictures: a frame of the test images every 1,000 steps (`frames/`, `movie.gif`).

    The recipe follows the code of the post.

    * `loss="contrastive"`: the formula of the post's code; the sign in its text is wrong. The sum
      goes over pairs of row i of the batch's first half and row i of its second: d^2 of positives
      and [1 - d]+^2 of negatives. The post halves both, which does not change Adam's steps.
      Distances have a finite gradient where two embeddings coincide; there the post's are NaN.
      `positive_weight` is the fraction of the first sum; the second has the rest.
    * `loss="triplet"`: the sum over at most one triplet for each row, with the first positive and
      the first negative behind it in the batch, [d_ap^2 - d_an^2 + 1]+, as in the post's code (its
      text omits the squares). The loss of a batch without a triplet is 0; the post's code fails on
      it.

    `repeat_frames` and `repeat_last`: tenths of a second for which the movie shows a frame, and the
    last one. The post's movies repeat frames of a tenth of a second twice, and the last 30 times.

    The four idx files of MNIST are in the folder `root`; `--config.dataset.source=tfds` reads those
    of TFDS.
    """
    check_choice("loss", loss, _LOSSES)
    problems = {
        f"positive_weight is a fraction from 0 to 1, not {positive_weight}": (
            not 0 <= positive_weight <= 1
        ),
        "positive_weight is of loss=contrastive": positive_weight != 0.5 and loss == "triplet",
        f"labels are digits, such as 159, not {labels!r}": not labels.isdecimal(),
    }
    check_all(problems)
    terms = copy.deepcopy(_LOSSES[loss])
    if positive_weight != 0.5:
        terms["loss"] |= {"pos_weight": 2 * positive_weight, "neg_weight": 2 - 2 * positive_weight}
    return {
        "dataset": {"name": "mnist", "root": None, "classes": [int(c) for c in labels]},
        "transform": "unchanged",
        "eval_transform": "unchanged",
        "normalize": "unit",
        "sampler": {"name": "uniform", "batch_size": 16},
        "net": {"name": "lecun", "dim": None},
        "method": {"name": "pairs", "dim": 2, "normalized": False, "unit": False},
        **terms,
        "optimizer": {"name": "adam", "rate": 1e-3},
        "schedule": "constant",
        "steps": "10 epochs",
        "log_every": 100,
        "evaluate": {"every": 1000, "ks": (1, 2, 4, 8), "knn": 5},
        "pictures": {
            "name": "movie",
            "frame_ms": 100 * repeat_frames,
            "last_frame_ms": 100 * repeat_last,
        },
        "runtime": {"cache": True},
    }


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
