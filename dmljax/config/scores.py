"""The scores that a config asks for, and the one that chooses the step of a run."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dmljax import metrics
from dmljax.config.data import Data
from dmljax.config.method import functions_of
from dmljax.config.registry import options_of
from dmljax.hints import check_all, hint
from dmljax.methods.base import Inspect, Method
from dmljax.train.evaluation import cut_names, prefix_name
from dmljax.train.options import EvaluationOptions, Options
from dmljax.train.run import Metrics, Selection


def check_evaluation(options: EvaluationOptions, data: Data, method: Method) -> None:
    """Raises if the data set or the method cannot give a score that the config asks for."""
    inspection = method.inspect or Inspect()
    ranks_by_mean = "mean_distance" in options.rankings
    problems = {
        "evaluate.knn takes the class from training images, but the test split has other classes": (
            options.knn > 0 and not set(data.train.names) & set(data.test.names)
        ),
        "evaluate.rankings: this method does not refine embeddings": (
            "refined" in options.rankings and inspection.refine is None
        ),
        "evaluate.rankings: 'mean_distance' needs learners, and images without groups": (
            ranks_by_mean and (inspection.parts is None or data.test.groups is not None)
        ),
    }
    check_all(problems)


def further_names(
    options: EvaluationOptions, scores: Metrics, method: Method, part_names: Iterable[str]
) -> list[str]:
    """Lists the scores of further rankings, of prefixes, and of the parts of an embedding."""
    recalls = [f"R@{k}" for k in scores.ks]
    ranked = [*recalls, *scores.ranking_fns]
    groups = [*options.rankings, *map(prefix_name, method.prefixes)]
    return [
        *(f"{group}/{name}" for group in groups for name in ranked),
        *(f"{part}/{name}" for part in part_names for name in recalls or ["R@1"]),
    ]


def metrics_of(options: EvaluationOptions) -> Metrics:
    """Collects the K of R@K and the metric functions, keyed by display name."""
    chosen_ks = metrics.KS if options.ks is None else options.ks
    if not chosen_ks:
        raise ValueError("evaluate.ks=[] needs one or more K, such as [1]")
    # By the first argument of a metric.
    functions: dict[str, dict[str, Callable]] = {"ranks": {}, "labels": {}, "embeddings": {}}
    ks: list[int] = []
    for chosen in options.metrics:
        if isinstance(chosen, str):  # "all"
            ks += chosen_ks
            functions["ranks"] |= metrics.RANKING_FNS
            functions["labels"] |= metrics.CLUSTERING_FNS
        elif chosen["name"] == "recall_at_k":
            ks += [chosen["k"]] if "k" in chosen else chosen_ks
        else:
            arguments = {k: v for k, v in chosen.items() if k != "name"}
            name = metrics.display_name(chosen["name"], arguments)
            functions[_first_argument(chosen.function)][name] = chosen.function
    if options.clustering is None:
        functions["labels"] = {}
    return Metrics(tuple(dict.fromkeys(ks)), *functions.values())


def _first_argument(function: Callable) -> str:
    """Returns what a metric takes: 'ranks', 'embeddings', or the 'labels' of clusterings."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]
    if len(names) == 1:
        return "ranks"
    if names not in (["embeddings", "labels"], ["labels", "assignment"]):
        raise ValueError(
            f"a metric has the arguments (ranks), (ranks, *, labels), (embeddings, labels) or "
            f"(labels, assignment), by these names, and not ({', '.join(names)})"
        )
    return names[0]


def check(config: Mapping[str, Any], wanted: Iterable[str] = ()) -> None:
    """Raises for what would end the run of a completed config at its start, as far as no data say.

    Also raises if the run would not compute the `wanted` scores, such as 'val/R@1'.
    """
    options = options_of(config)
    functions_of(options)
    scores = metrics_of(options.evaluate)
    selection_of(options, scores)
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
    options: Options, scores: Metrics, names_fn: Callable[[], Iterable[str]] | None = None
) -> Selection:
    """Returns the score that chooses the step, which the evaluation must have.

    `names_fn` names the scores of learners and of prefixes, such as 'learners/R@1', which only the
    method knows; without it, they are not checked.
    """
    rule = options.select
    split, _, score = ("test", "", "R@1") if rule == "last" else rule.partition("/")
    score = score or "R@1"
    selection = Selection(rule if rule == "last" else f"{split}/{score}", split, score)
    if selection.is_last and not options.reload_best_at:
        return selection
    evaluate = options.evaluate
    has_clustering = evaluate.clustering is not None and not evaluate.clustering.only_last
    names = [
        *(f"R@{k}" for k in scores.ks),
        *scores.ranking_fns,
        *cut_names(evaluate.depth),
        *(scores.clustering_fns if has_clustering else ()),
        *scores.embedding_fns,
        *(["knn"] if evaluate.knn else []),
    ]
    name = selection.score
    if "/" in name and names_fn is None:
        name = name.rpartition("/")[2]
    elif "/" in name and names_fn is not None:
        names += names_fn()
    problems = {
        "select must be 'last', or a score of a split such as 'val/R@1' or 'test/MAP@R', not "
        f"{rule!r}": split not in ("val", "test"),
        f"select={rule!r} needs held-out classes: --config.held_out=0.2, or --config.held_out=fold "
        "for the first of four folds": split == "val" and options.held_out is None,
        f"select={rule!r}: the evaluation has no score {name!r}{hint(name, names)}": (
            name not in names
        ),
        f"select={rule!r} would choose the step with the highest {name}, but a low value is "
        "better: choose another score, such as test/R@1": (
            name.rpartition("/")[2] in metrics.LESS_IS_BETTER
        ),
    }
    check_all(problems)
    return selection
