"""One loop for every method: step, log, search neighbors, evaluate, save, end early."""

import functools
import math
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from dmljax import retrieval
from dmljax.data import pipeline
from dmljax.files import machine
from dmljax.files.run_folder import first_best
from dmljax.files.writing import write_array
from dmljax.train import compilation
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.devices import prefetch, used_params_fn
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.interrupts import Interrupts, Stopped
from dmljax.train.journal import Journal, PendingMetrics, Report, mean
from dmljax.train.resident import Resident
from dmljax.train.run import Run
from dmljax.train.start import Restored
from dmljax.train.step import TrainState, train_step

__all__ = ["batches", "compiled_step", "is_out_of_patience", "train"]

_NEIGHBORS = 32  # that are kept of each class
_ROWS = 4096  # embeddings that are summed at a time
_UNDO_REMAT = {"cpu": "cse_barrier_expander", "gpu": "latency-hiding-scheduler"}  # passes of XLA


def train(
    run: Run,
    restored: Restored,
    *,
    host_batches: pipeline.Batches,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    journal: Journal,
    interrupts: Interrupts,
    report: Report,
    workdir: pathlib.Path,
    evaluated_fn: Callable[[int, Evaluation], None],
    resident: Resident | None = None,
) -> tuple[TrainState, Evaluation]:
    """Trains to the end, and returns the state that counts with its evaluation.

    `host_batches` come from `batches` with the same `resident`. `evaluated_fn(step, evaluation)`
    is called after each evaluation, before its checkpoint.
    """
    state, recent, history = restored.state, list(restored.window), list(restored.history)
    start_step = int(state.step)
    step_fn = compiled_step(run, resident)
    resident_arrays = {} if resident is None else resident.arrays
    pending = PendingMetrics(start_step)

    def log(*, all_steps: bool = False) -> None:
        for step, metrics, signal in pending.fetch(all_steps=all_steps):
            interrupts.set_agreed(signal)
            recent.append(metrics)
            if step == start_step + 1:
                journal.first_step(step, metrics)
                journal.say(compilation.sentence())
            if step % run.options.log_every == 0 or step == run.steps:
                skipped = len(host_batches.skipped)
                journal.train(step, mean(recent), batch=run.batch_size, unreadable=skipped)
                recent.clear()

    def save(score: float | None = None, *, overwrite: bool = False, **notes: Any) -> None:
        log(all_steps=True)
        notes |= {"window": recent, "history": history, "seconds": report.seconds()}
        checkpoints.save(state, notes, score=score, overwrite=overwrite)

    def leave(step: int) -> NoReturn:
        checkpoints.wait()
        journal.say(f"stopped after step {step}, saved; the same command continues from there")
        interrupts.leave()

    def evaluate(step: int, *, is_repeated: bool = False) -> Evaluation:
        clustering, selection = run.options.evaluate.clustering, run.selection
        is_clustered = clustering is not None and (step == run.steps or not clustering.only_last)
        try:
            with interrupts.stoppable():
                evaluation = evaluator.evaluate(state, clustering=is_clustered)
        except Stopped:
            save(repeats_evaluation=True)
            leave(step)
        for split in ("test", "val"):
            if scores := evaluation.of_split(split):
                journal.evaluation(step, scores, split=split, shown=selection.score)
        score = evaluation.scores.get(selection.key)
        if not selection.is_last and (score is None or math.isnan(score)):
            raise ValueError(
                f"select={selection.rule!r}: {selection.split} has no {selection.score}, for which "
                "it may have too few images"
            )
        evaluated_fn(step, evaluation)
        history.extend([] if score is None else [score])
        save(score, overwrite=is_repeated)
        if jax.process_index() == 0 and (call := run.options.evaluate.call) is not None:
            call.function(evaluation, step=step, workdir=workdir)
        # An array that lives on can lie in the block of a step, which glibc keeps
        # (`main.tune_cpu`); without this the process grows by a block with every evaluation.
        machine.trim_memory()
        journal.restart_clock(step)
        return evaluation

    def refresh_neighbors() -> Callable[..., np.ndarray]:
        log(all_steps=True)
        start = time.perf_counter()
        try:
            with interrupts.stoppable():
                embeddings = evaluator.embeddings(state, run.train)[MAIN]
                table = nearest_of_each_class(embeddings, run.train.labels)
        except Stopped:
            save()
            leave(int(state.step))
        if jax.process_index() == 0:
            path = _neighbors_file(workdir, int(state.step))
            path.parent.mkdir(exist_ok=True)
            write_array(path, table)
            remove_neighbors(run, workdir, min(checkpoints.steps(), default=0))
        journal.say(f"the nearest classes were searched ({time.perf_counter() - start:.0f} s)")
        journal.restart_clock(int(state.step))
        return functools.partial(run.sample_fn, neighbors=table)

    evaluation = None
    # A run of no steps, whose head was fitted, has its one evaluation and checkpoint here.
    if restored.repeats_evaluation or run.steps == 0:
        evaluation = evaluate(start_step, is_repeated=True)
    if start_step in run.reload_steps:  # A checkpoint holds the state before the reload.
        state = _reload_best(state, run, checkpoints)
    send = functools.partial(
        prefetch, host_batches, run.shards.rows, window=run.options.runtime.data.window
    )
    device_batches = send()
    patience = run.options.patience
    is_over = is_out_of_patience(history, patience)  # The run was finished already.
    remaining_steps = range(start_step + 1, start_step + 1 if is_over else run.steps + 1)
    if remaining_steps:
        journal.say("compiling the train step")
    for step in remaining_steps:
        if step - 1 in run.neighbor_steps:
            sample_fn = refresh_neighbors()
            host_batches.replace(batches(run, step - 1, sample_fn=sample_fn, resident=resident))
            device_batches = send()
        with journal.waiting():
            batch = next(device_batches)
        signal = interrupts.row()
        with jax.transfer_guard("disallow"):
            state, on_devices = step_fn(state, {**batch, **resident_arrays}, signal)
        pending.add(step, on_devices)
        log(all_steps=step == start_step + 1)
        if step in run.evaluation_steps or step == run.steps:
            log(all_steps=True)
            evaluation = evaluate(step)
            if is_out_of_patience(history, patience):
                journal.say(
                    f"training ends after step {step}: {run.selection.key} has not risen for "
                    f"more than {patience} evaluations (patience={patience})"
                )
                break
        elif step in run.checkpoint_steps:
            save()
        if step in run.reload_steps:
            state = _reload_best(state, run, checkpoints)
        if interrupts.requested:
            save()
            leave(step)
    checkpoints.wait()

    chosen = None if run.selection.is_last else checkpoints.best()
    if chosen is not None and chosen != int(state.step):
        state, _ = checkpoints.load(chosen, run.shapes, run.placements)
        evaluation = None
    if evaluation is None:  # An earlier step is chosen, or the run was finished already.
        with interrupts.stoppable():
            evaluation = evaluator.evaluate(state)
    return state, evaluation


