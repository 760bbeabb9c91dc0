"""The scores that a config asks for, and the one that chooses the step of a run."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dmljax import metrics
from dmljax.config.data import Data
from dmljax.config.method import check_method
from dmljax.config.resolve import resolve
from dmljax.hints import check_known, hint
from dmljax.methods.base import Inspect, Method
from dmljax.train.evaluation import cut_names, prefix_name
from dmljax.train.options import EvaluationOptions, Options
from dmljax.train.run import Metrics, Selection

RANKINGS = ("refined", "mean_distance")


def check_evaluation(options: EvaluationOptions, data: Data, method: Method) -> None:
    """Raises if the data set or the method cannot give a score that the config asks for."""
    inspection = method.inspect or Inspect()
    if unknown := set(options.rankings) - set(RANKINGS):
        check_known("evaluate.rankings: there is no", unknown, RANKINGS)
    refines, has_parts = inspection.refine is not None, inspection.parts is not None
    is_impossible = {
        "evaluate.knn takes the class from training images, but the test split has other classes": (
            options.knn and not set(data.train.names) & set(data.test.names)
        ),
        "evaluate.rankings: this method does not refine embeddings": (
            "refined" in options.rankings and not refines
        ),
        "evaluate.rankings: 'mean_distance' needs learners, which this method does not have": (
            "mean_distance" in options.rankings and not has_parts
        ),
        "evaluate.rankings: 'mean_distance' cannot leave out the groups of this data set": (
            "mean_distance" in options.rankings and data.test.groups is not None
        ),
    }
    for message, is_wrong in is_impossible.items():
        if is_wrong:
            raise ValueError(message)


def metrics_of(options: EvaluationOptions) -> Metrics:
    """Collects the K of R@K and the metric functions, keyed by display name."""
    chosen_ks = metrics.KS if options.ks is None else options.ks
    if not chosen_ks or min(chosen_ks) < 1:
        raise ValueError(f"evaluate.ks={list(chosen_ks)} needs one or more K from 1, such as [1]")
    functions: dict[str, dict[str, Callable]] = {"ranks": {}, "clusterings": {}, "embeddings": {}}
    ks: list[int] = []
    for chosen in options.metrics:
        if chosen == "all":
            ks += chosen_ks
            functions["ranks"] |= metrics.RANKING_FNS
            functions["clusterings"] |= metrics.CLUSTERING_FNS
        elif chosen["name"] == "recall_at_k":
            ks += [chosen["k"]] if "k" in chosen else chosen_ks
        else:
            arguments = {k: v for k, v in chosen.items() if k != "name"}
            name = metrics.display_name(chosen["name"], arguments)
            functions[_argument_kind(chosen.function)][name] = chosen.function
    if options.clustering is None:
        functions["clusterings"] = {}
    return Metrics(tuple(dict.fromkeys(ks)), *functions.values())


def _argument_kind(function: Callable) -> str:
    """Returns what a metric takes: 'ranks', 'embeddings', or the labels of 'clusterings'."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(names) == 1:
        return "ranks"
    kind = {"embeddings": "embeddings", "labels": "clusterings"}.get(names[0] if names else "")
    if kind is None or len(names) != 2:
        raise ValueError(
            f"a metric has the arguments (ranks), (ranks, *, labels), (embeddings, labels) or "
            f"(labels, assignment), by these names, and not ({', '.join(names)})"
        )
    return kind


def check(config: Mapping[str, Any], wanted: Iterable[str] = ()) -> None:
    """Raises for what would end the run of a completed config at its start, as far as no data say.

    Also raises if the run would not compute the `wanted` scores, such as 'val/R@1'.
    """
    options = resolve(config)
    check_method(options)
    scores = metrics_of(options.evaluate)
    # Names of learners and of prefixes are known only with the net.
    if "/" not in options.select.partition("/")[2]:
        selection_of(options, scores, prefixes=(), part_names_fn=tuple)
    for score in wanted:
        name = score.removeprefix("test/").removeprefix("val/")
        if re.fullmatch(r"R@\d+", name) and int(name[2:]) not in scores.ks:
            raise ValueError(
                f"no evaluation computes {name}, because its K are {scores.ks}: add it to "
                "evaluate.ks, or leave the column out"
            )
        if score.startswith("val/") and options.held_out is None:
            raise ValueError(
                f"the score {score} needs held-out classes: held_out=0.2, or folds of the study"
            )


def selection_of(
    options: Options,
    scores: Metrics,
    *,
    prefixes: Sequence[int],
    part_names_fn: Callable[[], Sequence[str]],
) -> Selection:
    """Returns the score that chooses the step. `part_names_fn` names the parts of an embedding."""
    rule = options.select
    if rule == "last":
        selection = Selection("last", "test", "R@1")
        if not options.reload_best_at:
            return selection
    else:
        split, _, score = rule.partition("/")
        if split not in ("val", "test"):
            raise ValueError(
                "select must be 'last', or a score of a split such as 'val/R@1' or 'test/MAP@R', "
                f"not {rule!r}"
            )
        if split == "val" and options.held_out is None:
            raise ValueError(
                f"select={rule!r} needs held-out classes: --config.held_out=0.2, or "
                "--config.held_out=fold for the first of four folds"
            )
        score = score or "R@1"
        selection = Selection(f"{split}/{score}", split, score)
    names = _score_names(options.evaluate, scores)
    if "/" in selection.score:
        names += [f"{part}/R@{k}" for part in part_names_fn() for k in scores.ks or (1,)]
        ranked = [*(f"R@{k}" for k in scores.ks), *scores.ranking_fns]
        names += [f"{prefix_name(dim)}/{name}" for dim in prefixes for name in ranked]
    if selection.score not in names:
        raise ValueError(
            f"select={rule!r}: the evaluation has no score {selection.score!r}"
            f"{hint(selection.score, names)}"
        )
    if selection.score.rpartition("/")[2] in metrics.LESS_IS_BETTER:
        raise ValueError(
            f"select={rule!r} would choose the step with the highest {selection.score}, but a low "
            "value is better: choose another score, such as test/R@1"
        )
    return selection


def _score_names(options: EvaluationOptions, scores: Metrics) -> list[str]:
    names = [*(f"R@{k}" for k in scores.ks), *scores.ranking_fns]
    others = [f"{ranking}/{name}" for ranking in options.rankings for name in names]
    knn = ["knn"] if options.knn else []
    clustering = options.clustering
    clusterings = () if clustering and clustering.only_last else scores.clustering_fns
    cut = cut_names(options.depth)
    return [*names, *cut, *clusterings, *scores.embedding_fns, *others, *knn]
