"""The folder of a run: claimed by one process, written once, opened again after the run."""

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from dmljax.config import files as config_files
from dmljax.config.build import build
from dmljax.config.fields import Digests, essential
from dmljax.data.splits import Split, warn_of_one_class
from dmljax.files import reading
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import Taken, lock, make_folder, write_json
from dmljax.report import scores_file
from dmljax.report.scores_file import QueryScores
from dmljax.train import compilation, hosts, optimizers, start
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.evaluation import Evaluator
from dmljax.train.journal import table
from dmljax.train.run import Run
from dmljax.train.step import TrainState

__all__ = ["embedding", "evaluate", "load", "reopen"]  # the API reference shows these

_DIGESTS = {
    "data": "the data set",
    "weights": "the file of weights",
    "start": "the run to start from",
}


@contextlib.contextmanager
def claimed(
    workdir: pathlib.Path, config: dict[str, Any], digests: Digests, *, overwrite: bool
) -> Iterator[None]:
    """Locks `workdir` for this run and writes its config there, or raises one line."""
    files = RunFolder(workdir)
    with contextlib.ExitStack() as stack:

        def claim():
            try:
                make_folder(workdir)
                stack.enter_context(lock(files.lock))
                _write_config(config, digests, files, overwrite)
            except Taken as owner:
                raise ValueError(
                    f"{workdir} is in use by {owner}: wait for it, end it, or choose another "
                    "--workdir"
                ) from None
            except OSError as error:
                raise OSError(
                    f"{workdir} cannot be written: {error.strerror}. Free space on its disk, "
                    "change its permissions, or choose another --workdir"
                ) from error

        hosts.on_process_0(claim)
        hosts.check_shared(files.config)
        yield


def _write_config(
    config: dict[str, Any], digests: Digests, files: RunFolder, overwrite: bool
) -> None:
    """Writes the config; raises for the folder of another run that has results already.

    The files of the data set and of the weights may have moved: their digests are compared.
    """
    if files.config.exists():
        steps = _ladder_steps(files)
        has_results = any(RunFolder(path).has_results for path in (files.path, *steps))
        try:
            changes = _changes(files, config, digests)
        except ValueError as error:  # a damaged file
            if has_results and not overwrite:
                raise
            changes = [str(error)]
        if changes and has_results and not overwrite:
            kind, content = ("ladder", " with all its steps") if steps else ("run", "")
            raise ValueError(
                f"{files.path} holds a {kind} of another config: {'; '.join(changes[:5])}. Choose "
                f"another --workdir (with --config.start={files.path}, it starts from the weights "
                f"of this {kind} if that is finished), or --overwrite to delete that {kind}"
                f"{content}"
            )
        for path in (*steps, *files.results) if changes else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    write_json(files.config, config, indent=2)
    write_json(files.digests, digests._asdict(), indent=2)


def _ladder_steps(files: RunFolder) -> list[pathlib.Path]:
    """Returns the folders of the steps that a ladder in this folder has begun."""
    ladder = reading.json_object_or_empty(files.config).get("ladder")
    steps = [x for x in ladder if isinstance(x, dict)] if isinstance(ladder, list) else []
    # The folder of a step is NAME, or NAME-VALUE where the step tries several values.
    names = "|".join(re.escape(str(step.get("name"))) for step in steps)
    pattern = re.compile(rf"({names})(-\d[\de.+-]*)?")
    return [x for x in files.path.iterdir() if x.is_dir() and pattern.fullmatch(x.name)]


def _changes(files: RunFolder, config: dict[str, Any], digests: Digests) -> list[str]:
    """Returns the differences from the run in the folder that can change a result."""
    old_config, old_digests = reading.config_of_run(files.path), _recorded_digests(files)
    differences = config_files.differences(essential(old_config), essential(config))
    changes = [f"{path} was {old!r} and is now {new!r}" for path, old, new in differences]
    for name, title in _DIGESTS.items() if old_digests else ():
        old, new = _short(old_digests.get(name)), _short(getattr(digests, name))
        if old != new:
            changes.append(f"{title}: its digest was {old} and is now {new}")
    return changes


