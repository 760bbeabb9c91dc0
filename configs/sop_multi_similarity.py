"""Stanford Online Products with the multi-similarity loss (Wang et al., CVPR 2019).

    python -m dmljax.main --config=configs/sop_multi_similarity.py --config.dataset.root=DIR \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions: R@1 78.2, as collections of results quote the paper; the
rest of its row could not be checked here.

The official code has a config for CUB-200-2011 alone, which `cub_multi_similarity.py` follows. Here
its loss, miner, rate and batches are kept; the length is a guess that no run has tried.
The form is the faithful one.
Not run at full size here yet. The official code reports the best of its evaluations on the test
classes, one in 200 steps; this config has one in 1,000.

The weights of BN-Inception were converted from Caffe (docs/weights.md), hence the means.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "dataset": {"name": "sop", "root": None},
            "transform": {"name": "standard_train", "size": 227},
            "eval_transform": {"name": "standard_eval", "size": 227},
            "normalize": "caffe_bn",
            "sampler": {"name": "plan", "classes": 16, "per_class": 5},
            "net": {"name": "bn_inception", "frozen": True, "weights": None},
            "method": {"name": "pairs", "dim": 512},
            "loss": {"name": "multi_similarity", "alpha": 2.0, "beta": 40.0, "base": 0.5},
            "miner": {"name": "multi_similarity", "epsilon": 0.1},
            "optimizer": {"name": "adam", "rate": 3e-5, "decay": 5e-4},
            "schedule": {"name": "steps", "at": (16000, 32000), "divide": 10.0},
            "steps": 40000,
            "select": "test",
            "evaluate": {"every": 1000, "ks": (1, 10, 100, 1000), "clustering": False},
        }
    )
