"""MNIST in a plane by the contrastive loss, after a blog post, with a movie of how it gets there.

    python -m dmljax.main --config=configs/mnist_contrastive.py --config.dataset.root=mnist
    python -m dmljax.main --config=configs/mnist_contrastive.py:labels=159 ...

`labels` are the digits to keep, in both halves. The post shows all of them, 159, and 125689, for
ten epochs each; frames of the test half (`frames/`, `movie.gif`) every 1,000 steps. It has
no numbers, only pictures. Here R@1, the other
scores and the accuracy of five nearest neighbours among the training images (`knn`) come with it.

The form is the faithful one, with the formula of the post's code, not of its text, whose sign is
wrong: sums over pairs of row i of the batch's first half and row i of the second, d^2 of positives
and [1 - d]+^2 of negatives. The post halves both, which Adam's steps do not see. Distances have a
finite gradient where two embeddings are one point, which there is NaN.

The four idx files of MNIST are in the folder `root`; `--config.dataset.source=tfds` reads TFDS's.
"""

from ml_collections import ConfigDict

from dmljax.train.config import arguments


def get_config(arg: str | None = None) -> ConfigDict:
    labels = arguments(arg, labels="0123456789")["labels"]
    if not labels.isdecimal():
        raise ValueError(f"labels are digits, such as 159, not {labels!r}")
    return ConfigDict(
        {
            "dataset": {"name": "mnist", "root": None, "classes": [int(c) for c in labels]},
            "transform": "unchanged",
            "eval_transform": "unchanged",
            "normalize": "unit",
            "sampler": {"name": "uniform", "batch_size": 16},
            "net": {"name": "lecun", "dim": None},
            "method": {"name": "pairs", "dim": 2, "normalized": False, "unit": False},
            "loss": {
                "name": "contrastive",
                "neg_margin": 1.0,
                "power": 2.0,
                "distance_fn": "euclidean",
                "reduce_fn": "sum",
            },
            "miner": "halves",
            "optimizer": {"name": "adam", "rate": 1e-3},
            "schedule": "constant",
            "steps": "10 epochs",
            "log_every": 100,
            "evaluate": {"every": 1000, "ks": (1, 2, 4, 8), "knn": 5, "frames": True},
            "runtime": {"cache": True},
        }
    )
