"""One loop for every method: restore, step, log, evaluate, save."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import time
from typing import Any

import jax
import numpy as np

from dmljax import kernels
from dmljax.data import sampling
from dmljax.report import inside
from dmljax.report import pictures as report
from dmljax.train import build as runs
from dmljax.train import config as config_lib
from dmljax.train import devices as sharding
from dmljax.train import hosts, optimizers
from dmljax.train import journal as log
from dmljax.train import run_folder as trained
from dmljax.train.checkpoints import Checkpoints, forget, lock
from dmljax.train.step import TrainState

__all__ = ["run"]

_IN_FLIGHT = 2  # steps; more dead-lock the collectives of several CPU devices


def run(config: Any, workdir: str | os.PathLike, *, overwrite: bool = False) -> dict[str, float]:
    """Trains, or goes on training, and returns the scores of the test split."""
    workdir = pathlib.Path(workdir)
    made = runs.build(config)
    runs.check(made)
    with contextlib.ExitStack() as stack:

        def claim():
            try:
                workdir.mkdir(parents=True, exist_ok=True)
                stack.callback(lock(workdir).close)
                _keep_config(made.config, workdir, overwrite)
            except OSError as error:
                raise OSError(
                    f"{workdir} cannot be written: {error.strerror}. Make room there, ask for the "
                    "permission, or choose another --workdir"
                ) from error

        hosts.first(claim)
        hosts.shared(workdir / "config.json")
        keep = made.config["checkpoint"]["keep"]
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", keep=keep))
        return _train(made, workdir, checkpoints)


def _keep_config(config: dict[str, Any], workdir: pathlib.Path, overwrite: bool) -> None:
    """Writes config.json, or refuses a run folder of another config that has come to something."""
    file = workdir / "config.json"
    if file.exists():
        old = json.loads(file.read_text())
        other = sorted(
            f"{path} ({a!r} there, {b!r} here)"
            for path, a, b in config_lib.differences(old, config)
            if not path.startswith(("runtime", "notes"))
        )
        begun = (workdir / "metrics.jsonl").exists() or any(
            (workdir / "checkpoints").glob("[0-9]*")
        )
        if other and begun and not overwrite:
            raise ValueError(
                f"{workdir} holds a run of another config: {'; '.join(other[:5])}. Choose another "
                "--workdir, or --overwrite to delete that run"
            )
        if other:
            forget(workdir / "checkpoints")
            forget(workdir / "checkpoints_damaged")
            for name in ("frames", "tensorboard"):
                shutil.rmtree(workdir / name, ignore_errors=True)
            for pattern in ("metrics.jsonl", "speed.jsonl", "*.png", "movie.gif"):
                for old in workdir.glob(pattern):
                    old.unlink()
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(aside, file)


def _train(made: runs.Run, workdir: pathlib.Path, checkpoints: Checkpoints) -> dict[str, float]:
    main = jax.process_index() == 0
    places = runs.placed(made)
    restored = checkpoints.restore(runs.state_shapes(made), places, repair=True)
    if restored is None:
        state, memory = runs.first_state(made), {"window": []}
    else:
        state, memory = restored
    begun = int(state.step)
    if begun in made.reload_best_at:  # what is saved at a step is its state before that
        state = _reload(state, checkpoints, made)
    step_fn = runs.step_fn(made, places)
    evaluator = trained.Evaluator(made)
    writer = log.Log(workdir, step=begun, total=made.total, write=main)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        stop = stack.enter_context(_Stop(made.shards))
        if main:
            writer.say(_head(made, state, begun))
        if begun == 0:
            baseline = evaluator.raw()
            if baseline:
                writer.say(f"raw pixels, before training: R@1 {100 * baseline['R@1']:.1f}")
                writer.evaluation(0, baseline, split="raw")
            if made.config["evaluate"]["frames"]:
                evaluator.frame(evaluator.embeddings(state, made.test)[""], workdir, 0)
        fed = stack.enter_context(runs.batches(made, begun))
        pending: collections.deque = collections.deque()
        good = begun  # the last step whose loss and gradient were finite
        scores: dict[str, float] = {}
        rule = "val/R@1" if made.config["select"] == "val" else "test/R@1"

        def collect(keep: int) -> None:
            nonlocal good
            while len(pending) > keep:
                step, found = pending.popleft()
                metrics, signalled = jax.device_get(found)
                stop.heard(int(signalled))
                memory["window"].append(_finite(step, metrics, good))
                good = step
                if step % made.every["log"] == 0 or step == made.total:
                    missing = len(fed.skipped)
                    means = _means(memory["window"])
                    writer.train(step, means, batch=made.batch, unreadable=missing)
                    memory["window"].clear()

        def save(score: float | None = None) -> None:
            collect(0)
            writer.flush()
            checkpoints.save(state, memory, score=score)

        feed = sharding.prefetch(fed, made.shards.rows)
        for step in range(begun + 1, made.total + 1):
            waiting = time.perf_counter()
            batch = next(feed)
            writer.waited(time.perf_counter() - waiting)
            signalled = stop.row()
            with jax.transfer_guard("disallow"):
                state, found = step_fn(state, batch, signalled)
            pending.append((step, found))
            collect(_IN_FLIGHT)
            if step % made.every["evaluate"] == 0 or step == made.total:
                collect(0)
                scores = evaluator.all(state, writer, step, workdir)
                save(scores.get(rule))
                writer.resume(step)
            elif step % made.every["save"] == 0:
                save()
            if step in made.reload_best_at:
                state = _reload(state, checkpoints, made)
            if stop.now:
                save()
                checkpoints.wait()
                writer.say(f"stopped after step {step}, saved; the same command goes on from there")
                stop.leave()
        checkpoints.wait()
        chosen = made.total
        if made.config["select"] != "last":
            chosen = checkpoints.best()
            if chosen != made.total:
                state, _ = checkpoints.load(chosen, runs.state_shapes(made), places)
                scores = {}
        if not scores:  # an earlier checkpoint is the best, or a finished run is asked for again
            scores = evaluator.all(state)
        embeddings = None
        if made.config["pictures"]:  # a matter of all processes
            embeddings = evaluator.embeddings(state, made.test)
        if main:
            _last_words(made, embeddings, state, scores, workdir, writer)
            if fed.skipped:
                writer.say(f"{len(fed.skipped)} training images could not be read: see above")
    return {k.removeprefix("test/"): v for k, v in scores.items() if k.startswith("test/")}


def _reload(state: TrainState, checkpoints: Checkpoints, made: runs.Run) -> TrainState:
    """The best parameters and statistics so far; the optimizer's moments stay, as published."""
    checkpoints.wait()
    best, _ = checkpoints.load(checkpoints.best(), runs.state_shapes(made), runs.placed(made))
    return state._replace(params=best.params, model_state=best.model_state)


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    return {k: float(np.mean([m[k] for m in window])) for k in window[-1]}