def _short(digest: str | None) -> str:
    return "none" if digest is None else re.sub(r"(\b[0-9a-f]{12})[0-9a-f]+", r"\1", digest)


def reopen(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    trust_modules: bool = False,
) -> tuple[Run, TrainState]:
    """Opens a run, with its state after `step` or after the step that its `select` chooses.

    `overrides` such as '--config.dataset.root=elsewhere' change its config. A data set that has
    changed since the training is refused, unless `overrides` name another one. A config in the
    folder that names modules outside of dmljax is refused unless `trust_modules`, because importing
    them runs their code.
    """
    workdir = reading.chosen_run(workdir)
    run = _build(workdir, overrides, trust_modules)
    if not any(word.startswith("--config.dataset") for word in overrides):
        check_data(run, workdir)
    return run, _state(run, workdir, step)


def _build(workdir: pathlib.Path, overrides: Sequence[str], trust_modules: bool) -> Run:
    with reading.trusting_modules(trust_modules):
        run = build(config_files.override(reading.config_of_run(workdir), overrides))
    compilation.keep_programs()
    return run


def check_data(run: Run, workdir: str | os.PathLike) -> None:
    """Raises if the data set of `run` is not the one of the training in `workdir`."""
    digest = _recorded_digests(RunFolder(workdir)).get("data")
    if digest in (None, run.data_digest):
        return
    raise ValueError(
        f"the data set {run.options.dataset['name']} is not the one that {workdir} was trained "
        f"with: its digest was {_short(digest)} and is {_short(run.data_digest)}, so its labels, "
        "class names or files differ. Restore it, or train again in another --workdir; `dmljax "
        "evaluate` scores other data that --config.dataset... names"
    )


def _recorded_digests(files: RunFolder) -> dict[str, Any]:
    """Returns the digests of the training; {} for a folder without that file."""
    return reading.object_of_run(files.digests) if files.digests.exists() else {}


def _state(run: Run, workdir: pathlib.Path, step: int | None) -> TrainState:
    files = RunFolder(workdir)
    base = start.base_of(run, digest=_recorded_digests(files).get("weights"))
    with Checkpoints(files.checkpoints, base=base, class_rows=run.class_rows) as checkpoints:
        steps = checkpoints.steps()
        if step is None:
            step = checkpoints.newest() if run.selection.is_last else checkpoints.best()
        if not steps or (step is None and run.selection.is_last):
            raise FileNotFoundError(f"{workdir} holds no checkpoint")
        if step is None:
            raise ValueError(
                f"{workdir}: select={run.selection.rule} chooses among evaluations, and none "
                f"of the checkpoints {steps} has been evaluated: name one by --step"
            )
        if step not in steps:
            raise ValueError(f"{workdir} has the checkpoints {steps}, not {step}")
        if fault := checkpoints.fault(step):
            raise ValueError(
                f"checkpoint {step} of {workdir} is damaged ({fault}): name another of {steps} by "
                "--step"
            )
        return checkpoints.load(step, run.shapes, run.placements)[0]


def load(
    workdir: str | os.PathLike, *, step: int | None = None, trust_modules: bool = False
) -> tuple[Callable, dict[str, Any], dict[str, Any]]:
    """Loads `(embed_fn, variables, config)` of a run: `embed_fn(variables, images) -> [b d]`.

    Images are uint8. The parameters are from the checkpoint of `step`, or from the one that
    `select` chooses. `reopen` explains `trust_modules`. The data set may have changed, because it
    is not embedded.
    """
    workdir = reading.chosen_run(workdir)
    run = _build(workdir, (), trust_modules)
    return *embedding(run, _state(run, workdir, step)), run.config


