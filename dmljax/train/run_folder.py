"""What a run has learned: its embeddings, its scores, and its checkpoint opened again."""

from __future__ import annotations

import collections
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dmljax.data.splits import Split, record_name, subset
from dmljax.methods.base import Inspect
from dmljax.report import pictures as report
from dmljax.train import build as runs
from dmljax.train import config as config_lib
from dmljax.train import evaluation as evaluate
from dmljax.train import journal as log
from dmljax.train import optimizers
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.step import TrainState

__all__ = ["Evaluator", "export", "load", "reopen", "rule", "score"]


class Evaluator:
    """Scores of the splits of a run; the embedding function is compiled once."""

    def __init__(self, made: runs.Run):
        self._made = made
        splits = (made.train, made.held_out, made.test) if made.config["runtime"]["cache"] else ()
        self._caches = [(split, {}) for split in splits if split is not None]
        self._skipped: collections.Counter[str] = collections.Counter()
        method, inspect = made.method, made.method.inspect or Inspect()

        def embed(params, model_state, images):
            images = made.normalize_fn(images)
            out = {"": method.embed(params, model_state, images)}
            if inspect.parts is not None:
                out |= inspect.parts(params, model_state, images)
            return out

        self._embed = jax.jit(embed, out_shardings=made.shards.rows)

    def embeddings(self, state: TrainState, split: Split) -> dict[str, np.ndarray]:
        """Of every image, under '' the method's own, beside them its parts."""
        params = optimizers.averaged(state.params, state.opt_state)
        return self._go(lambda images: self._embed(params, state.model_state, images), split)

    def _go(self, embed_fn: Callable, split: Split) -> Any:
        config = self._made.config
        return evaluate.embed(
            embed_fn,
            split,
            transform_fn=self._made.eval_transform_fn,
            batch_size=config["evaluate"]["batch_size"],
            shards=self._made.shards,
            cache=next((cache for own, cache in self._caches if own is split), False),
            workers=config["runtime"]["workers"],
            unreadable=config["runtime"]["unreadable"],
            skipped=self._skipped,
        )

    def score(
        self, state: TrainState, embeddings: dict[str, np.ndarray], split: Split
    ) -> dict[str, float]:
        """All that the config asks of these embeddings."""
        options = self._made.config["evaluate"]
        scores = evaluate.score(
            embeddings[""],
            split,
            ks=options["ks"],
            clustering=options["clustering"],
            seeds=options["seeds"],
            devices=self._made.shards.mesh.local_devices,
        )
        for name, part in embeddings.items():
            if name:
                found = evaluate.score(part, split, ks=(1,), clustering=False)
                scores[f"{name}/R@1"] = found["R@1"]
        if options["refine"]:
            scores |= self._refined(state, embeddings[""], split)
        if options["knn"] and set(split.names) & set(self._made.train.names):
            scores["knn"] = self._knn(state, embeddings[""], split)
        return scores

    def _knn(self, state: TrainState, embeddings: np.ndarray, split: Split) -> float:
        """Accuracy of the vote of the nearest training images, by the names of the classes."""
        train = self._made.train
        place = {name: i for i, name in enumerate(split.names)}
        labels = np.array([place.get(name, -1) for name in train.names], np.int32)[train.labels]
        gallery = self.embeddings(state, train)[""]
        read, there = (np.isfinite(x).all(axis=1) for x in (embeddings, gallery))
        k = self._made.config["evaluate"]["knn"]
        return evaluate.knn_accuracy(
            embeddings[read], split.labels[read], gallery[there], labels[there], k=k
        )

    def raw(self) -> dict[str, float] | None:
        """Scores of the pixels themselves, where they are few: what a net has to beat."""
        split = self._made.test
        size = int(np.prod(runs.image_shape(self._made, test=True)))
        if size > 64 * 64 * 3 or len(split) > 20_000:
            return None
        flat = self._go(lambda images: images.reshape(len(images), -1), split)
        return evaluate.score(flat, split, ks=(1,), clustering=False)

    def frame(self, embeddings: np.ndarray, workdir: pathlib.Path, step: int) -> None:
        """A picture of the test half at this step, for the movie."""
        if jax.process_index() == 0:
            folder = workdir / "frames"
            folder.mkdir(exist_ok=True)
            path = folder / f"{step:09d}.png"
            report.frame(embeddings, self._made.test, path, title=f"step {step:,}")

    def all(
        self,
        state: TrainState,
        writer: log.Log | None = None,
        step: int = 0,
        workdir: pathlib.Path | None = None,
    ) -> dict[str, float]:
        """Scores of the test split and of held-out classes, named 'test/R@1'."""
        splits = {"test": self._made.test, "val": self._made.held_out}
        found = {}
        for name, split in splits.items():
            if split is None or not len(split):
                continue
            embeddings = self.embeddings(state, split)
            if name == "test" and workdir and self._made.config["evaluate"]["frames"]:
                self.frame(embeddings[""], workdir, step)
            scores = self.score(state, embeddings, split)
            if writer is not None:
                writer.evaluation(step, scores, split=name)
            found |= {f"{name}/{k}": v for k, v in scores.items()}
        return found

    def _refined(self, state: TrainState, embeddings: np.ndarray, split: Split) -> dict[str, float]:
        """Scores of what the method makes of a split's embeddings together, at test time."""
        refine = self._made.method.inspect.refine
        params = optimizers.averaged(state.params, state.opt_state)
        query, gallery = split.query, split.gallery
        better = refine(params, state.model_state, embeddings, query=query, gallery=gallery)
        options = self._made.config["evaluate"]
        found = evaluate.score(np.asarray(better), split, ks=options["ks"], clustering=False)
        return {f"refined/{k}": v for k, v in found.items()}


