"""Finds, reads and averages the parameters of another run, to start a new one from them."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax import traverse_util

from dmljax.adapt import interpolated
from dmljax.files import reading
from dmljax.files import run_folder as results
from dmljax.files.run_folder import RunFolder
from dmljax.train import options as options_lib
from dmljax.train.checkpoints import Checkpoints
from dmljax.weights.loading import FLAX, fit


class Start(NamedTuple):
    """The chosen step of a finished run, a digest of both, and `normalize` of its config."""

    folder: pathlib.Path
    step: int
    digest: str
    normalize: Any = None


class Taken(NamedTuple):
    """What a run may take from another one besides the backbone.

    `shapes` has the shape of each of its arrays by the name in `flat`. Arrays `per_class` have a
    row for each class, so they are drawn. `backbone` has the backbone's parameters by their paths.
    """

    shapes: Mapping[str, Any]
    per_class: frozenset[str]
    backbone: frozenset[str]


def find(folder: str | os.PathLike) -> Start:
    """Finds the finished run in `folder`; raises a one-line error without one."""
    folder = reading.chosen_run(pathlib.Path(folder).expanduser())
    if folder.is_file():
        raise ValueError(
            f"start: {folder} is a file, and not the folder of a finished run: weights are read by "
            f"--config.net.weights={folder}"
        )
    files = RunFolder(folder)
    if not files.config.is_file():
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
    if not (files.checkpoints / str(step)).is_dir():
        raise FileNotFoundError(
            f"start: {folder} lacks the checkpoint of step {step}, which the run has chosen"
        )
    normalize = reading.config_of_run(folder)["normalize"]
    return Start(folder, step, f"{result.digests['run']} step {step}", normalize)


def find_if_any(options: options_lib.Start | None) -> Start | None:
    """Finds the run to start from; returns None without one, or if it is gone or not finished.

    A run that has started needs it no more.
    """
    try:
        return None if options is None else find(options.name)
    except (FileNotFoundError, ValueError):
        return None


def digest(options: options_lib.Start | None) -> str | None:
    """Returns the digest of the runs that give the first parameters; None without one."""
    if options is None:
        return None
    folders = [folder for folder in (options.name, options.mixed_with) if folder is not None]
    return " and ".join(find(folder).digest for folder in folders)


def read(start: Start) -> dict[str, Any]:
    """Reads the parameters and batch statistics of the chosen step, as `flat` names them."""
    with Checkpoints(RunFolder(start.folder).checkpoints) as checkpoints:
        if fault := checkpoints.fault(start.step):
            raise ValueError(
                f"start: checkpoint {start.step} of {start.folder} is damaged ({fault})"
            )
        params, train = checkpoints.arrays(start.step)
    return flat(_average(train["opt_state"]) or params, train["model_state"])


def mixed(
    arrays: Mapping[str, Any],
    others: Mapping[str, Any],
    *,
    share: float,
    folders: tuple[str, str],
) -> dict[str, Any]:
    """Averages the arrays of two runs of the same net; keeps the rows for classes of the first."""
    shapes = [{name: np.shape(x) for name, x in tree.items()} for tree in (arrays, others)]
    common = {name for name in shapes[0] if shapes[0][name] == shapes[1].get(name)}
    if missing := sorted(name for name in shapes[0] if "/net/" in name and name not in common):
        raise ValueError(
            f"mixed_with: the runs {' and '.join(folders)} have different nets ({missing[0]} is "
            "not the same in both)"
        )
    parts = ({name: tree[name] for name in common} for tree in (arrays, others))
    return {**arrays, **interpolated(*parts, share=share)}


def flat(params: Any, model_state: Any) -> dict[str, Any]:
    """Flattens arrays to names such as 'params/head/red/kernel'; leaves out other state."""
    trees = {"params": params, "batch_stats": model_state.get("batch_stats", {})}
    return traverse_util.flatten_dict(trees, sep="/")


def backbone(
    start: Start,
    arrays: Mapping[str, Any],
    net: nn.Module,
    *,
    image_shape: Sequence[int],
    report_fn: Callable,
) -> dict[str, Any]:
    """Returns the variables of the backbone of a run, checked against `net`."""
    trees = traverse_util.unflatten_dict(dict(arrays), sep="/")
    variables = {
        name: _whole_net(trees.get(name, {}).get("net", {})) for name in ("params", "batch_stats")
    }
    tensors = {
        name: np.asarray(array)
        for name, array in traverse_util.flatten_dict(variables, sep="/").items()
    }
    label = f"start: the backbone of {start.folder}, step {start.step},"
    return fit(label, tensors, net, FLAX, report_fn, image_shape)


def others(
    start: Start, arrays: Mapping[str, Any], taken: Taken | None
) -> tuple[dict[str, np.ndarray], str]:
    """Returns what a run takes from another one besides the backbone, and a line about it.

    It takes every array that the other run has under the same name and in the same shape. In an
    ensemble this includes the attention's copy of the backbone.
    """
    origin = f"{start.folder}, step {start.step}"
    if taken is None:
        return {}, f"start: the backbone of {origin}; all else is drawn (start.takes=backbone)"
    values = {
        name: np.asarray(arrays[name])
        for name, shape in taken.shapes.items()
        if name in arrays and arrays[name].shape == shape.shape and name not in taken.per_class
    }
    outside = [name for name in taken.shapes if name.removeprefix("params/") not in taken.backbone]
    kept, drawn = (
        dict.fromkeys(_module(x) for x in outside if x.startswith("params/") and (x in values) == y)
        for y in (True, False)
    )
    line = f"start: {', '.join(['the backbone', *kept])} of {origin}"
    return values, line + (f"; drawn: {', '.join(drawn)}" if drawn else "")


def _module(name: str) -> str:
    """Returns the module of a parameter: 'head/red' for 'params/head/red/kernel'."""
    folders = name.split("/")[1:-1] or name.split("/")[1:]
    return "/".join(folders[:2])


def replaced(params: Any, model_state: Any, others: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Replaces arrays of the parameters and the state, named as in `flat`."""
    if not others:
        return params, model_state
    trees = {"params": params, "batch_stats": model_state.get("batch_stats", {})}
    trees = traverse_util.flatten_dict(trees, sep="/", keep_empty_nodes=True) | dict(others)
    trees = traverse_util.unflatten_dict(trees, sep="/")
    if trees["batch_stats"]:
        model_state = {**model_state, "batch_stats": trees["batch_stats"]}
    return trees["params"], model_state


def _whole_net(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the stages of a backbone; an attention-based ensemble keeps them in two parts."""
    if "shared" in tree and "head" in tree:
        return {**tree["shared"], **tree["head"]}
    return dict(tree)


def _average(opt_state: Any) -> dict[str, Any]:
    """Returns the averaged parameters, if the optimizer of the run keeps them."""
    average: dict[tuple, Any] = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        names = [getattr(key, "key", None) for key in keys]
        if "average" in names:
            average[tuple(names[names.index("average") + 1 :])] = array
    return traverse_util.unflatten_dict(average)
