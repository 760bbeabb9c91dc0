"""A run from its config to its last line: train, then report."""

import contextlib
import os
import pathlib
import time
from typing import Any, NamedTuple

import jax

from dmljax.config import fields
from dmljax.config.build import build
from dmljax.data.splits import warn_of_one_class
from dmljax.files import parts
from dmljax.files.run_folder import RunFolder
from dmljax.hints import counted
from dmljax.report import pictures as drawing
from dmljax.runs import folder, frozen, page, summary
from dmljax.train import compilation, features, loop, resident
from dmljax.train import start as start_lib
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.devices import check_determinism, on_every_device
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.interrupts import Interrupts, Stopped
from dmljax.train.journal import Journal, Report, read
from dmljax.train.options import Movie
from dmljax.train.run import Run
from dmljax.train.step import TrainState
from dmljax.weights.converted import file_digest


def run(
    config: Any, workdir: str | os.PathLike, *, overwrite: bool = False, source: str = ""
) -> dict[str, float]:
    """Trains, or continues to train, and returns the scores of the test split.

    `source` is the name of the config as the command line gives it, for `result.json`.
    """
    workdir, start = pathlib.Path(workdir), time.monotonic()
    compilation.compiled()  # counts from here on
    run = build(config)
    compilation.keep_programs()
    check(run)
    if run.options.runtime.deterministic:
        check_determinism(jax.devices()[0].platform, os.environ.get("XLA_FLAGS", ""))
    run_digests = fields.digests_of(
        run.config,
        data=run.data_digest,
        weights=None if run.weights is None else file_digest(run.weights),
        start=start_lib.digest(run.options.start),
    )
    with (
        folder.claimed(workdir, run.config, run_digests, overwrite=overwrite),
        Checkpoints(
            RunFolder(workdir).checkpoints,
            keep=run.options.checkpoint.keep,
            base=start_lib.base_of(run),
            class_rows=run.class_rows,
        ) as checkpoints,
    ):
        report = Report(workdir, source=source, digests=run_digests._asdict(), start=start)
        try:
            return _train_and_report(run, workdir, checkpoints, report)
        except Exception as error:
            report.failed(error, **summary.facts(run))
            raise


def check(run: Run) -> None:
    """Raises an error of one line if the run cannot start here. It may be opened nevertheless."""
    if (count := run.options.runtime.devices or 0) > run.shards.size:
        here = counted(run.shards.size, "device")
        raise ValueError(f"runtime.devices={count}, and this process has {here}: leave it out")
    start_lib.check_weights(run)


def compute_features(config: Any, *, shard: parts.Shard) -> tuple[int, pathlib.Path]:
    """Computes a part of the cached features of a run; returns the image count and the folder."""
    run = build(config)
    if run.cache is None:
        raise ValueError("--features needs a config with features='cached', such as folder.py")
    check(run)
    count = features.compute_of_run(run, start_lib.first_state(run), shard=shard)
    return count, run.cache.entries[0].folder.parent


def _train_and_report(
    run: Run, workdir: pathlib.Path, checkpoints: Checkpoints, report: Report
) -> dict[str, float]:
    origin: list[str] = []
    restored = start_lib.restore(run, checkpoints, say=origin.append)
    report.earlier_seconds = restored.seconds
    start_step = int(restored.state.step)
    features.compute_of_run(run, restored.state)
    if start_step == 0:
        restored = restored._replace(state=start_lib.centered(run, restored.state))
    with contextlib.ExitStack() as stack:
        journal = Journal(
            workdir,
            step=start_step,
            total=run.steps,
            write=jax.process_index() == 0,
            repeats_evaluation=restored.repeats_evaluation,
        )
        stack.callback(journal.close)
        interrupts = stack.enter_context(Interrupts(run.shards))
        evaluator = Evaluator(run, interrupts=interrupts)
        observer = _Observer(run, workdir, evaluator, journal)
        for line in [*summary.header(run, restored.state), *origin]:
            journal.say(line)
        warn_of_one_class(
            run.train, "the training split", result="it has no other class to be told from"
        )
        warn_of_one_class(run.test, "the test split")
        data = resident.choose(run, say=journal.say)  # may refuse: before an evaluation takes time
        if start_step == 0:
            try:
                with interrupts.stoppable():
                    observer.before(restored.state)
            except Stopped:
                journal.say("stopped before step 1; the same command starts again")
                interrupts.leave()
        host_batches = stack.enter_context(
            loop.batches(run, start_step, workdir=workdir, resident=data)
        )
        try:
            state, evaluation = loop.train(
                run,
                restored,
                host_batches=host_batches,
                evaluator=evaluator,
                checkpoints=checkpoints,
                journal=journal,
                interrupts=interrupts,
                report=report,
                workdir=workdir,
                evaluated_fn=observer.during,
                resident=data,
            )
            if run.method.inspect is not None:  # process 0 alone draws what goes on inside
                state = on_every_device(state, run.shards)
            interrupts.report(lambda: observer.after(state, evaluation, report))
        except Stopped:
            journal.say("stopped after training, saved; the same command repeats what follows it")
            interrupts.leave()
        if skipped := len(host_batches.skipped):
            journal.say(f"{counted(skipped, 'training image')} could not be read: see above")
    return evaluation.test_scores


