"""The text that a run reports: header, footer and warnings; and the frames of its movie."""

import pathlib
from typing import Any

import jax
import numpy as np

from dmljax import metrics
from dmljax.adapt.trees import path_of
from dmljax.data.splits import Split
from dmljax.files.run_folder import Chosen, RunFolder, first_best
from dmljax.hints import counted
from dmljax.nets.layers import impl
from dmljax.report import pictures
from dmljax.report.scores_file import QueryScores
from dmljax.runs.folder import describe_clustering, describe_score
from dmljax.train import start
from dmljax.train.devices import describe_determinism
from dmljax.train.evaluation import MAIN, Evaluation
from dmljax.train.journal import read, table
from dmljax.train.run import Run
from dmljax.train.step import TrainState

_LAST = "the last step was chosen (select=last)"
_EASY = 0.9  # Where raw pixels have this R@1, a net that has learned can be below them.


def header(run: Run, state: TrainState) -> list[str]:
    """Describes the data, the net, the batches and the devices of a run in a line or two."""
    parameters = f"{sum(x.size for x in jax.tree.leaves(state.params)):,} parameters"
    if run.frozen:
        leaves = jax.tree_util.tree_leaves_with_path(state.params)
        learned = sum(x.size for keys, x in leaves if path_of(keys) not in run.frozen)
        parameters += f", {learned:,} of them learn (trained={run.options.trained['name']})"
    platform, workers = jax.devices()[0].platform, run.workers(run.train, is_endless=True)
    splits = [_counts(run.train, "training image", "class")]
    if run.held_out is not None:
        splits.append(_held_out(run, run.held_out))
    splits.append(_counts(run.test, "test image", "class"))
    searches = counted(len(run.neighbor_steps), "time")
    images = f"{run.transform_fn.title} for training, {run.eval_transform_fn.title} for evaluation"
    notes = [
        f"{run.options.dataset['name']}: {', '.join(splits)}",
        f"{parameters}, pretraining: {run.pretraining()}",
        f"images: {images}, {run.normalization}",
        f"batches of {run.batch_size} on {counted(run.shards.size, f'{platform} device')}",
        impl.describe(getattr(run.net, "impl", "auto"), platform),
        f"images are read by {counted(workers, 'process')}" if workers else "",
        run.attention_note,
        describe_determinism(platform) if run.options.runtime.deterministic else "",
        run.sampler_note,
        f"the nearest classes are searched {searches}" if run.neighbor_steps else "",
    ]
    line = "; ".join(filter(None, notes))
    if start_step := int(state.step):
        return [f"{line}; continuing from step {start_step}"]
    names = run.options.net["name"], run.options.dataset["name"]
    hint = None if run.options.has_pretrained else start.missing_weights_note(*names)
    return [x for x in (hint, line, run.input_note) if x]


def _counts(split: Split, image: str, label: str) -> str:
    return f"{counted(len(split), image)} of {counted(len(split.names), label)}"


def _held_out(run: Run, split: Split) -> str:
    """Describes the held-out classes, and says if they choose the checkpoint."""
    queries = "" if split.query is None else f"{int(split.query.sum()):,} of them queries"
    is_chosen_by = not run.selection.is_last and run.selection.split == "val"
    chosen = f"their {run.selection.score} chooses the checkpoint" if is_chosen_by else ""
    notes = ", ".join(filter(None, (queries, chosen)))
    return _counts(split, "image", "held-out class") + (f" ({notes})" if notes else "")


def footer(run: Run, state: TrainState, evaluation: Evaluation, choice: Chosen) -> list[str]:
    """Returns the table of scores, and the reason for the choice of the step."""
    reason = "" if choice.sentence == _LAST else choice.sentence  # otherwise it is not explained
    notes = [f"test split {describe_score(run, state)}", describe_clustering(run), reason]
    return ["", table(evaluation.test_scores), *filter(None, notes)]


