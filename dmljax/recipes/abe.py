"""The attention-based ensemble (ABE) of Kim et al., ECCV 2018."""

from __future__ import annotations

from typing import Any

from dmljax.recipes.checks import check_choice

__all__ = ["abe"]

# Per data set: steps between evaluations, and the K of R@K.
_EVALUATE: dict[str, dict[str, Any]] = {
    "cub200": {"every": 1000, "ks": (1, 2, 4, 8)},
    "cars196": {"every": 1000, "ks": (1, 2, 4, 8)},
    "sop": {"every": 5000, "ks": (1, 10, 100, 1000)},
    "inshop": {"every": 5000, "ks": (1, 10, 20, 30, 40, 50)},
}


def abe(
    *,
    dataset: str = "cub200",
    learners: int = 8,
    heads: bool = False,
    divergence: float | None = None,
    dim: int = 512,
    pairs: str = "drawn",
) -> dict[str, Any]:
    """Attention-based ensemble (Kim et al., 2018): `learners` learners share `dim` dimensions.

    * `heads=True` is the paper's control: separate heads without attention.
    * `divergence`: weight of the divergence loss; 1 by default, 0 for heads, as in the paper.
    * `pairs="drawn"` compares the 32 pairs that the sampler drew; `"all"` compares every pair of
      the batch. The paper does not say which of the two it does.

    The paper gives: batches of 64 with as many positive as negative pairs, SGD with momentum 0.9,
    margins of 1, divergence weight 1, 512 dimensions in total, crops of 224. It gives no learning
    rate, no decay and no length of training: the rate (ten times higher for new layers) and the
    20,000 steps are guesses that no run on these sets has tested. A public Keras port uses Adam at
    1e-5, 8,000 steps and 8 classes of 10 images.

    This is the corrected form: only negatives are pushed apart, and the divergence is between
    the learners of one image, whatever its label. The authors' code is not public. Their numbers
    are the best of several evaluations on the test classes; this recipe takes the last step, and
    `--config.select=test/R@1` takes the best.

    The weights are Caffe's GoogLeNet, which is another net than torchvision's. They also initialize
    the attention's copy of the stages 4a to 4e. docs/weights.md says how to get them.
    """
    check_choice("dataset", dataset, _EVALUATE)
    if divergence is None:
        divergence = 0.0 if heads else 1.0
    return {
        "dataset": {"name": dataset},
        "transform": "abe_train",
        "eval_transform": "abe_eval",
        "sampler": {"name": "abe_pairs", "batch_size": 64},
        "net": {"name": "googlenet"},
        "method": {
            "name": "abe",
            "learners": learners,
            "dim": dim,
            "heads": heads,
            "lambda_div": divergence,
            "margin_div": 1.0,
            "divergence_pairs": "sum",
            "pairs": pairs,
            "split": ("pool3", "4a"),
            "attention": "4e",
            "mask": "sigmoid",
        },
        "loss": {"name": "dmljax.methods.abe:contrastive", "margin": 1.0},
        "optimizer": {
            "name": "sgd",
            "momentum": 0.9,
            "rate": 1e-4,
            "groups": ({"path": "^net/(masks|embedding)", "factor": 10.0},),
        },
        "schedule": "constant",
        "steps": 20000,
        "evaluate": dict(_EVALUATE[dataset]),
    }