class _Observer(NamedTuple):
    """Reports what is not part of the training: baselines, pictures, warnings and the result."""

    run: Run
    workdir: pathlib.Path
    evaluator: Evaluator
    journal: Journal

    def before(self, state: TrainState) -> None:
        """Evaluates raw pixels and the backbone; draws the first frame of the movie."""
        if baseline := self.evaluator.pixel_scores():
            self.journal.say(f"raw pixels, before training: R@1 {100 * baseline['R@1']:.1f}")
            self.journal.evaluation(0, baseline, split="raw")
        if self.run.options.evaluate.frozen:
            frozen.evaluate(self.run, self.evaluator, self.journal, self.workdir)
        if isinstance(self.run.options.pictures, Movie):
            embeddings = self.evaluator.embeddings(state, self.run.test)
            summary.frame(self.run, embeddings, self.workdir, 0)

    def during(self, step: int, evaluation: Evaluation) -> None:
        """Writes points of the projector and a frame of the movie; warns of a useless net."""
        pictures, embeddings = self.run.options.pictures, evaluation.test_embeddings
        if embeddings is not None and pictures is not None and pictures.projector:
            classes = [self.run.test.names[label] for label in self.run.test.labels]
            self.journal.projector(step, embeddings[MAIN], classes, count=pictures.projector)
        if embeddings is not None and isinstance(pictures, Movie):
            summary.frame(self.run, embeddings, self.workdir, step)
        if line := summary.below_pixels(self.run, step, self.workdir):
            self.journal.say(line)

    def after(self, state: TrainState, evaluation: Evaluation, report: Report) -> None:
        """Writes the last lines of a run, `result.json`, scores of queries, page and movie."""
        run, workdir, say = self.run, self.workdir, self.journal.say
        files, step, movie = RunFolder(workdir), int(state.step), run.options.pictures
        choice = summary.choice(run, step, read(files.metrics))
        for line in summary.footer(run, state, evaluation, choice):
            say(line)
        values, rows, embedded = dict(evaluation.scores), list[frozen.Against](), None
        if (test := evaluation.test_embeddings) is not None:
            scores = {"test": folder.query_scores(run, test[MAIN], workdir, step=step)}
            folder.write_scores(scores["test"], workdir)
            embedded = folder.Embedded(run, state, workdir, self.evaluator, test, scores["test"])
            if (val := evaluation.val_embeddings) is not None and files.frozen.exists():
                scores["val"] = folder.query_scores(run, val, workdir, split="val", step=step)
            rows = frozen.compare(run, workdir, scores)
            ranges = summary.intervals(scores["test"], run.options.evaluate.average)
            for line in [ranges, *frozen.lines(run, rows, workdir)]:
                say(line)
            values |= {f"{frozen.PREFIXES[row.split]}/{row.name}": row.frozen for row in rows}
        against = [row._asdict() for row in rows]
        report.finished(choice, values, against_frozen=against, **summary.facts(run))
        if movie is None or embedded is None:
            return
        start = time.perf_counter()
        if page.write(embedded):
            say(f"report: {files.page} ({time.perf_counter() - start:.0f} s)")
        if isinstance(movie, Movie):
            times = {"frame_ms": movie.frame_ms, "last_frame_ms": movie.last_frame_ms}
            drawing.movie(files.frames, files.movie, **times)
            say(f"movie: {files.movie}")
