"""How to fine-tune a pretrained backbone: each step of the ladder, and what else may learn.

    dmljax study run studies/ladder.py:dataset=folder --config.dataset.root=photos/
    dmljax study run studies/ladder.py:dataset=cub200,net=dinov2_s14

`dataset` is cub200, cars196, sop, inshop or folder; `net` is a backbone whose weights are on this
machine, by default the first one. Columns `frozen/...` are the scores without any training. Rows
are compared with the head. The ladder chooses its step on training classes that it holds out, so
that it trains on four fifths of them. All other rows train on all classes, with fixed steps. No
step is chosen by test scores. Prompts need a transformer.
"""

from __future__ import annotations

import inspect

from dmljax import at_hand, nets, weights

_DATASETS = ("cub200", "cars196", "sop", "inshop", "folder")


def get_study(dataset: str = "folder", net: str = "", seeds: int = 5):
    if dataset not in _DATASETS:
        raise ValueError(f"dataset is one of {', '.join(_DATASETS)}, not {dataset!r}")
    here = list(at_hand.weights_at_hand())
    if not (net or here):
        raise ValueError(f"no weights of a backbone are on this machine: {at_hand.GET_BACKBONE}")
    net = net or here[0]
    rows = {
        "head": _row(net, "head"),
        "all": _row(net, "all"),
        "ladder": _row(net, "ladder"),
        "last 4 blocks": _row(net, "last4"),
        "biases": _row(net, "bitfit"),
        "LoRA, rank 4": _row(net, "lora", trained={"name": "lora", "rank": 4}),
        "LoRA, rank 16": _row(net, "lora", trained={"name": "lora", "rank": 16}),
        "DoRA, rank 16": _row(net, "lora", trained={"name": "lora", "rank": 16, "dora": True}),
        "all, distilled": _row(net, "all", distill=1.0),
    }
    if net in weights.PUBLISHED and _is_transformer(weights.PUBLISHED[net].net):
        rows["prompts"] = _row(net, "prompts")
        rows["prompts, semantic proxies"] = _row(net, "vptsp")
    study = {
        "title": f"Fine-tuning {net}: {dataset}",
        "base": "folder",
        "rows": rows,
        "all": {"pictures": None, "evaluate.clustering": None},
        "seeds": seeds,
        "baseline": "head",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "frozen/R@1", "frozen/MAP@R"),
    }
    if dataset != "folder":
        study["all"]["dataset"] = {"name": dataset}
    return study


def _row(net: str, train: str, **fields):
    return {"argument": f"net={net},train={train}", **fields}


def _is_transformer(net: str) -> bool:
    return "patch" in inspect.signature(getattr(nets, net)).parameters
