"""The scores that a config asks for, and the one that chooses the step of a run."""

import inspect
from collections.abc import Callable, Sequence

from dmljax import metrics
from dmljax.config import registry
from dmljax.config.fields import named
from dmljax.config.splits import Data, holds_out
from dmljax.hints import hint
from dmljax.methods.base import Inspect, Method
from dmljax.train.evaluation import cut_names, prefix_name
from dmljax.train.options import EvaluationOptions, Options
from dmljax.train.run import Metrics, Selection

_CALLED = registry.Kind("function for evaluate.call", (), 1, ("step", "workdir"))


def call_fn_of(options: EvaluationOptions) -> Callable | None:
    """The function that is called after each evaluation."""
    return registry.own_function(options.call, _CALLED) if options.call else None


def check_evaluation(options: EvaluationOptions, data: Data, method: Method) -> None:
    """Raises if the data set or the method cannot give a score that the config asks for."""
    inspection = method.inspect or Inspect()
    if not options.ks or min(options.ks) < 1:
        raise ValueError(f"evaluate.ks={list(options.ks)} needs one or more K from 1, such as [1]")
    if options.knn and not set(data.train.names) & set(data.test.names):
        raise ValueError(
            "evaluate.knn takes the class from training images, but the test split has other "
            "classes"
        )
    if options.refine and inspection.refine is None:
        raise ValueError("evaluate.refine: this method does not refine embeddings")
    if options.mean_distance and inspection.parts is None:
        raise ValueError("evaluate.mean_distance: this method has no learners: leave it out")
    if options.mean_distance and data.test.groups is not None:
        raise ValueError(
            "evaluate.mean_distance: the data set has groups, which it cannot leave out"
        )


def metrics_of(options: EvaluationOptions) -> Metrics:
    """The K of R@K, and the functions of ranks, of clusterings and of embeddings by shown names."""
    functions: dict[str, dict[str, Callable]] = {"ranks": {}, "clusterings": {}, "embeddings": {}}
    ks: list[int] = []
    if options.metrics is None:
        ks += options.ks
        functions["ranks"] |= metrics.RANKING_FNS
        functions["clusterings"] |= metrics.CLUSTERING_FNS
    for spec in map(named, (*(options.metrics or ()), *options.extra)):
        function = registry.resolve("metric", spec)
        if spec["name"] == "recall_at_k":
            ks += [spec["k"]] if "k" in spec else options.ks
            continue
        name = metrics.shown_name(spec["name"], {k: v for k, v in spec.items() if k != "name"})
        functions[_argument_kind(function)][name] = function
    if not options.clustering:
        functions["clusterings"] = {}
    return Metrics(tuple(dict.fromkeys(ks)), *functions.values())


def _argument_kind(function: Callable) -> str:
    """What a metric takes: 'ranks', 'embeddings' and labels, or the labels of 'clusterings'."""
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


def check_selection(options: Options) -> None:
    """Raises for a score that cannot choose the step. Reads no data and builds no net."""
    # Names of learners and of prefixes are known only with the net.
    if "/" not in options.select.partition("/")[2]:
        selection_of(options, metrics_of(options.evaluate), prefixes=(), part_names_fn=tuple)


def selection_of(
    options: Options,
    scores: Metrics,
    *,
    prefixes: Sequence[int],
    part_names_fn: Callable[[], Sequence[str]],
) -> Selection:
    """The score that chooses the step. `part_names_fn` names the parts of an embedding."""
    rule = options.select
    if rule == "last":
        if options.patience is not None:
            raise ValueError(
                f"patience={options.patience} needs a score to watch: --config.select=val/MAP@R, "
                "or another score"
            )
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
        if split == "val" and not holds_out(options):
            raise ValueError(
                f"select={rule!r} needs held-out classes: --config.validation=0.2, or "
                "--config.fold=0 for the first of four folds"
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
    refined = [f"refined/{name}" for name in names] if options.refine else []
    by_distance = [f"mean_distance/{name}" for name in names] if options.mean_distance else []
    knn = ["knn"] if options.knn else []
    clusterings = () if options.clustering == "end" else scores.clustering_fns
    cut = cut_names(options.depth)
    return [*names, *cut, *clusterings, *scores.embedding_fns, *refined, *by_distance, *knn]