def below_pixels(run: Run, step: int, workdir: pathlib.Path) -> str | None:
    """Returns a warning if R@1 is not above that of raw pixels after half of the steps, or None.

    The loss of such a run may fall nevertheless, above all with proxies of very many classes. Only
    the first evaluation of the second half gives the warning.
    """
    rows = read(RunFolder(workdir).metrics)
    pixels = next((row["raw/R@1"] for row in rows if "raw/R@1" in row), _EASY)
    scores = {row["step"]: row["test/R@1"] for row in rows if "test/R@1" in row and row["step"]}
    best, late_steps = max(scores.values(), default=0.0), [x for x in scores if 2 * x >= run.steps]
    if pixels >= _EASY or late_steps != [step] or best > pixels:
        return None
    return (
        f"warning: after {step:,} of {run.steps:,} steps the best test/R@1 is {100 * best:.1f}, "
        f"and R@1 of raw pixels is {100 * pixels:.1f}: the net has learned little that helps on "
        "these classes. Try another optimizer.rate, another loss, or with proxies a higher rate "
        "for them (optimizer.groups: path '^proxies'): docs/choosing.md"
    )


def intervals(scores: QueryScores, average: str = "queries") -> str:
    """Describes how much the main test scores would vary with other test classes."""
    ranges = []
    for name in ("R@1", "MAP@R"):
        low, high = metrics.interval(scores.values[name], groups=scores.labels, over=average)
        if not np.isnan(low):
            ranges.append(f"{name} {100 * low:.1f} to {100 * high:.1f}")
    note = metrics.interval_note(scores.labels[scores.first > 0])
    text = " ".join(filter(None, [", ".join(ranges), note and f"({note})" if ranges else note]))
    averaged = ", of means over classes" if average == "classes" else ""
    return f"{metrics.level_text()} ranges over test classes{averaged}: {text}"


def choice(run: Run, step: int, rows: list[dict]) -> Chosen:
    """Returns the chosen step and the reason. `rows` are the lines of `metrics.jsonl`."""
    selection, key = run.selection, run.selection.key
    scores = {row["step"]: row[key] for row in rows if key in row and row["step"]}
    best, last = first_best(scores) or step, max(scores, default=step)
    uses_test = selection.split == "test" and bool(run.reload_steps or not selection.is_last)
    percent = {step: f"{100 * score:.1f}" for step, score in scores.items()}
    if selection.is_last:
        sentence = _LAST
        if scores and scores[best] > scores[last]:
            sentence += (
                f", but {key} was higher at step {best}: {percent[best]}, now {percent[last]}. To "
                "choose the step on held-out classes: --config.held_out=0.2 --config.select=val"
            )
        return Chosen(step, None, None, 1, sentence, uses_test)
    sentence = f"step {step} was chosen by {key}"
    if len(scores) > 1:
        count = f"{len(scores)} evaluations (step {last}: {percent[last]})"
        sentence += f": {percent[best]} is the highest of {count}"
    return Chosen(step, selection.score, selection.split, len(scores), sentence, uses_test)


def facts(run: Run) -> dict[str, Any]:
    """Returns the fields of `result.json` that every run has, finished or not."""
    return {
        "data": {
            name: {"images": len(split), "classes": len(split.names)}
            for name, split in run.splits.items()
        },
        "pretraining": run.start_folder or run.weights,
        "preprocessing": run.preprocessing,
        "average": run.options.evaluate.average,
        "seed": run.options.seed,
        "steps": run.steps,
    }


def frame(run: Run, embeddings: dict[str, np.ndarray], workdir: pathlib.Path, step: int) -> None:
    """Draws the embeddings of the test split after a step, for the movie."""
    if jax.process_index() == 0:
        folder = RunFolder(workdir).frames
        folder.mkdir(exist_ok=True)
        path = folder / f"{step:09d}.png"
        pictures.frame(embeddings[MAIN], run.test, path, title=f"step {step:,}")
