"""A study file as typed data: the runs, and how they are compared. Imports no jax."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
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
_FIELDS: dict[str, Any] = {
    "title": "",
    "base": None,
    "argument": "",
    "all": {},
    "rows": None,
    "seeds": 1,
    "folds": None,
    "select": None,
    "baseline": None,
    "test": None,
    "scores": None,
    "columns": (),
    "curves": (),
    "less_is_better": (),
    "collapsed": {},
    "published": {},
    "published_from": "",
    "search": None,
}
_ROW_FIELDS: tuple[str, ...] = (
    "base",
    "argument",
    "start_from",
    "runs_of",
    "choose",
    "join_folds",
    "join_seeds",
)
_ROW_FIELDS += ("seeds", "baseline")
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
    * `from_search`: the overrides are those of the best trial of the search.
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
    """A study of `rows` x `seeds` x `folds` runs.

    `columns` are sizes of the nets, 'parameters' and 'flops'; `scores` are the other columns.
    `curves` are metrics of the training, such as terms of the loss, that the page plots.
    """

    name: str
    source: str
    title: str
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    folds: int | None
    select: str | None
    baseline: str | None
    test: str | None
    scores: tuple[str, ...]
    columns: tuple[str, ...]
    curves: tuple[str, ...]
    less_is_better: tuple[str, ...]
    collapsed: Mapping[str, float]
    published: Mapping[str, Mapping[str, float | str]]
    published_from: str
    search: Search | None
    digest: str

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        return self.seeds if row.seeds is None else row.seeds


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
    names = [row.name for row in rows]
    for row in rows:
        _check_references(row, rows)
    seeds = _seeds("seeds", fields["seeds"])
    folds = fields["folds"]
    if folds is not None and (not isinstance(folds, int) or folds < 2):
        raise ValueError(f"folds must be 2 or more, or None, not {folds!r}")
    for row in rows:
        _check_joined(row, rows, seeds, folds)
    select = fields["select"]
    if select is not None:
        rows = [row._replace(overrides={"select": select, **row.overrides}) for row in rows]
    _check_comparison(fields, rows, folds)
    search = None
    if fields["search"] is not None:
        search = _search(fields["search"], row_of, select, seeds, folds)
    if any(row.from_search for row in rows) and search is None:
        raise ValueError("a row is 'from search', and the study has no search")
    scores = fields["scores"]
    if not isinstance(scores, list | tuple) or not scores:
        raise ValueError("scores lists the columns of the table, such as ('R@1', 'MAP@R')")
    return Study(
        name=name,
        source=source,
        title=fields["title"] or name,
        rows=tuple(rows),
        seeds=seeds,
        folds=folds,
        select=select,
        baseline=fields["baseline"],
        test=fields["test"],
        scores=tuple(scores),
        columns=_columns(fields["columns"]),
        curves=_names("curves", fields["curves"]),
        less_is_better=_less_is_better(fields["less_is_better"], scores),
        collapsed=fields["collapsed"],
        published=_published(fields, names),
        published_from=fields["published_from"],
        search=search,
        digest=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
    )


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
    base: str,
    argument: str,
    common: Mapping,
    folder: pathlib.Path,
    baseline: str | None,
) -> Row:
    baseline = None if name == baseline else baseline
    if options == FROM_SEARCH:
        config = _config(base, argument, folder)
        return Row(name, config, dict(common), from_search=True, baseline=baseline)
    if not isinstance(options, Mapping):
        raise TypeError(f"row {name!r} is a dict of fields, not {options!r}")
    options = dict(options)
    reserved = {field: options.pop(field) for field in _ROW_FIELDS if field in options}
    words = ",".join(filter(None, [argument, reserved.get("argument", "")]))
    row = Row(
        name=name,
        config=_config(reserved.get("base", base), words, folder),
        overrides={**common, **_overrides(f"row {name!r}", options)},
        start_from=reserved.get("start_from"),
        runs_of=reserved.get("runs_of"),
        choose=reserved.get("choose"),
        join_folds=reserved.get("join_folds", False),
        join_seeds=reserved.get("join_seeds"),
        seeds=None if "seeds" not in reserved else _seeds("seeds", reserved["seeds"]),
        baseline=reserved.get("baseline", baseline),
    )
    if row.runs_of is not None and (options or {"argument", "base", "start_from"} & set(reserved)):
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


def _check_joined(row: Row, rows: Sequence[Row], seeds: Sequence[int], folds: int | None) -> None:
    if row.join_folds and folds is None:
        raise ValueError(f"row {row.name!r}: join_folds needs folds of the study, such as 4")
    count = row.join_seeds
    if count is None:
        return
    if folds is not None or row.join_folds or row.choose:
        raise ValueError(f"row {row.name!r}: join_seeds excludes folds, join_folds and choose")
    if not isinstance(count, int) or count < 2:
        raise ValueError(f"row {row.name!r}: join_seeds is 2 nets or more, not {count!r}")
    origin = next(other for other in rows if other.name == row.runs_of)
    available = len(seeds if origin.seeds is None else origin.seeds)
    if available < count * len(seeds):
        raise ValueError(
            f"row {row.name!r}: {len(seeds)} ensembles of {count} nets need {count * len(seeds)} "
            f"seeds of {origin.name!r}, which has {available}"
        )


def _check_comparison(fields: Mapping[str, Any], rows: Sequence[Row], folds: int | None) -> None:
    names, test = [row.name for row in rows], fields["test"]
    if fields["baseline"] is not None and fields["baseline"] not in names:
        raise ValueError(
            f"baseline: there is no row {fields['baseline']!r}"
            f"{hint(str(fields['baseline']), names)}"
        )
    for row in rows:
        others = [name for name in names if name != row.name]
        if row.baseline is not None and row.baseline not in others:
            raise ValueError(
                f"row {row.name!r}: baseline names no other row {row.baseline!r}"
                f"{hint(str(row.baseline), others)}"
            )
    if fields["baseline"] is None and all(row.baseline is None for row in rows):
        if test is not None:
            raise ValueError(f"test={test!r} needs a baseline, one of {', '.join(names)}")
        return
    if test not in TESTS:
        raise ValueError(
            f"test must be chosen before the runs, not {test!r}: 'welch' for 3 seeds, 'paired' "
            "from 5 seeds on, 'folds' for scores of held-out folds"
        )
    if test == "folds":
        if folds is None:
            raise ValueError("test='folds' needs folds, such as 4")
        other = [s for s in fields["scores"] or () if not s.startswith("val/")]
        if other:
            raise ValueError(
                f"test='folds' compares scores of held-out folds, such as 'val/{other[0]}', and "
                f"{other[0]!r} is a score of the test classes: choose 'paired' or 'welch'"
            )


def _columns(value: Any) -> tuple[str, ...]:
    names = _names("columns", value)
    for name in names:
        if name not in COLUMNS:
            raise ValueError(f"columns: there is no {name!r}{hint(name, COLUMNS)}")
    return names


def _names(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field} is a list of names, not {value!r}")
    return tuple(value)


def _less_is_better(names: Any, scores: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(names, list | tuple):
        raise TypeError(f"less_is_better lists scores, such as ('class_deviation',), not {names!r}")
    for name in names:
        if name not in scores:
            raise ValueError(f"less_is_better: {name!r} is no column{hint(str(name), scores)}")
    return tuple(names)


def _published(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    published = fields["published"]
    for row in published:
        if row not in names:
            raise ValueError(f"published: there is no row {row!r}{hint(row, names)}")
    if published and not fields["published_from"]:
        raise ValueError("published needs published_from: the source, its runs and its rule")
    return {row: dict(values) for row, values in published.items()}


def _search(
    content: Any, row_of: Callable, select: str | None, seeds: Sequence[int], folds: int | None
) -> Search:
    fields = _checked("search", content, _SEARCH_FIELDS)
    space = spaces.checked(fields["space"])
    method, trials = fields["method"], fields["trials"]
    if method not in METHODS:
        raise ValueError(f"search.method: there is no {method!r}{hint(str(method), METHODS)}")
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
