"""Your own images: a folder for each class.

    python -m dmljax.main --config=configs/folder.py --config.dataset.root=photos/

With published ImageNet weights, which such a run should have, add
`--config.net.weights=resnet50.safetensors`, and `--config.net.frozen=True` for batch norm as it is.

Half of the classes (in the order of their names) are for training; the scores are of the others. A
ResNet-50 (docs/weights.md says where published weights are) and a multi-similarity loss on batches
of 16 classes x 4 images. No result is promised: it depends on the images.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "dataset": {"name": "folder", "root": "photos", "split": 0.5},
            "transform": {"name": "standard_train", "size": 224},
            "eval_transform": {"name": "standard_eval", "size": 224},
            "normalize": "imagenet",
            "sampler": {"name": "plan", "classes": 16, "per_class": 4},
            "net": {"name": "resnet50", "weights": None},
            "method": {"name": "pairs", "dim": 512},
            "loss": {"name": "multi_similarity"},
            "miner": {"name": "multi_similarity", "epsilon": 0.1},
            "optimizer": {
                "name": "adam",
                "rate": 1e-4,
                "decay": 1e-4,
                "groups": [{"path": "^net/", "factor": 0.1}],
            },
            "schedule": {"name": "cosine", "warmup": 50},
            "steps": "30 epochs",
            "evaluate": {"every": "5 epochs", "batch_size": 64},
            "runtime": {"unreadable": "skip"},
        }
    )
