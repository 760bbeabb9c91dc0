"""The attention-based ensemble (ABE) of Kim et al., ECCV 2018."""

from typing import Any

from dmljax.hints import check_all
from dmljax.recipes.arguments import check_choice
from dmljax.recipes.backbones import split_of, with_net

# Caffe's GoogLeNet from the first possible branch on.
_STAGES = ("pool2", "3a", "3b", "pool3", "4a", "4b", "4c", "4d", "4e", "pool4", "5a", "5b")

# Per data set: steps between evaluations, and the K of R@K.
_EVALUATE: dict[str, dict[str, Any]] = {
    "cub200": {"every": 1000, "ks": (1, 2, 4, 8)},
    "cars196": {"every": 1000, "ks": (1, 2, 4, 8)},
    # The tables have no NMI on these sets, and thousands of clusters take long.
    "sop": {"every": 5000, "ks": (1, 10, 100, 1000), "clustering": None},
    "inshop": {"every": 5000, "ks": (1, 10, 20, 30, 40, 50), "clustering": None},
}


def abe(
    *,
    dataset: str = "cub200",
    learners: int = 8,
    heads: bool = False,
    divergence: float | None = None,
    dim: int = 512,
    pairs: str = "drawn",
    branch: str = "pool3",
    blocks: int = 5,
    crop: bool = False,
    ranking: str = "squared",
    net: str | None = None,
) -> dict[str, Any]:
    """Trains an attention-based ensemble (Kim et al., 2018) whose learners share `dim` dimensions.

    * `heads=True` is the paper's control: separate heads without attention.
    * `divergence`: weight of the divergence loss; 1 by default, 0 for heads, as in the paper.
    * `pairs="drawn"` compares the 32 pairs that the sampler drew; `"all"` compares every pair of
      the batch. The paper does not say which of the two it does.
    * `branch`: the last stage that all learners share (figure 7b of the paper): pool2, 3a, pool3,
      4a or 4b. `blocks`: inception blocks of the attention behind it (figure 7a), 5 in all tables.
      Pools between them are left out, so that masks keep the size of the map.
    * `crop=True` (CUB and Cars) cuts images to the published boxes (table 5).
    * `ranking="squared"` ranks by the mean of the learners' squared distances, as the concatenated
      embedding does. `ranking="distance"` also scores the ranking by the mean of the distances
      themselves, which the text of the paper defines, as "mean_distance/R@1" and so on.

    * `net`: published weights of a transformer or a ConvNeXt (`dmljax weights`) in place of
      GoogLeNet, which the paper has. The learners share the first half of a transformer's blocks,
      and the attention has a quarter of them; all learn at 1e-5 by Adam. These are guesses.

    The paper gives: batches of 64 with equal numbers of positive and negative pairs, SGD with
    momentum 0.9, margins of 1, divergence weight 1, 512 dimensions in total, crops of 224. It gives
    no learning rate, no decay and no length of training: the rate (ten times higher for new layers)
    and the 20,000 steps are guesses that no run on these sets has tested. If you add a decay, use
    `--config.optimizer.l2=...`: Caffe adds it to the gradient. A public Keras port uses Adam at
    1e-5, 8,000 steps and 8 classes of 10 images.

    This is the corrected form: only negatives are pushed apart, and the divergence is between
    the learners of one image, whatever its label. The authors' code is not public. Their numbers
    are the best of several evaluations on the test classes; this recipe takes the last step, and
    `--config.select=test/R@1` takes the best.

    The weights are Caffe's GoogLeNet, which is another net than torchvision's. They also initialize
    the attention's copy of the stages 4a to 4e. docs/weights.md says how to get them.
    """
    check_choice("dataset", dataset, _EVALUATE)
    check_choice("branch", branch, ("pool2", "3a", "pool3", "4a", "4b"))
    check_choice("pairs", pairs, ("drawn", "all"))
    check_choice("ranking", ranking, ("squared", "distance"))
    problems = {
        f"crop=True needs published boxes, which cub200 and cars196 have, not {dataset}": (
            crop and dataset not in ("cub200", "cars196")
        ),
        "branch and blocks are stages of GoogLeNet: leave them out with net=...": (
            net is not None and (branch, blocks) != ("pool3", 5)
        ),
    }
    check_all(problems)
    behind = _STAGES[_STAGES.index(branch) + 1 :]
    inceptions = [stage for stage in behind if not stage.startswith("pool")]
    check_choice("blocks", blocks, range(1, min(7, len(inceptions)) + 1))
    last = inceptions[blocks - 1]
    passes_pools = any(stage.startswith("pool") for stage in behind[: behind.index(last)])
    if divergence is None:
        divergence = 0.0 if heads else 1.0
    config: dict[str, Any] = {
        "dataset": {"name": dataset} | ({"crop": True} if crop else {}),
        "transform": "abe_train",
        "eval_transform": "abe_eval",
        "sampler": {"name": "abe_pairs", "batch_size": 64},
        "net": {"name": "googlenet"},
        "method": {
            "name": "abe",
            "learners": learners,
            "dim": dim,
            "lambda_div": divergence,
            "divergence_fn": {"name": "divergence", "margin": 1.0},
            "pairs_fn": "drawn_pairs" if pairs == "drawn" else None,
            "split": (branch, behind[0]),
            # The last stage of the attention; without attention every learner has its own head.
            "attention": None if heads else last,
            "attention_pools": not passes_pools,
            "mask_fn": "sigmoid",
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
        "evaluate": {
            **_EVALUATE[dataset],
            "rankings": ("mean_distance",) if ranking == "distance" and learners > 1 else (),
        },
    }
    if net is not None:
        config = with_net(config, net)
        split, last = split_of(config["net"])
        config["method"] |= {
            "split": split,
            "attention": None if heads else last,
            "attention_pools": True,
        }
    return config
