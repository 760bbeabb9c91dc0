"""The five methods on one file of small images, with equal steps, against the method `pairs`.

    dmljax study run studies/five_methods.py:data=omniglot8,size=64

omniglot8.npz lies in the current folder, or `--config.dataset.path=FILE` says where; it has images,
labels, class_names and class_is_test. All rows have one net of five 3x3 convolutions whose last map
is 4 x 4 and is flattened, 64 dimensions, batches of 128 images, AdamW at 3e-3 falling by a cosine,
and one distortion. `docs/results.md` has the tables of two sets.
"""

from __future__ import annotations


def get_study(data: str = "images", size: int = 32, steps: int = 300, seeds: int = 5):
    multi_similarity = {
        "loss": {"name": "multi_similarity"},
        "miner": {"name": "multi_similarity", "epsilon": 0.1},
    }
    flat = {"dim": 64, "pool_fn": "flatten"}
    distortion = {"name": "distort", "rotation": 10, "shear": 0.15, "scale": (0.85, 1.15)}
    distortion |= {"shift": size // 16, "invert": 0, "noise": 0, "outside": "nearest"}
    return {
        "title": f"Five methods on {data}, {steps} steps",
        "base": "glyphs",
        "all": {
            "dataset": {"name": "npz", "path": f"{data}.npz"},
            "transform": distortion,
            "net.strides": (2, 1, 2, 1, 2) if size <= 32 else (2, 2, 2, 1, 2),
            "optimizer.decay": 1e-2,
            "steps": steps,
            "evaluate.every": steps,
            "pictures": None,
        },
        "rows": {
            "pairs": {"method": {"name": "pairs", **flat}, **multi_similarity},
            "proxies": {
                "argument": "loss=proxy_anchor",
                "method.pool_fn": "flatten",
            },
            "graph": {
                "method": {
                    "name": "graph",
                    "attention_fn": {"name": "gatv2", "sublayers": 2},
                    "heads": 4,
                    "neck": True,
                    **flat,
                },
                "loss": {"name": "label_smoothed_cross_entropy"},
            },
            "DVML": {
                "method": {
                    "name": "dvml",
                    "samples": 4,
                    "phase_at": 0,
                    # The published weights are for sums of triplets: larger than this loss.
                    "lambdas": ((1e-3, 1e-2, 0.1, 1),) * 2,
                    **flat,
                },
                "loss": {"name": "multi_similarity"},
            },
            "ABE, 4 learners": {
                "method": {
                    "name": "abe",
                    "learners": 4,
                    "split": ["conv3", "conv4"],
                    "attention": "conv4",
                    "lambda_div": 0.1,
                    **flat,
                },
                **multi_similarity,
            },
        },
        "seeds": seeds,
        "baseline": "pairs",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
