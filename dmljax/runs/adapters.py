"""Exports the adapters of a run as files of the package peft."""

import os
import pathlib
from collections.abc import Sequence

import jax

from dmljax.adapt import trained
from dmljax.config.registry import with_defaults
from dmljax.runs import frozen
from dmljax.runs.folder import reopen
from dmljax.train import optimizers
from dmljax.train.evaluation import Evaluation, Evaluator
from dmljax.weights import write_adapter


def export(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    allow_worse: bool = False,
) -> pathlib.Path:
    """Writes the adapters of a run with trained=lora into the folder `out`, and returns it.

    The checkpoint is the one that the run's `select` chose, or the one of `step`. A run that is
    worse than its backbone without training is refused unless `allow_worse`: `frozen.check`.
    """
    run, state = reopen(workdir, step=step, overrides=overrides)
    spec = run.options.trained
    is_lora = spec["name"] == trained.lora.__name__ and run.method.backbone == ("net",)
    if run.weights is None or not is_lora:
        raise ValueError(
            f"--adapter: {workdir} must be a run with trained='lora' of a file of weights "
            f"(net.weights), but trained={spec['name']!r} and net.weights={run.weights}: "
            "leave out --adapter for a bundle"
        )
    evaluator = Evaluator(run)
    evaluation = Evaluation({}, evaluator.embeddings(state, run.test))
    frozen.check(run, state, workdir, evaluation, evaluator, allow_worse=allow_worse)
    options = {k: v for k, v in with_defaults(spec).items() if k != "name"}
    params = jax.device_get(optimizers.averaged(state.params, state.opt_state))
    write_adapter(
        out,
        params["adapters"]["net"],
        run.net,
        rank=options["rank"],
        alpha=options["alpha"],
        rslora=options["rslora"],
        base=run.weights,
    )
    return pathlib.Path(out)
