"""A study file as typed data: the runs, and how they are compared. Imports no jax."""

import hashlib
import json
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dmljax.config.files import function_of_file
from dmljax.hints import check_known, hint
from dmljax.recipes.arguments import parse
from dmljax.studies import space as spaces

TESTS = ("welch", "paired", "folds")
COLUMNS = ("parameters", "flops")
METHODS = ("random", "sobol", "grid", "tpe")
FROM_SEARCH = "from search"
_UNTRAINED = ("raw/", "frozen/")
_SPLITS = ("test/", "val/", "train/", *_UNTRAINED)


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
    method: str = "random"
    trials: int = 0
    score: str = ""
    seed: int = 0
    seeds: tuple[int, ...] = (1000,)
    config: str = ""
    overrides: Mapping[str, Any] = types.MappingProxyType({})
    first: tuple[Mapping[str, Any], ...] = ()  # points to begin with, such as the published one
    pruner: str | None = None

    @property
    def enumerated(self) -> bool:
        """Whether all points are drawn in advance."""
        return self.method != "tpe"


class Study(NamedTuple):
    """A study of `rows` x `seeds` x `folds` runs. A study file sets the fields with a default.

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
_FIELDS |= Study._field_defaults
_SEARCH_FIELDS = {**Search._field_defaults, "space": None, "trials": None, "score": None, "row": {}}
del _SEARCH_FIELDS["config"], _SEARCH_FIELDS["overrides"]  # `row` makes them
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


def varies(score: str) -> bool:
    """Whether a score depends on the seed; scores of raw pixels and of a frozen backbone do not."""
    return not score.startswith(_UNTRAINED)


def _get_study(path: pathlib.Path) -> Callable[..., Any]:
    if not path.is_file():
        near = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"there is no study file {path}{near}")
    return function_of_file(path, "get_study")


def _study(content: Any, name: str, source: str, folder: pathlib.Path) -> Study:
    fields = _checked("the study", content, _FIELDS)
    if not isinstance(fields["base"], str):
        raise ValueError("base names a recipe or a config file, such as 'glyphs'")
    fields["all"] = _overrides("all", fields["all"])
    if fields["select"] is not None:
        fields["all"] = {"select": fields["select"], **fields["all"]}
    if not isinstance(fields["rows"], Mapping) or not fields["rows"]:
        raise ValueError("rows is a dict of at least one row, such as {'triplet': {}}")
    rows = [_row(*item, fields, folder) for item in fields["rows"].items()]
    for row in rows:
        _check_references(row, rows)
    fields["seeds"] = _seeds("seeds", fields["seeds"])
    for name_list in ("scores", "columns", "curves", "less_is_better"):
        fields[name_list] = _names(name_list, fields[name_list])
    if not fields["scores"]:
        raise ValueError("scores lists the columns of the table, such as ('R@1', 'MAP@R')")
    if (folds := fields["folds"]) is not None and (not isinstance(folds, int) or folds < 2):
        raise ValueError(f"folds must be 2 or more, or None, not {folds!r}")
    if fields["search"] is not None:
        fields["search"] = _search(fields, folder)
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
    check_known("columns: there is no", study.columns, COLUMNS)
    check_known("less_is_better: there is no column", study.less_is_better, study.scores)
    check_known("published: there is no row", study.published, names)
    if study.published and not study.published_from:
        raise ValueError("published needs published_from: the source, its runs and its rule")
    if study.baseline is not None:
        check_known("baseline: there is no row", [study.baseline], names)
    for row in rows:
        _check_joined(row, study)
    _check_comparison(study)
    return study


def _checked(title: str, content: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise TypeError(f"{title} is a dict, not {content!r}")
    check_known(f"{title} has no field", content, defaults)
    return {**defaults, **content}


def _row(name: str, options: Any, study: Mapping[str, Any], folder: pathlib.Path) -> Row:
    """A row of the study whose fields are `study`."""
    reserved: dict[str, Any] = {"from_search": options == FROM_SEARCH}
    reserved["baseline"] = None if name == study["baseline"] else study["baseline"]
    if options == FROM_SEARCH:
        options = {}
    if not isinstance(options, Mapping):
        raise TypeError(f"row {name!r} is a dict of fields, not {options!r}")
    options = dict(options)
    base, own_words = options.pop("base", study["base"]), options.pop("argument", "")
    has_config = bool(own_words) or base != study["base"]
    reserved |= {field: options.pop(field) for field in _ROW_FIELDS if field in options}
    if "seeds" in options:
        reserved["seeds"] = _seeds("seeds", options.pop("seeds"))
    row = Row(
        name=name,
        config=_config(base, ",".join(filter(None, [study["argument"], own_words])), folder),
        overrides={**study["all"], **_overrides(f"row {name!r}", options)},
        **reserved,
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
    for field in ("start_from", "runs_of"):
        if (name := getattr(row, field)) is not None:
            check_known(f"row {row.name!r}: {field} names no row", [name], own_runs)
    origin, visited = row, {row.name}
    while origin.start_from is not None:
        origin = next(other for other in rows if other.name == origin.start_from)
        if origin.name in visited:
            raise ValueError(f"row {row.name!r}: its start_from leads back to {origin.name!r}")
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
            check_known(f"row {row.name!r}: baseline names no other row", [row.baseline], others)
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


def _search(study: Mapping[str, Any], folder: pathlib.Path) -> Search:
    fields = _checked("search", study["search"], _SEARCH_FIELDS)
    space = spaces.checked(fields["space"])
    method, trials = fields["method"], fields["trials"]
    check_known("search.method: there is no", [method], METHODS)
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
    if shared := sorted(set(search_seeds) & set(study["seeds"])):
        raise ValueError(
            f"search.seeds and seeds share {shared}: the best trial is trained again with new seeds"
        )
    if fields["pruner"] not in (None, "asha"):
        raise ValueError(f"search.pruner is None or 'asha', not {fields['pruner']!r}")
    if fields["pruner"] and method != "tpe":
        raise ValueError("search.pruner needs method='tpe': the other points are drawn in advance")
    row = _row("search", fields.pop("row"), study, folder)
    first = fields["first"]
    first = (first,) if isinstance(first, Mapping) else tuple(first)
    for point in first:
        if set(point) != set(space):
            raise ValueError(f"search.first: a point has the fields {sorted(space)}, not {point}")
    fields |= {"space": space, "trials": trials, "seeds": search_seeds, "first": first}
    return Search(**fields, config=row.config, overrides=row.overrides)