def _finite(step: int, metrics: dict[str, Any], good: int) -> dict[str, float]:
    metrics = {k: float(v) for k, v in metrics.items()}
    for name in ("loss", "gradient_norm"):
        if not np.isfinite(metrics[name]):
            before = f"finite until step {good}" if good else "from the start"
            raise FloatingPointError(
                f"the {name} is {metrics[name]} at step {step} ({before}): the last checkpoint is "
                "good. Lower optimizer.rate, set optimizer.clip, or look at the images of that step"
            )
    return metrics


def _head(made: runs.Run, state: TrainState, begun: int) -> str:
    count = sum(x.size for x in jax.tree.leaves(state.params))
    name = runs.named(made.config["dataset"])["name"]
    where = f"{made.shards.size} {jax.devices()[0].platform} device"
    impl = runs.named(made.config["net"]).get("impl", "auto")
    return (
        f"{name}: {len(made.train):,} training images of {len(made.train.names):,} classes, "
        f"{len(made.test):,} test images of {len(made.test.names):,}; {count:,} parameters, "
        f"pretraining: {runs.weights(made.config) or 'none'}; "
        f"batches of {made.batch} on {where}{'s' if made.shards.size > 1 else ''}; "
        f"{kernels.describe(impl, jax.devices()[0].platform)}"
        + _coverage(made)
        + (f"; going on from step {begun}" if begun else "")
    )