def is_out_of_patience(scores: Sequence[float], patience: int | None) -> bool:
    """Returns True if the best of `scores` is more than `patience` evaluations old.

    Of equal scores the earliest is the best. None is endless patience.

    >>> is_out_of_patience([0.1, 0.5, 0.4], 1), is_out_of_patience([0.1, 0.5, 0.4, 0.5], 1)
    (False, True)
    """
    best = first_best(dict(enumerate(scores)))
    return patience is not None and best is not None and len(scores) - 1 - best > patience


def _reload_best(state: TrainState, run: Run, checkpoints: Checkpoints) -> TrainState:
    """Loads the best parameters and statistics; the optimizer's moments stay, as published."""
    checkpoints.wait()
    step = checkpoints.best()
    assert step is not None  # an evaluation comes before every reload
    best, _ = checkpoints.load(step, run.shapes, run.placements)
    return state._replace(params=best.params, model_state=best.model_state)


def compiled_step(run: Run, resident: Resident | None = None) -> jax.stages.Wrapped:
    """Compiles the train step for the devices: `(state, batch, signal) -> (state, results)`.

    Results are `(metrics, signal)`: the largest signal that any process has received. With
    `resident`, a batch has its arrays, and rows and draws in place of images.
    """
    everywhere = run.shards.everywhere
    # The weights of classes stay where they are: the embeddings of all devices are copied to them.
    copy_fn = functools.partial(jax.lax.with_sharding_constraint, shardings=everywhere)
    step_fn = train_step(
        run.method,
        run.optimizer,
        normalize_fn=run.normalize_fn,
        seed=run.options.seed,
        batch_size=run.batch_size,
        chunk=run.options.chunk,
        gather_fn=copy_fn if run.class_rows.is_split else None,
        params_fn=used_params_fn(
            run.shards, sharded=run.options.runtime.sharded, class_rows=run.class_rows
        ),
        frozen=run.frozen,
    )

    def step_and_signal(state, batch, signal):
        batch = batch if resident is None else resident.images_fn(batch)
        # `ops.devices.over_devices` and `ops.over_classes` read the mesh.
        with jax.sharding.use_abstract_mesh(run.shards.mesh.abstract_mesh):
            state, metrics = step_fn(state, batch)
        return state, (metrics, signal.max())

    return jax.jit(
        step_and_signal,
        donate_argnums=0,
        out_shardings=(run.placements, everywhere),
        compiler_options=_compiler_options(run),
    )


