"""In-shop Clothes with the proxy anchor loss (Kim et al., CVPR 2020).

    python -m dmljax.main --config=configs/inshop_proxy_anchor.py --config.dataset.root=DIR \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, Proxy-Anchor-CVPR2020):

    R@1   R@10  R@20  R@30  R@40
    91.9  98.1  98.7  99.0  99.1

These are above the paper's own, which had smaller batches. The official code evaluates after every
epoch on the test classes and reports the best; this config does the same.

Taken from that code: AdamW, everything decays, proxies at 100 times the rate, the rate times 0.25
every 20 epochs, mean and maximum pooled and added, random batches.
The form is the faithful one, but for two things.
Other than there, the first epoch warms up the rate instead of training only what is new, and
gradients are not clipped at 10. Its rows are of single runs. Not run at full size here yet.

The weights of BN-Inception were converted from Caffe (docs/weights.md), hence the means.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "dataset": {"name": "inshop", "root": None},
            "transform": {"name": "standard_train", "size": 224},
            "eval_transform": {"name": "standard_eval", "size": 224},
            "normalize": "caffe_bn",
            "sampler": {"name": "uniform", "batch_size": 180},
            "net": {"name": "bn_inception", "weights": None},
            "method": {"name": "proxies", "dim": 512, "pool": "mean_max"},
            "loss": {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0},
            "optimizer": {
                "name": "adam",
                "rate": 6e-4,
                "decay": 1e-4,
                "groups": [
                    {"path": "^proxies", "factor": 100.0, "decay": 1e-4},
                    {"path": ".", "decay": 1e-4},
                ],
            },
            "schedule": {
                "name": "steps",
                "at": [f"{epoch} epochs" for epoch in range(20, 60, 20)],
                "divide": 4.0,
                "warmup": "1 epoch",
            },
            "steps": "60 epochs",
            "select": "test",
            "evaluate": {"every": "1 epoch", "ks": (1, 10, 20, 30, 40), "clustering": False},
        }
    )
