"""One loop for every method: restore, step, log, evaluate, save."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dmljax.data import pipeline
from dmljax.train import digests, initial_state, query_scores, results, run_folder, summary
from dmljax.train import start as start_lib
from dmljax.train.build import build
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.devices import check_determinism, prefetch, return_free_memory
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.interrupts import Interrupts
from dmljax.train.journal import Journal, read
from dmljax.train.run import Run
from dmljax.train.step import TrainState, train_step
from dmljax.train.step_metrics import PendingMetrics, mean
from dmljax.train.stopping import is_out_of_patience
from dmljax.weights import file_digest

__all__ = ["batches", "compiled_step", "run"]


def run(
    config: Any, workdir: str | os.PathLike, *, overwrite: bool = False, source: str = ""
) -> dict[str, float]:
    """Trains, or continues to train, and returns the scores of the test split.

    `source` is the name of the config as the command line gives it, for `result.json`.
    """
    workdir, start = pathlib.Path(workdir), time.monotonic()
    run = build(config)
    initial_state.check_weights(run)
    if run.runtime.deterministic:
        check_determinism(jax.devices()[0].platform, os.environ.get("XLA_FLAGS", ""))
    run_digests = digests.of_config(
        run.config,
        data=run.data_digest,
        weights=None if run.weights is None else file_digest(run.weights),
        start=None if run.start is None else start_lib.find(run.start).digest,
    )
    with (
        run_folder.claimed(workdir, run.config, run_digests, overwrite=overwrite),
        Checkpoints(workdir / "checkpoints", keep=run.checkpoint.keep) as checkpoints,
    ):
        report = results.Report(workdir, source=source, digests=run_digests, start=start)
        try:
            return _train(run, workdir, checkpoints, report)
        except Exception as error:
            report.failed(error, **summary.facts(run))
            raise


def _train(
    run: Run, workdir: pathlib.Path, checkpoints: Checkpoints, report: results.Report
) -> dict[str, float]:
    origin: list[str] = []
    state, window, history = _restored(run, checkpoints, report, say=origin.append)
    start_step = int(state.step)
    if start_step in run.reload_best_at:  # A checkpoint holds the state before the reload.
        state = _reload_best(state, run, checkpoints)
    step_fn = compiled_step(run)
    evaluator = Evaluator(run)
    pending = PendingMetrics(start_step)
    with contextlib.ExitStack() as stack:
        is_main = jax.process_index() == 0
        journal = Journal(workdir, step=start_step, total=run.steps, write=is_main)
        stack.callback(journal.close)
        interrupts = stack.enter_context(Interrupts(run.shards))
        for line in [*summary.header(run, state), *origin]:
            journal.say(line)
        if start_step == 0:
            _evaluate_untrained(run, state, evaluator, journal, workdir)
        host_batches = stack.enter_context(batches(run, start_step))

        def log(*, all_steps: bool = False) -> None:
            for step, metrics, signal in pending.fetch(all_steps=all_steps):
                interrupts.hear(signal)
                window.append(metrics)
                if step == start_step + 1:
                    journal.first_step(step, metrics)
                if step % run.log_every == 0 or step == run.steps:
                    skipped = len(host_batches.skipped)
                    journal.train(step, mean(window), batch=run.batch_size, unreadable=skipped)
                    window.clear()

        def save(score: float | None = None) -> None:
            log(all_steps=True)
            journal.flush()
            notes = {"window": window, "history": history, "seconds": report.seconds()}
            checkpoints.save(state, notes, score=score)

        evaluation, is_warned = None, False
        device_batches = prefetch(host_batches, run.shards.rows)
        is_over = is_out_of_patience(history, run.patience)  # The run was finished already.
        remaining_steps = range(start_step + 1, start_step + 1 if is_over else run.steps + 1)
        if remaining_steps:
            journal.say("compiling the train step")
        for step in remaining_steps:
            with journal.waiting():
                batch = next(device_batches)
            signal = interrupts.row()
            with jax.transfer_guard("disallow"):
                state, on_devices = step_fn(state, batch, signal)
            pending.add(step, on_devices)
            log(all_steps=step == start_step + 1)
            if step in run.evaluation.every or step == run.steps:
                log(all_steps=True)
                evaluation = _evaluate(run, state, evaluator, journal, workdir, step)
                score = evaluation.scores.get(run.selection.key)
                history += [] if score is None else [score]
                save(score)
                if is_main and run.evaluation.call_fn is not None:
                    run.evaluation.call_fn(evaluation, step=step, workdir=workdir)
                if not is_warned and (line := summary.stuck(run, evaluation, workdir)):
                    journal.say(line)
                    is_warned = True
                return_free_memory()
                journal.restart_clock(step)
                if is_out_of_patience(history, run.patience):
                    journal.say(
                        f"training ends after step {step}: {run.selection.key} has not risen for "
                        f"more than {run.patience} evaluations (patience={run.patience})"
                    )
                    break
            elif step in run.checkpoint.every:
                save()
            if step in run.reload_best_at:
                state = _reload_best(state, run, checkpoints)
            if interrupts.requested:
                save()
                checkpoints.wait()
                journal.say(
                    f"stopped after step {step}, saved; the same command continues from there"
                )
                interrupts.leave()
        checkpoints.wait()

        if not run.selection.is_last and (chosen := checkpoints.best()) != int(state.step):
            state, _ = checkpoints.load(chosen, run.shapes, run.placements)
            evaluation = None
        if evaluation is None:  # An earlier step is chosen, or the run was finished already.
            evaluation = evaluator.evaluate(state)
        if is_main:
            rows = read(workdir / "metrics.jsonl")
            choice = summary.choice(run, int(state.step), rows)
            for line in summary.footer(run, state, evaluation, choice):
                journal.say(line)
            scores = None
            if evaluation.test_embeddings is not None:
                main = evaluation.test_embeddings[MAIN]
                scores = query_scores.of_run(run, main, workdir, step=int(state.step))
                query_scores.write(scores, workdir)
                journal.say(summary.intervals(scores))
            report.finished(choice, evaluation.scores, **summary.facts(run))
            for line in summary.pictures_of(
                run, state, evaluation, workdir, scores, evaluator=evaluator
            ):
                journal.say(line)
            if host_batches.skipped:
                skipped = len(host_batches.skipped)
                journal.say(f"{skipped} training images could not be read: see above")
    return evaluation.test_scores


def _restored(
    run: Run,
    checkpoints: Checkpoints,
    report: results.Report,
    say: Callable[[str], None],
) -> tuple[TrainState, list[dict[str, float]], list[float]]:
    """The state to start from, the metrics since the last report, and the scores of evaluations."""
    restored = checkpoints.restore(run.shapes, run.placements, repair=True)
    if restored is None:
        return initial_state.first_state(run, say=say), [], []
    state, notes = restored
    report.earlier_seconds = notes["seconds"]
    return state, notes["window"], notes["history"]


def _reload_best(state: TrainState, run: Run, checkpoints: Checkpoints) -> TrainState:
    """The best parameters and statistics so far; the optimizer's moments stay, as published."""
    checkpoints.wait()
    best, _ = checkpoints.load(checkpoints.best(), run.shapes, run.placements)
    return state._replace(params=best.params, model_state=best.model_state)