def rule(made: runs.Run, state: TrainState, *, asked: bool = False) -> str:
    """What a score has to be read with; `asked`: the step was, so nothing selected it."""
    h, w, channels = image = runs.image_shape(made, test=True)
    images = jax.ShapeDtypeStruct((1, *image), jax.numpy.uint8)
    out = jax.eval_shape(
        lambda x: made.method.embed(state.params, state.model_state, made.normalize_fn(x)), images
    )
    how = "as asked" if asked else f"select={made.config['select']}"
    if made.reload_best_at:
        split = "val" if made.config["select"] == "val" else "test"
        at = ", ".join(str(step) for step in made.reload_best_at)
        how += f"; the best by {split} R@1 reloaded at {at}"
    return (
        f"after step {int(state.step)} ({how}), seed "
        f"{made.config['seed']}, {out.shape[1]}-d embeddings of {w} x {h} x {channels} images, "
        f"pretraining: {runs.weights(made.config) or 'none'}"
    )


# --- of a run folder ----------------------------------------------------------------------------


def load(
    workdir: str | os.PathLike, *, step: int | None = None
) -> tuple[Callable, dict[str, Any], dict[str, Any]]:
    """`(embed_fn, variables, config)` of a run: `embed_fn(variables, images uint8) -> [b d]`.

    The checkpoint that the run's `select` chose, or that of `step`.
    """
    made, state = reopen(workdir, step=step)
    variables = {
        "params": optimizers.averaged(state.params, state.opt_state),
        "model_state": state.model_state,
    }

    @jax.jit
    def embed_fn(variables, images):
        images = made.normalize_fn(images)
        return made.method.embed(variables["params"], variables["model_state"], images)

    return embed_fn, variables, made.config


