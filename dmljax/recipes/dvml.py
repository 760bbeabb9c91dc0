"""Deep variational metric learning (DVML) of Lin et al., ECCV 2018."""

from __future__ import annotations

from typing import Any, NamedTuple

from dmljax.recipes.checks import check_choice

__all__ = ["dvml"]


class _DataSet(NamedTuple):
    dim: int  # of `mode="seed"` and `mode="report"`
    rate: float
    decay: float
    l2_weight: float  # of n-pairs
    evaluate: dict[str, Any]


_FEW = {"every": 200, "ks": (1, 2, 4, 8)}
_MANY = {"every": 200, "ks": (1, 2, 4, 8, 16, 32)}
# Clustering 11,316 classes takes long.
_SOP = {"every": 1000, "ks": (1, 10, 100), "clustering": "end"}
_SETS = {
    "cub200": _DataSet(dim=256, rate=6e-5, decay=1e-3, l2_weight=1.5e-2, evaluate=_FEW),
    "cars196": _DataSet(dim=128, rate=7e-5, decay=5e-3, l2_weight=3e-3, evaluate=_MANY),
    "sop": _DataSet(dim=128, rate=7e-5, decay=5e-3, l2_weight=3e-3, evaluate=_SOP),
}


class _Phases(NamedTuple):
    lambdas: tuple[tuple[float, ...], tuple[float, ...]]  # the four weights in phase 1 and phase 2
    phase_at: int  # the step at which phase 2 begins
    steps: int


_PAPER_LAMBDAS = ((1.0, 1.0, 0.1, 1.0), (0.8, 1.0, 0.2, 0.8))
_CODE_LAMBDAS = ((1.0, 0.5, 0.5, 1.0), (0.8, 1.0, 0.4, 0.8))
_EQUAL_LAMBDAS = ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0))
_PAPER = _Phases(_PAPER_LAMBDAS, phase_at=1500, steps=6000)
_EXPERIMENTS = {
    1: _Phases(_CODE_LAMBDAS, phase_at=1600, steps=3200),
    2: _Phases(_PAPER_LAMBDAS, phase_at=1600, steps=3200),
    3: _Phases(_EQUAL_LAMBDAS, phase_at=0, steps=3000),
}


def dvml(
    *,
    dataset: str = "cars196",
    mode: str = "paper",
    loss: str = "triplet",
    experiment: int = 1,
    baseline: bool = False,
    code_lrn: bool = False,
) -> dict[str, Any]:
    """Deep variational metric learning (Lin et al., 2018); `loss`: triplet, npair or dws.

    `loss="dws"` is the triplet loss with distance-weighted sampling.

    * `mode="paper"`: the paper's form, corrected: the KL divergence has the right sign, and samples
      carry a gradient. The paper gives Adam at 1e-4, 512 dimensions, 20 samples, the lambdas,
      batches of 128 (120 for triplets). It gives neither the margins, nor the length of training,
      nor the step at which phase 2 begins, nor how triplets are chosen. Taken here: a margin of 1
      on squared distances with semi-hard negatives, and the steps of public code; for `loss="dws"`
      a margin of 0.2 on distances between unit vectors. The authors' code is not public.
    * `mode="seed"`: what a public code computes, which differs from its report: no gradient of the
      decoder ever reaches the embedding, and decay is part of the loss (`dmljax.methods.dvml`).
      `experiment` selects its lambdas: 1 its own, 2 the paper's, 3 all equal to 1 in a single phase
      of 3,000 steps. That code chose the step with the best NMI on the test classes and skipped
      steps with a NaN. This recipe takes the last step, and a NaN ends the run.
      `--config.select=test/NMI` chooses as that code does.
    * `mode="report"`: what that report describes, with the same three experiments: layers without
      batch norms, the mean norm of the reconstruction's gap, a decoder that is frozen in phase 1,
      and whose gradient reaches the embedding in phase 2. No decay. The rates are the code's.
    * `baseline=True` is the control of each mode: the same without the variational part. Layer,
      batch norm, decay inside the loss and probe stay.
    * `code_lrn=True` uses that code's response normalization over 11 channels, with which the
      pretrained weights were not trained.

    The weights are Caffe's GoogLeNet, which is another net than torchvision's: docs/weights.md.
    """
    check_choice("dataset", dataset, _SETS)
    check_choice("mode", mode, ("paper", "seed", "report"))
    check_choice("loss", loss, ("triplet", "npair", "dws"))
    check_choice("experiment", experiment, _EXPERIMENTS)
    numbers, paper = _SETS[dataset], mode == "paper"
    dim, rate = (512, 1e-4) if paper else (numbers.dim, numbers.rate)
    phases = _PAPER if paper else _EXPERIMENTS[experiment]
    method: dict[str, Any] = {"name": "dvml", "mode": mode, "baseline": baseline, "dim": dim}
    method |= {"lambdas": phases.lambdas, "phase_at": phases.phase_at}
    method |= {"decay": numbers.decay} if mode == "seed" else {}
    losses = {
        "triplet": {"name": "semihard_triplet", "margin": 1.0},
        "npair": {"name": "dmljax.methods.dvml:n_pairs", "l2_weight": numbers.l2_weight},
        "dws": {"name": "triplet", "margin": 0.2},
    }
    net: dict[str, Any] = {"name": "googlenet"}
    if code_lrn:
        net |= {"lrn_size": 11, "lrn_alpha": 1.1e-3}
    sampler: dict[str, Any] = {"name": "n_pairs", "classes": 64}
    if paper and loss != "npair":
        sampler = {"name": "plan", "classes": 60, "per_class": 2}
    # That code has three optimizers. One Adam takes the same steps, because no gradient of a part
    # reaches the parameters of another part, except in `mode="report"`.
    part_rates = [{"path": "^probe/", "factor": 1e-3 / rate}]
    if not baseline:
        part_rates.insert(0, {"path": "^decoder/", "factor": 1e-2 / rate})
    return {
        "dataset": {"name": dataset},
        "transform": "dvml_train",
        "eval_transform": "dvml_eval",
        "sampler": sampler,
        "net": net,
        "method": method,
        "loss": losses[loss],
        "miner": {"name": "distance_weighted", "dim": dim} if loss == "dws" else None,
        "optimizer": {"name": "adam", "rate": rate, "groups": [] if paper else part_rates},
        "schedule": "constant",
        "steps": phases.steps,
        # NMI as published: of the k-means start with the least inertia of ten (scikit-learn).
        "evaluate": {"starts": 10, "seeds": (0,), **numbers.evaluate},
    }
