"""TinyImageNet: triplets with mined pairs against ArcFace, a review of pytorch-metric-learning.

    python -m dmljax.main --config=configs/tinyimagenet.py --config.dataset.root=DIR \\
        --config.net.weights=resnet50.safetensors
    python -m dmljax.main --config=configs/tinyimagenet.py:loss=arcface ...

Both halves have the same 200 classes: this is retrieval of known classes. Expected are orders only,
as the review (pento.ai, 2022) has plots without numbers: triplets lead in AMI and NMI, ArcFace in
mAP, MAP@R, MRR, P@1 and RP. Not run at full size here yet.

Neither form can be called faithful: the review leaves too much open.
It gives a ResNet-50, 512 dimensions, the multi-similarity miner, Adam, batches of 64 by
class, and 150 epochs of 100,000 images. It does not give rates, margins, images per class nor
crops; taken here: those of the library's example (1e-5 for the net, 1e-4 for the head, decay 1e-4,
4 images of a class, crops of 64) and its default margins and scale. ArcFace's class vectors have
100 times the head's rate. The miner is for triplets alone.

Frames of the embedding (`frames/`, `movie.gif`) are drawn at every evaluation. The weights are
torchvision's V1 (docs/weights.md).
"""

from ml_collections import ConfigDict

from dmljax.train.config import arguments


def get_config(arg: str | None = None) -> ConfigDict:
    loss = arguments(arg, loss="triplet")["loss"]
    if loss not in ("triplet", "arcface"):
        raise ValueError(f"loss is triplet or arcface, not {loss!r}")
    triplet = loss == "triplet"
    groups = [{"path": "^net/", "factor": 0.1}]
    if not triplet:
        groups.append({"path": "^proxies", "factor": 100.0, "decay": 0.0})
    return ConfigDict(
        {
            "dataset": {"name": "tiny_imagenet", "root": None},
            "transform": {"name": "small_train", "size": 64},
            "eval_transform": {"name": "small_eval", "size": 64},
            "normalize": "imagenet",
            "sampler": {"name": "plan", "classes": 16, "per_class": 4},
            "net": {"name": "resnet50", "weights": None},
            "method": {"name": "pairs" if triplet else "proxies", "dim": 512},
            "loss": {"name": "triplet", "margin": 0.05}
            if triplet
            else {"name": "arcface", "margin": 28.6, "scale": 64.0},
            "miner": {"name": "multi_similarity", "epsilon": 0.1} if triplet else None,
            "optimizer": {
                "name": "adam",
                "rate": 1e-4,
                "decay": 1e-4,
                "groups": groups,
            },
            "schedule": "constant",
            "steps": "150 epochs",
            "evaluate": {"every": "5 epochs", "ks": (1, 2, 4, 8), "frames": True},
        }
    )
