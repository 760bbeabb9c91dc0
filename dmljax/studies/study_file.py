"""A study file as typed data: the runs, and how they are compared. Imports no jax."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dmljax.config.files import function_of_file
from dmljax.hints import hint
from dmljax.recipes.arguments import parse
from dmljax.studies import space as spaces

__all__ = ["COLUMNS", "TESTS", "Row", "Search", "Study", "flags", "read", "score_key"]

TESTS = ("welch", "paired", "folds")
COLUMNS = ("parameters", "flops")
METHODS = ("random", "sobol", "grid", "tpe")
FROM_SEARCH = "from search"
_SEARCH_FIELDS: dict[str, Any] = {
    "space": None,
    "method": "random",
    "trials": None,
    "score": None,
    "seed": 0,
    "seeds": (1000,),
    "row": {},
    "first": (),
    "pruner": None,
}
_SPLITS = ("test/", "val/", "train/", "raw/")


class Row(NamedTuple):
    """A row of the table.

    * `config` is what `--config=` takes; `overrides` are fields of the config by their paths.
    * `start_from` names the row whose run of the same seed is the start of the training.
    * `runs_of` names another row whose runs this row reads, instead of having runs of its own: by
      another rule that chooses the step (`choose`), or as ensembles whose embeddings are placed
      side by side: of all folds of a seed (`join_folds`), or of `join_seeds` seeds each.
    * `from_search`: the best trial of the search gives further overrides.
    * `baseline` names the row that this one is compared with; None compares it with none.
    """

    name: str
    config: str
    overrides: Mapping[str, Any]
    start_from: str | None = None
    runs_of: str | None = None
    choose: str | None = None
    join_folds: bool = False
    join_seeds: int | None = None
    from_search: bool = False
    seeds: tuple[int, ...] | None = None
    baseline: str | None = None

    @property
    def is_joined(self) -> bool:
        return self.join_folds or self.join_seeds is not None


class Search(NamedTuple):
    """A search for overrides by a score of held-out classes, as the mean over folds and `seeds`."""

    space: Mapping[str, tuple]
    method: str
    trials: int
    score: str
    seed: int
    seeds: tuple[int, ...]
    config: str
    overrides: Mapping[str, Any]
    first: tuple[Mapping[str, Any], ...]  # points to begin with, such as the published one
    pruner: str | None

    @property
    def enumerated(self) -> bool:
        """Whether all points are drawn in advance."""
        return self.method != "tpe"


class Study(NamedTuple):
    """A study of `rows` x `seeds` x `folds` runs. Fields with a default are those of the file.

    * `select` is the score that chooses the step, and `test` compares rows with their baselines.
    * `scores` and `columns` are columns of the table; `columns` are sizes of the nets. `curves` are
      metrics of the training, such as terms of the loss, that the page plots.
    * `less_is_better` lists scores, and `collapsed` has the limits below which a run is counted.
    """

    name: str
    source: str
    digest: str
    rows: tuple[Row, ...]
    title: str = ""
    seeds: tuple[int, ...] = (0,)
    folds: int | None = None
    select: str | None = None
    baseline: str | None = None
    test: str | None = None
    scores: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    less_is_better: tuple[str, ...] = ()
    collapsed: Mapping[str, float] = types.MappingProxyType({})
    published: Mapping[str, Mapping[str, float | str]] = types.MappingProxyType({})
    published_from: str = ""
    search: Search | None = None

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return self.seeds if row.seeds is None else row.seeds


# What a file may set; the first four make the rows.
_FIELDS: dict[str, Any] = {"base": None, "argument": "", "all": {}, "rows": None}
_FIELDS |= Study._field_defaults | {"seeds": 1}
_ROW_FIELDS = ("start_from", "runs_of", "choose", "join_folds", "join_seeds", "baseline")


def read(name: str) -> Study:
    """The study that `--study=` names: a Python file with `get_study()`, and arguments of it.

    'studies/graph_ablations.py:dataset=cars196' calls `get_study(dataset='cars196')`.
    """
    source, _, argument = str(name).partition(":")
    path = pathlib.Path(source)
    get_study = _get_study(path)
    try:
        content = get_study(**parse(get_study, argument, fixed=frozenset()))
    except Exception as error:  # a study file is the user's program
        raise ValueError(f"{source} does not run: {type(error).__name__}: {error}") from error
    stem = "-".join([path.stem, *filter(None, argument.replace("/", "_").split(","))])
    try:
        return _study(content, stem, str(name), path.parent)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def flags(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides as words of the command line."""
    return [f"--config.{field}={value!r}" for field, value in overrides.items()]


def score_key(score: str) -> str:
    """The name of a score in a result: 'R@1' is 'test/R@1', 'val/MAP@R' is itself."""
    return score if score.startswith(_SPLITS) else f"test/{score}"


def _get_study(path: pathlib.Path) -> Callable[..., Any]:
    if not path.is_file():
        near = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"there is no study file {path}{near if path.parent else ''}")
    return function_of_file(path, "get_study")