def reopen(
    workdir: str | os.PathLike, *, step: int | None = None, overrides: Sequence[str] = ()
) -> tuple[runs.Run, TrainState]:
    """A run and its state: of `step`, or the best by its `select`, or the newest that is whole.

    `overrides` such as '--config.dataset.root=elsewhere' change its config.
    """
    workdir = pathlib.Path(workdir)
    file = workdir / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{workdir} holds no run: there is no {file}")
    made = runs.build(config_lib.override(json.loads(file.read_text()), overrides))
    checkpoints = Checkpoints(workdir / "checkpoints", reading=True)
    try:
        there = checkpoints.steps()
        if step is None and there and made.config["select"] != "last":
            step = checkpoints.best()
        if step is not None:
            if step not in there:
                raise ValueError(f"{workdir} has the checkpoints {there}, not {step}")
            if fault := checkpoints.fault(step):
                raise ValueError(
                    f"checkpoint {step} of {workdir} is damaged ({fault}): name another of {there} "
                    "by --step"
                )
            found = checkpoints.load(step, runs.state_shapes(made), runs.placed(made))
        else:
            found = checkpoints.restore(runs.state_shapes(made), runs.placed(made))
    finally:
        checkpoints.close()
    if found is None:
        raise FileNotFoundError(f"{workdir} holds no checkpoint")
    return made, found[0]


def score(
    workdir: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, float]:
    """`--mode=evaluate`: the scores of a checkpoint on 'train', 'val' or 'test'."""
    made, state = reopen(workdir, step=step, overrides=overrides)
    half = _half(made, split)
    evaluator = Evaluator(made)
    scores = evaluator.score(state, evaluator.embeddings(state, half), half)
    print(log.table(scores))
    asked = step is not None
    print(f"{split} split, {len(half):,} images, {rule(made, state, asked=asked)}")
    return scores


def _half(made: runs.Run, split: str) -> Split:
    halves = {"train": made.train, "val": made.held_out, "test": made.test}
    if halves.get(split) is None:
        known = ", ".join(k for k, v in halves.items() if v is not None)
        hint = "; set validation to hold classes out" if split == "val" else ""
        raise ValueError(f"there is no split {split!r} here: choose {known}{hint}")
    return halves[split]


def export(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    dtype: str = "float32",
    chunk: int = 4096,
    overrides: Sequence[str] = (),
) -> pathlib.Path:
    """`--mode=embed`: writes `embeddings.npy` and `items.safetensors`: labels, and masks of query
    and gallery where the split has them; ids and class names as JSON in its metadata.

    Chunk by chunk; interrupted, the same call goes on where it was.
    """
    from safetensors.numpy import save_file

    if dtype not in ("float32", "float16"):
        raise ValueError(f"embeddings are written as float32 or float16, not {dtype}")
    made, state = reopen(workdir, step=step, overrides=overrides)
    half, out = _half(made, split), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    evaluator = Evaluator(made)
    what = {"run": str(pathlib.Path(workdir).absolute()), "split": split, "step": int(state.step)}
    what |= {"dtype": dtype, "count": len(half), "overrides": list(overrides)}
    progress = out / "progress.json"
    done = 0
    if progress.exists():
        begun = json.loads(progress.read_text())
        if {k: begun[k] for k in what} != what:
            raise ValueError(f"{out} was begun with {begun}: finish that, or choose another folder")
        done = begun["done"]
    elif any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: choose another folder")
    else:
        _write_json(progress, {**what, "done": 0})
    file, array = out / "embeddings.npy", None
    while done < len(half):
        rows = np.arange(done, min(done + chunk, len(half)))
        found = evaluator.embeddings(state, subset(half, rows))[""]
        if array is None:
            shape = (len(half), found.shape[1])
            mode = "r+" if done else "w+"
            array = np.lib.format.open_memmap(file, mode=mode, dtype=dtype, shape=shape)
        array[rows] = found
        array.flush()
        done = int(rows[-1]) + 1
        _write_json(progress, {**what, "done": done})
    ids = [record_name(half.records, i) for i in range(len(half))]
    notes = {"ids": json.dumps(ids), "classes": json.dumps(half.names), "run": str(workdir)}
    items = {"labels": half.labels, "query": half.query, "gallery": half.gallery}
    items = {name: part for name, part in items.items() if part is not None}
    save_file(items, out / "items.safetensors", metadata=notes)
    progress.unlink(missing_ok=True)
    print(f"{file}: {len(half):,} embeddings; items.safetensors: their labels and names")
    return out


def _write_json(file: pathlib.Path, values: dict[str, Any]) -> None:
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(values))
    os.replace(aside, file)
