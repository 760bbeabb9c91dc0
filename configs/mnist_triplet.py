"""MNIST in a plane by the triplet loss, after a blog post, with a movie of how it gets there.

    python -m dmljax.main --config=configs/mnist_triplet.py --config.dataset.root=mnist
    python -m dmljax.main --config=configs/mnist_triplet.py:labels=159 ...

`labels` are the digits to keep, in both halves. The post shows all of them, 159, and 125689, for
ten epochs each; frames of the test half (`frames/`, `movie.gif`) every 1,000 steps. It has
no numbers, only pictures, and finds triplets no better. Here R@1, the other
scores and the accuracy of five nearest neighbours among the training images (`knn`) come with it.

The form is the faithful one: a sum over at most one triplet for each row, with the first positive
and the first negative behind it in the batch, [d_ap^2 - d_an^2 + 1]+, as the post's code has it
(its text forgets the squares). A batch without any triplet, at which that code stops, counts 0.

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
                "name": "triplet",
                "margin": 1.0,
                "distance_fn": "squared_euclidean",
                "reduce_fn": "sum",
            },
            "miner": "following",
            "optimizer": {"name": "adam", "rate": 1e-3},
            "schedule": "constant",
            "steps": "10 epochs",
            "log_every": 100,
            "evaluate": {"every": 1000, "ks": (1, 2, 4, 8), "knn": 5, "frames": True},
            "runtime": {"cache": True},
        }
    )