def _study(content: Any, name: str, source: str, folder: pathlib.Path) -> Study:
    fields = _checked("the study", content, _FIELDS)
    if not isinstance(fields["base"], str):
        raise ValueError("base names a recipe or a config file, such as 'glyphs'")
    base, argument = fields["base"], fields["argument"]
    common = _overrides("all", fields["all"])
    if not isinstance(fields["rows"], Mapping) or not fields["rows"]:
        raise ValueError("rows is a dict of at least one row, such as {'triplet': {}}")

    def row_of(row_name: str, options: Any) -> Row:
        return _row(row_name, options, base, argument, common, folder, fields["baseline"])

    rows = [row_of(row_name, options) for row_name, options in fields["rows"].items()]
    for row in rows:
        _check_references(row, rows)
    fields["seeds"] = _seeds("seeds", fields["seeds"])
    for name_list in ("scores", "columns", "curves", "less_is_better"):
        fields[name_list] = _names(name_list, fields[name_list])
    if not fields["scores"]:
        raise ValueError("scores lists the columns of the table, such as ('R@1', 'MAP@R')")
    if (folds := fields["folds"]) is not None and (not isinstance(folds, int) or folds < 2):
        raise ValueError(f"folds must be 2 or more, or None, not {folds!r}")
    if (select := fields["select"]) is not None:
        rows = [row._replace(overrides={"select": select, **row.overrides}) for row in rows]
    if fields["search"] is not None:
        fields["search"] = _search(fields["search"], row_of, select, fields["seeds"])
    elif any(row.from_search for row in rows):
        raise ValueError("a row is 'from search', and the study has no search")
    study = Study(
        **{k: v for k, v in fields.items() if k in Study._fields and k not in ("rows", "title")},
        name=name,
        source=source,
        title=fields["title"] or name,
        rows=tuple(rows),
        digest=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
    )
    names = [row.name for row in rows]
    _check_known("columns: there is no", study.columns, COLUMNS)
    _check_known("less_is_better: there is no column", study.less_is_better, study.scores)
    _check_known("published: there is no row", study.published, names)
    if study.published and not study.published_from:
        raise ValueError("published needs published_from: the source, its runs and its rule")
    _check_known("baseline: there is no row", [study.baseline] if study.baseline else [], names)
    for row in rows:
        _check_joined(row, study)
    _check_comparison(study)
    return study


def _check_known(message: str, names: Iterable[str], existing: Iterable[str]) -> None:
    for name in names:
        if name not in existing:
            raise ValueError(f"{message} {name!r}{hint(str(name), existing)}")


