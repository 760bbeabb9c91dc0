"""Runs that start from the backbone of another run."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax import traverse_util

from dmljax.train import results
from dmljax.train.checkpoints import Checkpoints
from dmljax.weights import from_tensors

__all__ = ["Start", "find", "normalization", "variables"]


class Start(NamedTuple):
    """The chosen step of a finished run, and a digest of both."""

    folder: pathlib.Path
    step: int
    digest: str


def find(folder: str | os.PathLike) -> Start:
    """The run in `folder`, or a one-line error if it cannot be started from."""
    folder = pathlib.Path(folder).expanduser()
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"start: {folder} holds no run: name the folder of a finished run")
    try:
        result = results.read(folder)
    except FileNotFoundError:
        result = None
    if result is None or result.chosen is None:
        raise ValueError(
            f"start: the run in {folder} is not finished: its command goes on with it, and then "
            "another run can start from the step that it chooses"
        )
    step = result.chosen.step
    if not (folder / "checkpoints" / str(step)).is_dir():
        raise FileNotFoundError(
            f"start: {folder} has no checkpoint of step {step}, which the run has chosen"
        )
    return Start(folder, step, f"{result.digests['run']} step {step}")


def normalization(folder: str | os.PathLike) -> Any:
    """How the images of the run in `folder` are normalized; None if there is no run any more."""
    file = pathlib.Path(folder).expanduser() / "config.json"
    return json.loads(file.read_text())["normalize"] if file.is_file() else None


def variables(
    start: Start, net: nn.Module, *, image_shape: Sequence[int], report_fn: Callable
) -> dict[str, Any]:
    """The variables of the backbone, checked against `net`."""
    with Checkpoints(start.folder / "checkpoints", reading=True) as checkpoints:
        if fault := checkpoints.fault(start.step):
            raise ValueError(
                f"start: checkpoint {start.step} of {start.folder} is damaged ({fault})"
            )
        params, train = checkpoints.arrays(start.step)
    params = _average(train["opt_state"]) or params
    backbone = {"params": _whole_net(params.get("net", {}))}
    statistics = train["model_state"].get("batch_stats", {}).get("net")
    if statistics is not None:
        backbone["batch_stats"] = _whole_net(statistics)
    tensors = {
        name: np.asarray(array)
        for name, array in traverse_util.flatten_dict(backbone, sep="/").items()
    }
    label = f"start: the backbone of {start.folder}, step {start.step},"
    return from_tensors(label, tensors, net, image_shape=image_shape, report_fn=report_fn)


def _whole_net(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The stages of a backbone; an attention-based ensemble keeps them in two parts."""
    if "shared" in tree and "head" in tree:
        return {**tree["shared"], **tree["head"]}
    return dict(tree)


def _average(opt_state: Any) -> dict[str, Any]:
    """The averaged parameters, if the optimizer of the run keeps them."""
    average: dict[tuple, Any] = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        names = [getattr(key, "key", None) for key in keys]
        if "average" in names:
            average[tuple(names[names.index("average") + 1 :])] = array
    return traverse_util.unflatten_dict(average)
