"""What a config with `start` takes from the earlier run: weights, normalization, net, adapters."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

from flax import traverse_util

from dmljax import adapt
from dmljax import weights as weights_lib
from dmljax.config import fields
from dmljax.config.method import adapted_of, backbone_of
from dmljax.files import reading
from dmljax.files import result as results
from dmljax.methods.base import Method
from dmljax.train import initial_state, start
from dmljax.train.options import Options
from dmljax.train.step import TrainState


def arrays_of(origin: start.Start, image_shape: Sequence[int]) -> dict[str, Any]:
    """The arrays of a run to start from, with its adapters in the kernels.

    Its checkpoints may leave out parts of the backbone (`initial_state.base_of`), which its file of
    weights has.
    """
    arrays = start.read(origin)
    options = fields.typed(reading.config_of_run(origin.folder))
    if options.trained["name"] == "all":
        return arrays
    backbone = backbone_of(options)
    adapted = adapted_of(options, backbone.net, classes=2)
    if backbone.weights is not None and adapted.method.backbone == ("net",):
        initial_state.check_file(backbone.weights, reason=f"{origin.folder} was trained from it")
        digest = results.read(origin.folder).digests.get("weights")
        advice = "put that one there again"
        initial_state.check_digest(backbone.weights, digest, run=str(origin.folder), advice=advice)
        variables = weights_lib.load(
            backbone.weights, backbone.net, image_shape=image_shape, report_fn=lambda *_: None
        )
        arrays = start.flat({"net": variables["params"]}, {}) | arrays
    trees = traverse_util.unflatten_dict(arrays, sep="/")
    return start.flat(adapted.merge_fn(trees["params"]), trees)


def first_weights(start: str | None, weights: str | None) -> str | None:
    """The file of weights of the first backbone of a run, by its `start` and its `net.weights`."""
    return weights if start is None else weights_of(start)


def weights_of(folder: str | os.PathLike) -> str | None:
    """The file of weights with which the first of a row of runs began, each the start of the next.

    None if that run began with random values, or if a folder holds no run any more.
    """
    if (options := _options_of_run(folder)) is None:
        return None
    return first_weights(options.start, options.net.get("weights"))


def normalization_of(folder: str | os.PathLike) -> Any:
    """How the images of the run in `folder` are normalized; None if there is no run any more."""
    return fields.short(options.normalize) if (options := _options_of_run(folder)) else None


def _options_of_run(folder: str | os.PathLike) -> Options | None:
    folder = reading.chosen_run(pathlib.Path(folder).expanduser())
    if not (folder / "config.json").is_file():
        return None
    return fields.typed(reading.config_of_run(folder))


def check_mixed(options: Options) -> None:
    """Raises unless the averages that `mixed_with` asks for exist."""
    if options.mixed_with is None:
        return
    if options.start is None or options.start_takes != "all":
        raise ValueError(
            f"mixed_with={options.mixed_with!r} is averaged with the parameters of another run: "
            "give --config.start=runs/... with --config.start_takes=all, or leave it out"
        )
    if not 0 <= options.mixed_share <= 1:
        raise ValueError(f"mixed_share must be between 0 and 1, not {options.mixed_share}")


def taken_of(options: Options, method: Method, shapes: TrainState) -> start.Taken | None:
    """What a run that starts from another one may take from it beside the backbone."""
    backbone = adapt.paths_under(method.backbone, adapt.paths_of(shapes.params))
    if not backbone and (options.start is not None or options.trained["name"] != "all"):
        raise ValueError(
            f"the method {options.method['name']} has no parameters at "
            f"{', '.join(method.backbone)}: say where its backbone is by Method(..., backbone=...)"
        )
    if options.start is None or options.start_takes != "all":
        return None
    if method.per_class is None:
        raise ValueError(
            f"start: the method {options.method['name']} does not say which parameters have a row "
            "for each class: write Method(..., per_class=()) for none, or take the backbone alone "
            "by --config.start_takes=backbone"
        )
    names = start.flat(shapes.params, shapes.model_state)
    per_class = adapt.paths_under([f"params/{path}" for path in method.per_class], names)
    return start.Taken(names, frozenset(per_class), frozenset(backbone))