def _checked(title: str, content: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise TypeError(f"{title} is a dict, not {content!r}")
    for field in content:
        if field not in defaults:
            raise ValueError(f"{title} has no field {field!r}{hint(field, defaults)}")
    return {**defaults, **content}


def _row(
    name: str,
    options: Any,
    study_base: str,
    argument: str,
    common: Mapping,
    folder: pathlib.Path,
    baseline: str | None,
) -> Row:
    base, baseline = study_base, None if name == baseline else baseline
    if options == FROM_SEARCH:
        config = _config(base, argument, folder)
        return Row(name, config, dict(common), from_search=True, baseline=baseline)
    if not isinstance(options, Mapping):
        raise TypeError(f"row {name!r} is a dict of fields, not {options!r}")
    options = dict(options)
    base, own_words = options.pop("base", base), options.pop("argument", "")
    has_config = bool(own_words) or base != study_base
    reserved = {field: options.pop(field) for field in _ROW_FIELDS if field in options}
    if "seeds" in options:
        reserved["seeds"] = _seeds("seeds", options.pop("seeds"))
    row = Row(
        name=name,
        config=_config(base, ",".join(filter(None, [argument, own_words])), folder),
        overrides={**common, **_overrides(f"row {name!r}", options)},
        **{"baseline": baseline, **reserved},
    )
    if row.runs_of is not None and (options or has_config or row.start_from is not None):
        raise ValueError(f"row {name!r} has the runs of {row.runs_of!r}, so no fields of its own")
    if (row.choose or row.is_joined) and row.runs_of is None:
        raise ValueError(
            f"row {name!r}: choose, join_folds and join_seeds need runs_of, the name of a row"
        )
    return row


def _config(base: str, argument: str, folder: pathlib.Path) -> str:
    """What `--config=` takes. A relative path begins at the folder of the study file."""
    if base.endswith(".py") and not os.path.isabs(base):
        base = os.path.normpath(folder / base)
    return f"{base}:{argument}" if argument else base


def _overrides(title: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise TypeError(f"{title} is a dict of fields of the config, not {options!r}")
    for field in options:
        if not re.fullmatch(r"\w+(\.\w+)*", str(field)):
            raise ValueError(f"{title}: {field!r} is not a field, such as 'optimizer.rate'")
        if field in ("seed", "fold", "folds"):
            raise ValueError(f"{title}: write {field} as seeds or folds of the study")
    return json.loads(json.dumps(options))


def _seeds(title: str, value: Any) -> tuple[int, ...]:
    seeds = range(value) if isinstance(value, int) else value
    if not isinstance(seeds, range | list | tuple) or not len(seeds):
        raise ValueError(f"{title} is a number such as 5, or a list of seeds, not {value!r}")
    if len(set(seeds)) != len(seeds) or not all(isinstance(x, int) and x >= 0 for x in seeds):
        raise ValueError(f"{title} must be different whole numbers of 0 or more, not {value!r}")
    return tuple(seeds)


def _check_references(row: Row, rows: Sequence[Row]) -> None:
    own_runs = [other.name for other in rows if other.runs_of is None and other.name != row.name]
    for field, other in (("start_from", row.start_from), ("runs_of", row.runs_of)):
        if other is not None and other not in own_runs:
            raise ValueError(
                f"row {row.name!r}: {field} names no row {other!r}{hint(other, own_runs)}"
            )
    origin, visited = row, {row.name}
    while origin.start_from is not None:
        origin = next(other for other in rows if other.name == origin.start_from)
        if origin.name in visited:
            raise ValueError(f"row {row.name!r} starts from itself, by way of {origin.name!r}")
        visited.add(origin.name)


def _check_joined(row: Row, study: Study) -> None:
    if row.join_folds and study.folds is None:
        raise ValueError(f"row {row.name!r}: join_folds needs folds of the study, such as 4")
    count = row.join_seeds
    if count is None:
        return
    if study.folds is not None or row.join_folds or row.choose:
        raise ValueError(f"row {row.name!r}: join_seeds excludes folds, join_folds and choose")
    if not isinstance(count, int) or count < 2:
        raise ValueError(f"row {row.name!r}: join_seeds is 2 nets or more, not {count!r}")
    available = len(study.seeds_of(study.row(row.runs_of or "")))
    needed = count * len(study.seeds)
    if available < needed:
        raise ValueError(
            f"row {row.name!r}: {len(study.seeds)} ensembles of {count} nets need {needed} seeds "
            f"of {row.runs_of!r}, which has {available}"
        )


def _check_comparison(study: Study) -> None:
    names, test = [row.name for row in study.rows], study.test
    for row in study.rows:
        if row.baseline is not None:
            others = [name for name in names if name != row.name]
            message = f"row {row.name!r}: baseline names no other row"
            _check_known(message, [row.baseline], others)
    if study.baseline is None and all(row.baseline is None for row in study.rows):
        if test is not None:
            raise ValueError(f"test={test!r} needs a baseline, one of {', '.join(names)}")
        return
    if test not in TESTS:
        raise ValueError(
            f"test must be chosen before the runs, not {test!r}: 'welch' for 3 seeds, 'paired' "
            "from 5 seeds on, 'folds' for scores of held-out folds"
        )
    if test == "folds":
        if study.folds is None:
            raise ValueError("test='folds' needs folds, such as 4")
        other = [score for score in study.scores if not score.startswith("val/")]
        if other:
            raise ValueError(
                f"test='folds' compares scores of held-out folds, such as 'val/{other[0]}', and "
                f"{other[0]!r} is a score of the test classes: choose 'paired' or 'welch'"
            )


def _names(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field} is a list of names, not {value!r}")
    return tuple(value)


def _search(content: Any, row_of: Callable, select: str | None, seeds: Sequence[int]) -> Search:
    fields = _checked("search", content, _SEARCH_FIELDS)
    space = spaces.checked(fields["space"])
    method, trials = fields["method"], fields["trials"]
    _check_known("search.method: there is no", [method], METHODS)
    if method == "grid":
        trials = spaces.grid_size(space) if trials is None else trials
    if not isinstance(trials, int) or trials < 1:
        raise ValueError(f"search.trials is the number of trials, such as 30, not {trials!r}")
    score = fields["score"]
    if not isinstance(score, str) or not score.startswith("val/"):
        raise ValueError(
            f"search.score must be of held-out classes, such as 'val/MAP@R', not {score!r}: a "
            "search that reads test scores has no test classes left"
        )
    search_seeds = _seeds("search.seeds", fields["seeds"])
    if both := sorted(set(search_seeds) & set(seeds)):
        raise ValueError(
            f"search.seeds and seeds share {both}: the best trial is trained again with new seeds"
        )
    if fields["pruner"] not in (None, "asha"):
        raise ValueError(f"search.pruner is None or 'asha', not {fields['pruner']!r}")
    if fields["pruner"] and method != "tpe":
        raise ValueError("search.pruner needs method='tpe': the other points are drawn in advance")
    row = row_of("search", fields["row"])
    overrides = dict(row.overrides)
    if select is not None:
        overrides = {"select": select, **overrides}
    first = fields["first"]
    first = (first,) if isinstance(first, Mapping) else tuple(first)
    for point in first:
        if set(point) != set(space):
            raise ValueError(f"search.first: a point has the fields {sorted(space)}, not {point}")
    return Search(
        space=space,
        method=method,
        trials=trials,
        score=score,
        seed=fields["seed"],
        seeds=search_seeds,
        config=row.config,
        overrides=overrides,
        first=first,
        pruner=fields["pruner"],
    )
