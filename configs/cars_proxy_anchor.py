"""Cars196 with the proxy anchor loss (Kim et al., CVPR 2020).

    python -m dmljax.main --config=configs/cars_proxy_anchor.py --config.dataset.root=DIR \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, Proxy-Anchor-CVPR2020):

    argument        R@1   R@2   R@4   R@8
                    86.4  91.9  95.0  97.0
    net=resnet50    87.7  92.7  95.5  97.3

These are above the paper's own, which had smaller batches. The official code evaluates after every
epoch on the test classes and reports the best; this config does the same.

Taken from that code: AdamW, everything decays, proxies at 100 times the rate, the rate times 0.5
every 20 (ResNet-50: 10) epochs, mean and maximum pooled and added, random batches,
batch norms that stay as they were pretrained.
The form is the faithful one, but for two things.
Other than there, the first epoch warms up the rate instead of training only what is new, and
gradients are not clipped at 10. Its rows are of single runs. Not run at full size here yet.

The weights of BN-Inception were converted from Caffe (docs/weights.md), hence the means. Those of
ResNet-50 are torchvision's V1.
"""

from ml_collections import ConfigDict

from dmljax.train.config import arguments


def get_config(arg: str | None = None) -> ConfigDict:
    net = arguments(arg, net="bn_inception")["net"]
    if net not in ("bn_inception", "resnet50"):
        raise ValueError(f"net is bn_inception or resnet50, not {net!r}")
    caffe = net == "bn_inception"
    every = 20 if caffe else 10  # epochs
    return ConfigDict(
        {
            "dataset": {"name": "cars196", "root": None},
            "transform": {"name": "standard_train", "size": 224},
            "eval_transform": {"name": "standard_eval", "size": 224},
            "normalize": "caffe_bn" if caffe else "imagenet",
            "sampler": {"name": "uniform", "batch_size": 180 if caffe else 120},
            "net": {"name": net, "frozen": True, "weights": None},
            "method": {"name": "proxies", "dim": 512, "pool": "mean_max"},
            "loss": {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0},
            "optimizer": {
                "name": "adam",
                "rate": 1e-4,
                "decay": 1e-4,
                "groups": [
                    {"path": "^proxies", "factor": 100.0, "decay": 1e-4},
                    {"path": ".", "decay": 1e-4},
                ],
            },
            "schedule": {
                "name": "steps",
                "at": [f"{epoch} epochs" for epoch in range(every, 60, every)],
                "divide": 2.0,
                "warmup": "1 epoch" if caffe else "5 epochs",
            },
            "steps": "60 epochs",
            "select": "test",
            "evaluate": {"every": "1 epoch", "ks": (1, 2, 4, 8), "clustering": True},
        }
    )
