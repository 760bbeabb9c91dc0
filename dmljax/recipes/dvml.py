"""Deep variational metric learning (DVML) of Lin et al., ECCV 2018."""

from typing import Any

from dmljax.recipes.arguments import check_choice
from dmljax.recipes.backbones import with_net

# NMI as published: k-means of scikit-learn, the lowest inertia of ten starts.
_NMI = {"name": "scikit_learn", "starts": 10, "seeds": (0,)}
_FEW = {"every": 200, "ks": (1, 2, 4, 8), "clustering": _NMI}
_MANY = {"every": 200, "ks": (1, 2, 4, 8, 16, 32), "clustering": _NMI}
# Clustering 11,316 classes takes long; with the starts of scikit-learn it would take hours.
_ONCE = {"name": "kmeans", "starts": 10, "seeds": (0,), "only_last": True}
_SOP = {"every": 1000, "ks": (1, 10, 100), "clustering": _ONCE}
# Dimensions, rate and decay of every mode but "paper"; the L2 weight of n-pairs; the evaluation.
_SETS: dict[str, Any] = {
    "cub200": (256, 6e-5, 1e-3, 1.5e-2, _FEW),
    "cars196": (128, 7e-5, 5e-3, 3e-3, _MANY),
    "sop": (128, 7e-5, 5e-3, 3e-3, _SOP),
}
_PAPER_LAMBDAS = ((1.0, 1.0, 0.1, 1.0), (0.8, 1.0, 0.2, 0.8))
_LAMBDAS = {
    1: ((1.0, 0.5, 0.5, 1.0), (0.8, 1.0, 0.4, 0.8)),
    2: _PAPER_LAMBDAS,
    3: ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)),  # a single phase
}
_PAPER: dict[str, Any] = {
    "norms": (),
    "activation_fn": "tanh",
    "decoder_norm": False,
    "samples": 20,
    "deviation_fn": "standard_deviation",
    "reconstruction_fn": "reconstruction_norm",
    "release": (False, True),  # the decoder's gradient reaches the embedding, in each phase
    "train_decoder": (True, True),
    "decay": 0.0,
    "probe": False,
}
_REPORT = {
    **_PAPER,
    "activation_fn": "relu",
    "samples": 1,
    "train_decoder": (False, True),
    "probe": True,
}
_CODE = {
    **_REPORT,
    "norms": ("norm", "norm_mean", "norm_log_variance"),
    "decoder_norm": True,
    "reconstruction_fn": "reconstruction_half_sum",
    "release": (False, False),
    "train_decoder": (True, True),
}


# The step at which phase 2 begins, the number of steps, and the arguments of the method.
_MODES: dict[str, Any] = {
    "paper": (1500, 6000, _PAPER),
    "code_1600": (1600, 3200, {**_CODE, "deviation_fn": "log_variance_as_deviation"}),
    "code_1200": (1200, 2400, _CODE),
    "report": (1600, 3200, _REPORT),
}