def _coverage(made: runs.Run) -> str:
    description = made.sample_fn.describe(sampling.group(made.train.labels))
    return f"; {description}" if description else ""


class _Stop:
    """SIGTERM and Ctrl-C end the run after the step; a second one ends it at once.

    Processes of one run get signals at different steps, or only one gets them, and must stop after
    the same step. So the signal travels with the steps and comes back with the metrics, which costs
    no wait. One process alone need not ask.
    """

    def __init__(self, shards: sharding.Shardings):
        self._shards, self._hit, self._agreed = shards, 0, 0
        self._rows = functools.cache(self._row)

    def __enter__(self):
        self._old = {s: signal.signal(s, self._on) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _on(self, number, frame):
        if self._hit:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._hit = number

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def row(self) -> jax.Array:
        """The signal that this process has got, or 0, on each of its devices."""
        return self._rows(int(self._hit))

    def _row(self, number: int) -> jax.Array:
        local = len(self._shards.mesh.local_devices)
        found = sharding.put({"stop": np.full(local, number, np.int32)}, self._shards.rows)
        return found["stop"]

    def heard(self, number: int) -> None:
        """What came back with a step."""
        self._agreed = self._agreed or number

    @property
    def now(self) -> bool:
        if jax.process_count() == 1:
            self._agreed = self._agreed or int(self._hit)
        return self._agreed > 0

    def leave(self) -> None:
        raise SystemExit(128 + self._agreed)


def _last_words(made, embeddings, state, scores, workdir, writer) -> None:
    """The table, the rule behind it, the pictures."""
    test = {k.removeprefix("test/"): v for k, v in scores.items() if k.startswith("test/")}
    writer.say("")
    writer.say(log.table(test))
    writer.say(f"test split {trained.rule(made, state)}")
    if embeddings is not None:
        names = _pictures(made, embeddings, state, workdir)
        writer.say(f"pictures: {workdir}/{', '.join(names)}")


def _pictures(made, embeddings, state, workdir) -> list[str]:
    """Draws them into the run folder; their names."""
    read, rng = runs.reader(made.test), np.random.default_rng(0)

    def shown(i):
        return made.eval_transform_fn(read(int(i)), rng)

    report.curves(log.read(workdir / "metrics.jsonl"), workdir / "curves.png")
    report.neighbours(embeddings[""], made.test, shown, workdir / "retrieval.png")
    report.embedding_map(embeddings[""], made.test, shown, workdir / "map.png")
    names = ["curves.png", "retrieval.png", "map.png"]
    if made.config["evaluate"]["frames"]:
        report.movie(workdir / "frames", workdir / "movie.gif")
        names.append("movie.gif")
    if made.method.inspect is not None:
        # This process alone draws, on one device of its own.
        params, model_state = jax.device_get(
            (optimizers.averaged(state.params, state.opt_state), state.model_state)
        )
        readable = np.flatnonzero(np.isfinite(embeddings[""]).all(axis=1))

        def bound(inspect_fn):
            def call(images):
                images = made.normalize_fn(jax.numpy.asarray(images))
                return jax.device_get(jax.jit(inspect_fn)(params, model_state, images))

            return call

        inspect_fns = made.method.inspect._asdict()
        if inspect_fns["synthetic_features"] is not None:
            key = jax.random.key(made.config["seed"])
            inspect_fns["synthetic_features"] = functools.partial(
                inspect_fns["synthetic_features"], key=key
            )
        names += inside.draw(
            workdir,
            labels=made.test.labels[readable],
            parts={name: part[readable] for name, part in embeddings.items() if name},
            inspect_fns={kind: bound(fn) for kind, fn in inspect_fns.items() if fn is not None},
            read_fn=lambda rows: np.stack([shown(readable[i]) for i in rows]),
        )
    return names