def compiled_step(run: Run) -> Callable:
    """The train step, compiled for the devices: `(state, batch, signal) -> (state, results)`.

    Results are `(metrics, signal)`: the largest signal that any process has received.
    """
    everywhere = run.shards.everywhere
    # Sharded proxies stay where they are: the embeddings of all devices are copied to them.
    gather_fn = functools.partial(_copy, everywhere=everywhere) if run.runtime.sharded else None
    step_fn = train_step(
        run.method,
        run.optimizer,
        normalize_fn=run.normalize_fn,
        seed=run.seed,
        chunk=run.chunk,
        gather_fn=gather_fn,
    )

    def step_and_signal(state, batch, signal):
        state, metrics = step_fn(state, batch)
        return state, (metrics, signal.max())

    return jax.jit(step_and_signal, donate_argnums=0, out_shardings=(run.placements, everywhere))


def _copy(tree: Any, *, everywhere: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, everywhere), tree)


@contextlib.contextmanager
def batches(run: Run, start_step: int = 0) -> Iterator[pipeline.Batches]:
    """This host's rows of the batches of steps `start_step + 1` on, without an end."""
    with pipeline.train(
        run.train,
        sample_fn=run.sample_fn,
        transform_fn=run.transform_fn,
        seed=run.seed,
        start=start_step,
        host=jax.process_index(),
        hosts=jax.process_count(),
        workers=run.runtime.workers,
        cache=run.runtime.cache,
        unreadable=run.unreadable,
    ) as host_batches:
        yield host_batches


def _evaluate_untrained(
    run: Run, state: TrainState, evaluator: Evaluator, journal: Journal, workdir: pathlib.Path
) -> None:
    """Reports the scores of the raw pixels, and draws the first frame of the movie."""
    if baseline := evaluator.pixel_scores():
        journal.say(f"raw pixels, before training: R@1 {100 * baseline['R@1']:.1f}")
        journal.evaluation(0, baseline, split="raw")
    if run.evaluation.frames:
        summary.frame(run, evaluator.embeddings(state, run.test), workdir, 0)


def _evaluate(
    run: Run,
    state: TrainState,
    evaluator: Evaluator,
    journal: Journal,
    workdir: pathlib.Path,
    step: int,
) -> Evaluation:
    is_end = step == run.steps
    evaluation = evaluator.evaluate(state, clustering=is_end or not run.evaluation.clusters_at_end)
    for split in ("test", "val"):
        if scores := evaluation.of_split(split):
            journal.evaluation(step, scores, split=split, shown=run.selection.score)
    if not run.selection.is_last and math.isnan(evaluation.scores.get(run.selection.key, math.nan)):
        raise ValueError(
            f"select={run.selection.rule!r}: {run.selection.split} has no {run.selection.score}, "
            "for which it may have too few images"
        )
    if run.evaluation.projector and evaluation.test_embeddings is not None:
        classes = [run.test.names[label] for label in run.test.labels]
        embeddings = evaluation.test_embeddings[MAIN]
        journal.projector(step, embeddings, classes, count=run.evaluation.projector)
    if run.evaluation.frames and evaluation.test_embeddings is not None:
        summary.frame(run, evaluation.test_embeddings, workdir, step)
    return evaluation