def dvml(
    *,
    dataset: str = "cars196",
    mode: str = "paper",
    loss: str = "triplet",
    experiment: int = 1,
    baseline: bool = False,
    code_lrn: bool = False,
    net: str | None = None,
) -> dict[str, Any]:
    """Trains by deep variational metric learning (Lin et al., 2018) with triplet, npair or dws.

    `loss="dws"` is the triplet loss with distance-weighted sampling.

    * `mode="paper"`: the paper's form, corrected: the KL divergence has the right sign, and samples
      carry a gradient. The paper gives Adam at 1e-4, 512 dimensions, 20 samples, the lambdas,
      batches of 128 (120 for triplets). It gives neither the margins, nor the length of training,
      nor the step at which phase 2 begins, nor how triplets are chosen. This recipe takes
      a margin of 1 on squared distances with semi-hard negatives, and the steps of public code;
      with `loss="dws"`, a margin of 0.2 on distances between unit vectors. The authors' code is not
      public.
    * `mode="code_1600"` and `mode="code_1200"`: two versions of a public code, written in one
      evening. They differ from the report of that code: no gradient of the decoder ever reaches the
      embedding, and decay is part of the loss (`dmljax.methods.dvml`).
      "code_1600" has 1,600 steps in each phase, as the report says, and multiplies the noise by the
      log variance: z_V = mean + log(variance) noise. "code_1200" has 1,200 steps in each phase and
      multiplies it by the standard deviation, exp(log(variance) / 2). It is not known which of the
      two made the published numbers; the plots of the report do not decide it.
      `experiment` selects the lambdas: 1 the code's own, 2 the paper's, 3 all equal to 1 in a
      single phase of 3,000 steps. That code chose the step with the best NMI on the test classes
      and skipped steps with a NaN. This recipe takes the last step, and a NaN ends the run.
      `--config.select=test/NMI` chooses as that code does.
    * `mode="report"`: what that report describes, with the same three experiments: layers without
      batch norms, the mean norm of the reconstruction's gap, a decoder that is frozen in phase 1,
      and whose gradient reaches the embedding in phase 2. No decay. Where the text is silent or
      differs, three things follow the code: crops are 227 pixels, the rates are the code's, and
      the softmax classifier is a probe that reads the features of the backbone, not the embedding,
      and trains nothing else. The published scores belong to the step with the best NMI on the
      test classes; this recipe takes the last step, and `--config.select=test/NMI` that one.
    * `baseline=True` is the control of each mode: the same without the variational part. Layer,
      batch norm, decay inside the loss and probe stay.
    * `code_lrn=True` uses that code's response normalization over 11 channels. The pretrained
      weights were trained without it.

    * `net`: published weights (`dmljax weights`) in place of GoogLeNet, such as dinov2_s14 or
      convnext_t. It learns at 1e-5, all other parts at the rates of the recipe. This is a guess.

    The weights are Caffe's GoogLeNet, which is another net than torchvision's: docs/weights.md.
    """
    check_choice("dataset", dataset, _SETS)
    check_choice("mode", mode, _MODES)
    check_choice("loss", loss, ("triplet", "npair", "dws"))
    check_choice("experiment", experiment, _LAMBDAS)
    dim, rate, decay, l2_weight, evaluate = _SETS[dataset]
    paper, (phase_at, steps, options) = mode == "paper", _MODES[mode]
    if paper:
        dim, rate = 512, 1e-4
    elif experiment == 3:
        phase_at, steps = 0, 3000
    method: dict[str, Any] = {
        "name": "dvml",
        "variational": not baseline,
        "dim": dim,
        **options,
        "lambdas": _PAPER_LAMBDAS if paper else _LAMBDAS[experiment],
        "phase_at": phase_at,
    }
    if mode in ("code_1600", "code_1200"):
        method["decay"] = decay
    losses = {
        "triplet": {"name": "semihard_triplet", "margin": 1.0},
        "npair": {"name": "dmljax.methods.dvml:n_pairs", "l2_weight": l2_weight},
        "dws": {"name": "triplet", "margin": 0.2},
    }
    if code_lrn and net is not None:
        raise ValueError("code_lrn=True is of GoogLeNet: leave it out with net=...")
    lrn = {"lrn_size": 11, "lrn_alpha": 1.1e-3} if code_lrn else {}
    sampler: dict[str, Any] = {"name": "n_pairs", "classes": 64}
    if paper and loss != "npair":
        sampler = {"name": "class_balanced", "classes": 60, "per_class": 2}
    # That code has three optimizers. One Adam takes the same steps, because no gradient of a part
    # reaches the parameters of another part, except in `mode="report"`.
    part_rates = [{"path": "^probe/", "factor": 1e-3 / rate}]
    if not baseline:
        part_rates.insert(0, {"path": "^decoder/", "factor": 1e-2 / rate})
    config: dict[str, Any] = {
        "dataset": {"name": dataset},
        "transform": "dvml_train",
        "eval_transform": "dvml_eval",
        "sampler": sampler,
        "net": {"name": "googlenet", **lrn},
        "method": method,
        "loss": losses[loss],
        "miner": {"name": "distance_weighted", "dim": dim} if loss == "dws" else None,
        "optimizer": {"name": "adam", "rate": rate, "groups": [] if paper else part_rates},
        "schedule": "constant",
        "steps": steps,
        "evaluate": dict(evaluate),
    }
    if net is None:
        return config
    config = with_net(config, net)
    optimizer = config["optimizer"]
    scale = rate / optimizer["rate"]
    groups = [{**group, "factor": scale * group["factor"]} for group in optimizer["groups"]]
    optimizer["groups"] = [*groups, {"path": "^(heads|decoder)/", "factor": scale}]
    return config