def embedding(run: Run, state: TrainState) -> tuple[Callable, dict[str, Any]]:
    """Returns `(embed_fn, variables)`: `embed_fn(variables, images uint8) -> [b d]`, compiled.

    The parameters are the averaged ones, where the optimizer of the run keeps an average. Adapters
    are added to the kernels.
    """
    params = run.adapted.merge_fn(optimizers.averaged(state.params, state.opt_state))

    @jax.jit
    def embed_fn(variables, images):
        images = run.normalize_fn(images)
        return run.adapted.deployed.embed(variables["params"], variables["model_state"], images)

    return embed_fn, {"params": params, "model_state": state.model_state}


def evaluate(
    workdir: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    overrides: Sequence[str] = (),
) -> tuple[dict[str, float], list[str]]:
    """Returns the scores of a checkpoint on 'train', 'val' or 'test', and lines that show them."""
    run, state = reopen(workdir, step=step, overrides=overrides)
    images = split_of(run, split)
    warn_of_one_class(images, f"the {split} split")
    evaluator = Evaluator(run)
    scores = evaluator.scores(state, evaluator.embeddings(state, images), images)
    description = describe_score(run, state, requested=step is not None)
    lines = [table(scores), f"{split} split, {len(images):,} images, {description}"]
    return scores, [*lines, *filter(None, [describe_clustering(run)])]


def split_of(run: Run, name: str) -> Split:
    """Returns the split of a run by its name."""
    if name not in run.splits:
        hint = "; a run with --config.held_out=0.2 holds classes out" if name == "val" else ""
        raise ValueError(f"the run has no split {name!r}: choose {', '.join(run.splits)}{hint}")
    return run.splits[name]


class Embedded(NamedTuple):
    """A run in its folder with a state, and the embeddings of its test split with their scores."""

    run: Run
    state: TrainState
    workdir: pathlib.Path
    evaluator: Evaluator
    embeddings: Mapping[str, np.ndarray]
    scores: QueryScores


def query_scores(
    run: Run, embeddings: np.ndarray, workdir: str | os.PathLike, *, step: int, split: str = "test"
) -> QueryScores:
    """Computes the scores of every query of a split by the embeddings of a step."""
    data = _recorded_digests(RunFolder(workdir)).get("data") or ""
    devices = run.shards.mesh.local_devices
    return scores_file.score(
        embeddings, run.splits[split], data=data, name=split, step=step, devices=devices
    )


def write_scores(scores: QueryScores, folder: str | os.PathLike) -> None:
    """Writes the scores of queries into a folder. If that fails, the run continues."""
    try:
        make_folder(folder)
        scores_file.write(folder, scores)
    except OSError as error:
        logging.warning("%s was not written: %s", scores_file.FILE, error)


def describe_clustering(run: Run) -> str:
    """Describes how the scores of clustering were computed; "" without such scores."""
    clustering = run.options.evaluate.clustering
    if clustering is None or not run.metrics.clustering_fns:
        return ""
    starts, count = clustering.starts, len(clustering.seeds)
    start = "single starts" if starts == 1 else f"the best of {starts} by inertia"
    seeds = ", ".join(map(str, clustering.seeds))
    mean = f"mean over the seeds {seeds}" if count > 1 else f"seed {seeds}"
    return f"{', '.join(run.metrics.clustering_fns)}: k-means, {start}, {mean}"


def describe_score(run: Run, state: TrainState, *, requested: bool = False) -> str:
    """Describes a score: step, selection rule, seed, preprocessing and pretraining.

    `requested`: the user has named the step.
    """
    h, w, channels = run.eval_image_shape
    images = jax.ShapeDtypeStruct((1, h, w, channels), jax.numpy.uint8)
    embedding = jax.eval_shape(
        lambda x: run.method.embed(state.params, state.model_state, run.normalize_fn(x)), images
    )
    selection = "as asked" if requested else f"select={run.selection.rule}"
    if steps := ", ".join(str(step) for step in run.reload_steps if step <= run.steps):
        selection += f"; the best by {run.selection.key} reloaded at {steps}"
    return (
        f"after step {int(state.step)} ({selection}), seed {run.options.seed}, "
        f"{embedding.shape[1]}-d embeddings of {w} x {h} x {channels} images "
        f"({run.preprocessing}), pretraining: {run.pretraining(paths=False)}"
    )