def _compiler_options(run: Run) -> dict[str, str] | None:
    """Disables a pass of XLA that would undo what recomputed activations (`net.remat`) save.

    JAX puts barriers into the program, so that a block is recomputed only when its gradient is
    needed. On CPUs, XLA removes them before it orders the program, recomputes all blocks early, and
    keeps all activations. On several GPUs, its scheduler puts off the gradients of weights, which
    the devices add up last, and keeps the activations of all blocks for them.
    """
    name = _UNDO_REMAT.get(run.shards.platform)
    if name is None or getattr(run.net, "remat", False) in (False, "none"):
        return None
    return {"xla_disable_hlo_passes": name}


def batches(
    run: Run,
    start_step: int = 0,
    *,
    workdir: pathlib.Path | None = None,
    sample_fn: Callable[..., np.ndarray] | None = None,
    resident: Resident | None = None,
) -> pipeline.Batches:
    """Returns this host's rows of the batches from step `start_step + 1` on, without an end.

    Without `sample_fn`, the sampler is the one of that step, for which a resumed run may need
    `workdir`. With `resident`, batches have rows and draws in place of images.
    """
    options: dict[str, Any] = {
        "sample_fn": sample_fn or sample_fn_at(run, workdir, start_step),
        "seed": run.options.seed,
        "start": start_step,
        "host": jax.process_index(),
        "hosts": jax.process_count(),
        "padded": run.shards.padded(run.batch_size, chunk=run.options.chunk),
        "workers": run.workers(run.train, is_endless=True),
    }
    if resident is not None:
        options |= {"shapes": resident.shapes, "sources": resident.sources}
    options |= {"cache": run.options.runtime.cache, "unreadable": run.options.unreadable}
    return pipeline.train(run.train, transform_fn=run.transform_fn, **options)


def nearest_of_each_class(
    embeddings: np.ndarray, labels: np.ndarray, *, count: int = _NEIGHBORS
) -> np.ndarray:
    """Returns `[C n]`: the classes with the nearest centers to each class, nearest first.

    Classes are indices into the sorted labels. A center is the mean of a class's embeddings. Rows
    that are NaN (unreadable images) do not count. n is at most `count` and C - 1.
    """
    names, classes = np.unique(labels, return_inverse=True)
    if len(names) == 1:
        return np.zeros((1, 0), np.int32)
    sums, counts = np.zeros((len(names), embeddings.shape[1])), np.zeros(len(names), int)
    for start in range(0, len(labels), _ROWS):  # a copy of all rows would take as much as they do
        rows = embeddings[start : start + _ROWS]
        readable = np.isfinite(rows).all(axis=1)
        of_rows = classes[start : start + _ROWS][readable]
        np.add.at(sums, of_rows, rows[readable])
        np.add.at(counts, of_rows, 1)
    centers = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
    nearest, _ = retrieval.nearest(centers, k=min(count, len(names) - 1))
    return nearest.astype(np.int32)


def sample_fn_at(run: Run, workdir: pathlib.Path | None, step: int) -> Callable[..., np.ndarray]:
    """Returns the sampler after `step`, with the neighbors of the last search before it."""
    searched = max((s for s in run.neighbor_steps if s < step), default=None)
    if searched is None:
        return run.sample_fn
    assert workdir is not None  # the run is resumed
    path = _neighbors_file(workdir, searched)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing, so the run cannot continue with the same batches: restore the "
            "file, or start the run in a new folder"
        )
    return functools.partial(run.sample_fn, neighbors=np.load(path))


def remove_neighbors(run: Run, workdir: pathlib.Path, oldest: int) -> None:
    """Removes tables that no run needs that continues at step `oldest` or later."""
    needed = max((s for s in run.neighbor_steps if s < oldest), default=0)
    for path in _neighbors_file(workdir, 0).parent.glob("*.npy"):
        if int(path.stem) < needed:
            path.unlink()


def _neighbors_file(workdir: pathlib.Path, step: int) -> pathlib.Path:
    return workdir / "neighbors" / f"{step}.npy"
