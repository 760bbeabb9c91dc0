"""The scores that a config asks for, and the one that chooses the step of a run."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dmljax import metrics
from dmljax.config.data import Data
from dmljax.config.fields import options_of
from dmljax.config.method import functions_of
from dmljax.hints import check_all, hint
from dmljax.methods.base import Inspect, Method
from dmljax.train.evaluation import MEAN, cut_names, prefix_name
from dmljax.train.options import EvaluationOptions, Options
from dmljax.train.run import Metrics, Selection

# The first arguments of a metric, and what they are computed from.
_INPUTS: dict[tuple[str, ...], str] = {
    ("embeddings", "labels"): "embedding_fns",
    ("labels", "assignment"): "clustering_fns",
}


def scores_of(
    options: Options, data: Data, method: Method, parts_fn: Callable[[], Sequence[str]]
) -> tuple[Metrics, Selection]:
    """Returns what an evaluation computes, and the score that chooses the step.

    Raises if the data set or the method cannot give a score that the config asks for.
    """
    evaluate, inspection = options.evaluate, method.inspect or Inspect()
    ranks_by_mean = "mean_distance" in evaluate.rankings
    problems = {
        "evaluate.knn takes the class from training images, but the test split has other classes": (
            evaluate.knn > 0 and not set(data.train.names) & set(data.test.names)
        ),
        "evaluate.rankings: this method does not refine embeddings": (
            "refined" in evaluate.rankings and inspection.refine is None
        ),
        "evaluate.rankings: 'mean_distance' needs learners, and images without groups": (
            ranks_by_mean and (inspection.parts is None or data.test.groups is not None)
        ),
    }
    check_all(problems)
    scores = metrics_of(evaluate)
    return scores, selection_of(options, scores, method, parts_fn)


def metrics_of(options: EvaluationOptions) -> Metrics:
    """Collects the K of R@K and the metric functions, keyed by display name."""
    chosen_ks = metrics.KS if options.ks is None else options.ks
    if not chosen_ks:
        raise ValueError("evaluate.ks=[] needs one or more K, such as [1]")
    functions: dict[str, dict[str, Callable]] = {
        name: {} for name in ("ranking_fns", "clustering_fns", "embedding_fns")
    }
    ks: list[int] = []
    for spec in options.metrics:
        if spec["name"] == "all":
            ks += chosen_ks
            functions["ranking_fns"] |= metrics.RANKING_FNS
            functions["clustering_fns"] |= metrics.CLUSTERING_FNS
        elif spec["name"] == "recall_at_k":
            ks += [spec["k"]] if "k" in spec else chosen_ks
        else:
            arguments = {k: v for k, v in spec.items() if k != "name"}
            name = metrics.display_name(spec["name"], arguments)
            functions[_input(spec.function)][name] = spec.function
    if options.clustering is None:
        functions["clustering_fns"] = {}
    return Metrics(tuple(dict.fromkeys(ks)), **functions)


def _input(function: Callable) -> str:
    """Returns the field of `Metrics` of a function: by ranks, by embeddings, or by clusterings."""
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.default is p.empty]
    if len(names) > 1 and tuple(names) not in _INPUTS:
        raise ValueError(
            "a metric has the arguments (ranks), (ranks, *, labels), (embeddings, labels) or "
            f"(labels, assignment), by these names, and not ({', '.join(names)})"
        )
    return _INPUTS.get(tuple(names), "ranking_fns")


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
    options: Options,
    scores: Metrics,
    method: Method | None = None,
    parts_fn: Callable[[], Sequence[str]] = tuple,
) -> Selection:
    """Returns the score that chooses the step, which the evaluation must have.

    `parts_fn` names the parts of an embedding, such as learners. Without a method, the first part
    of a name such as 'learners/R@1' is not checked.
    """
    rule, evaluate = options.select, options.evaluate
    split, _, name = ("test", "", "R@1") if rule == "last" else rule.partition("/")
    name = name or "R@1"
    selection = Selection(rule if rule == "last" else f"{split}/{name}", split, name)
    if selection.is_last and not options.reload_best_at:
        return selection
    recalls = [f"R@{k}" for k in scores.ks]
    names = [*recalls, *scores.ranking_fns, *cut_names(evaluate.depth), *scores.embedding_fns]
    if evaluate.clustering is not None and not evaluate.clustering.only_last:
        names += scores.clustering_fns
    names += ["knn"] * (evaluate.knn > 0)
    group, _, last = name.rpartition("/")
    if method is None:
        name = last
    elif group:
        groups = [*evaluate.rankings, *map(prefix_name, method.prefixes)]
        names += [f"{x}/{y}" for x in groups for y in (*recalls, *scores.ranking_fns)]
        parts = parts_fn()
        groups = [*parts, *[MEAN] * (len(parts) > 1)]
        names += [f"{x}/{y}" for x in groups for y in recalls or ["R@1"]]
    problems = {
        "select must be 'last', or a score of a split such as 'val/R@1' or 'test/MAP@R', not "
        f"{rule!r}": split not in ("val", "test"),
        f"select={rule!r} needs held-out classes: --config.held_out=0.2, or --config.held_out=fold "
        "for the first of four folds": split == "val" and options.held_out is None,
        f"select={rule!r}: the evaluation has no score {name!r}{hint(name, names)}": (
            name not in names
        ),
        f"select={rule!r} would choose the step with the highest {name}, but a low value is "
        "better: choose another score, such as test/R@1": last in metrics.LESS_IS_BETTER,
    }
    check_all(problems)
    return selection
