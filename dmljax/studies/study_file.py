"""A study file as typed data: the rows, and how they are compared. Imports no jax."""

import hashlib
import json
import os
import pathlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dmljax.config.files import function_of_file
from dmljax.hints import check_known, hint
from dmljax.recipes.arguments import parse

TESTS = ("welch", "paired", "folds")
_UNTRAINED = ("raw/", "frozen/")
_SPLITS = ("test/", "val/", "train/", *_UNTRAINED)


class Row(NamedTuple):
    """A row of the table.

    * `config` is what `--config=` takes; `overrides` are fields of the config by their paths.
    * `start_from` names the row whose run with the same seed is the start of the training.
    * `best_of` names candidate rows; the overrides of the best one by the score `by` come first,
      and the overrides of this row replace them. Candidates have no row of their own in the table.
    * `runs_of` names another row whose runs this row reads instead of having its own runs: by
      another rule that chooses the step (`choose`), or as ensembles whose embeddings are
      concatenated (`join`): the folds of each seed ("folds"), or a number of seeds each.
    * `baseline` names the row that this row is compared with; None disables the comparison.
    """

    name: str
    config: str
    overrides: Mapping[str, Any]
    start_from: str | None = None
    best_of: tuple[str, ...] = ()
    by: str = ""
    runs_of: str | None = None
    choose: str | None = None
    join: str | int | None = None
    seeds: tuple[int, ...] | None = None
    baseline: str | None = None


class Study(NamedTuple):
    """A study of `rows` x `seeds` x `folds` runs. A study file sets the fields with a default.

    * `select` is the score that chooses the step, and `test` compares rows with their baselines.
    * `scores` are the columns of the table. `curves` are metrics of the training, such as terms of
      the loss, that the page plots.
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
    curves: tuple[str, ...] = ()
    less_is_better: tuple[str, ...] = ()
    collapsed: Mapping[str, float] = types.MappingProxyType({})
    published: Mapping[str, Mapping[str, float | str]] = types.MappingProxyType({})
    published_from: str = ""

    def row(self, name: str) -> Row:
        """Returns the row of this name."""
        return next(row for row in self.rows if row.name == name)

    def seeds_of(self, row: Row) -> tuple[int, ...]:
        """Returns the seeds of a row, which are by default the seeds of the study."""
        return self.seeds if row.seeds is None else row.seeds

    def fold(self, index: int) -> dict[str, Any]:
        """Returns the field `held_out` of a fold."""
        return {"name": "fold", "index": index, "count": self.folds, "seed": None}

    @property
    def candidates(self) -> set[str]:
        """The names of the rows that only other rows choose from."""
        return {name for row in self.rows for name in row.best_of}

    def needed(self, names: set[str]) -> set[str]:
        """Returns these rows and all rows that they read, start from, or choose from."""
        rows = [self.row(name) for name in names]
        inputs = {n for row in rows for n in (row.start_from, row.runs_of, *row.best_of) if n}
        return names if inputs <= names else self.needed(names | inputs)


# The fields that a file may set; the first four make the rows.
_FIELDS: dict[str, Any] = {"base": None, "argument": "", "all": {}, "rows": None}
_FIELDS |= Study._field_defaults
_ROW_FIELDS = ("start_from", "best_of", "by", "runs_of", "choose", "join", "seeds", "baseline")


def read(name: str) -> Study:
    """Reads the study that a command line names: a Python file with `get_study()`, and arguments.

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
        study = _study(content, stem, str(name), path.parent)
        _check(study)
        return study
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def flags(overrides: Mapping[str, Any]) -> list[str]:
    """Returns overrides as arguments of the command line."""
    return [f"--config.{field}={value!r}" for field, value in overrides.items()]


def score_key(score: str) -> str:
    """Returns the name of a score in a result: 'R@1' is 'test/R@1', 'val/MAP@R' stays."""
    return score if score.startswith(_SPLITS) else f"test/{score}"


def varies(score: str) -> bool:
    """Returns whether a score depends on the seed; scores without training do not."""
    return not score.startswith(_UNTRAINED)


def _get_study(path: pathlib.Path) -> Callable[..., Any]:
    if not path.is_file():
        near = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"the study file {path} does not exist{near}")
    return function_of_file(path, "get_study")


def _study(content: Any, name: str, source: str, folder: pathlib.Path) -> Study:
    _require(isinstance(content, Mapping), f"the study must be a dict, got {content!r}")
    check_known("the study has no field", content, _FIELDS)
    fields = {**_FIELDS, **content}
    base, rows = fields["base"], fields["rows"]
    _require(isinstance(base, str), "base must name a recipe or a config file, such as 'glyphs'")
    has_rows = isinstance(rows, Mapping) and len(rows) > 0
    _require(has_rows, "rows must be a dict of at least one row, such as {'triplet': {}}")
    fields["all"] = _overrides("all", fields["all"])
    if fields["select"] is not None:
        fields["all"] = {"select": fields["select"], **fields["all"]}
    fields["seeds"] = _seeds("seeds", fields["seeds"])
    for field in ("scores", "curves", "less_is_better"):
        fields[field] = _names(field, fields[field])
    return Study(
        **{k: v for k, v in fields.items() if k in Study._fields and k not in ("rows", "title")},
        name=name,
        source=source,
        title=fields["title"] or name,
        rows=tuple(_row(name, options, fields, folder) for name, options in rows.items()),
        digest=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
    )


def _row(name: str, options: Any, study: Mapping[str, Any], folder: pathlib.Path) -> Row:
    """Builds a row of the study with the fields `study`."""
    title = f"row {name!r}"
    _require(isinstance(options, Mapping), f"{title} must be a dict of fields, got {options!r}")
    options = dict(options)
    base, argument = options.pop("base", study["base"]), options.pop("argument", "")
    fields = {field: options.pop(field) for field in _ROW_FIELDS if field in options}
    if "seeds" in fields:
        fields["seeds"] = _seeds(f"{title}: seeds", fields["seeds"])
    fields["best_of"] = _names(f"{title}: best_of", fields.get("best_of", ()))
    fields.setdefault("baseline", None if name == study["baseline"] else study["baseline"])
    overrides = _overrides(title, options)
    row = Row(
        name=name,
        config=_config(base, ",".join(filter(None, [study["argument"], argument])), folder),
        overrides=overrides if fields["best_of"] else {**study["all"], **overrides},
        **fields,
    )
    has_config = bool(argument) or base != study["base"] or row.start_from is not None
    is_view = row.runs_of is None or not (options or has_config or row.best_of)
    _require(is_view, f"{title} reads the runs of {row.runs_of!r}: remove its own fields")
    is_best = not (row.best_of and has_config)
    _require(is_best, f"{title} has the base and the start of its best candidate")
    return row


def _config(base: str, argument: str, folder: pathlib.Path) -> str:
    """Returns the value of `--config=`. A relative path begins at the folder of the study file."""
    if base.endswith(".py") and not os.path.isabs(base):
        base = os.path.normpath(folder / base)
    return f"{base}:{argument}" if argument else base


def _overrides(title: str, options: Any) -> dict[str, Any]:
    is_dict = isinstance(options, Mapping)
    _require(is_dict, f"{title} must be a dict of fields of the config, got {options!r}")
    for field in options:
        is_field = re.fullmatch(r"\w+(\.\w+)*", str(field)) is not None
        _require(is_field, f"{title}: {field!r} is not a field, such as 'optimizer.rate'")
        _require(field != "seed", f"{title}: write seed as seeds of the study")
    return json.loads(json.dumps(options))


def _seeds(title: str, value: Any) -> tuple[int, ...]:
    seeds = range(value) if isinstance(value, int) else value
    is_list = isinstance(seeds, range | list | tuple) and len(seeds) > 0
    _require(is_list, f"{title} must be a number such as 5, or a list of seeds, got {value!r}")
    is_valid = len(set(seeds)) == len(seeds) and all(isinstance(x, int) and x >= 0 for x in seeds)
    _require(is_valid, f"{title} must be distinct integers of 0 or more, got {value!r}")
    return tuple(seeds)


def _names(field: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    _require(is_list, f"{field} must be a list of names, got {value!r}")
    return tuple(value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check(study: Study) -> None:
    """Raises for fields and rows that contradict each other."""
    names, folds = [row.name for row in study.rows], study.folds
    has_scores = bool(study.scores)
    _require(has_scores, "scores lists the columns of the table, such as ('R@1', 'MAP@R')")
    is_valid = folds is None or (isinstance(folds, int) and folds >= 2)
    _require(is_valid, f"folds must be 2 or more, or None, got {folds!r}")
    check_known("less_is_better: no column is named", study.less_is_better, study.scores)
    check_known("published: no row is named", study.published, names)
    has_source = bool(study.published_from) or not study.published
    _require(has_source, "published needs published_from: the source, its runs and its rule")
    if study.baseline is not None:
        check_known("baseline: no row is named", [study.baseline], names)
    for row in study.rows:
        _check_row(row, study)
    _check_test(study)


def _check_row(row: Row, study: Study) -> None:
    title = f"row {row.name!r}"
    others = [other.name for other in study.rows if other is not row]
    trained = [name for name in others if study.row(name).runs_of is None]
    for field in ("start_from", "runs_of"):
        if (name := getattr(row, field)) is not None:
            check_known(f"{title}: {field} names no row", [name], trained)
    check_known(f"{title}: best_of names no row", row.best_of, trained)
    if row.baseline is not None:
        check_known(f"{title}: baseline names no other row", [row.baseline], others)
    inputs = study.needed({name for name in (row.start_from, *row.best_of) if name})
    _require(row.name not in inputs, f"{title}: start_from or best_of leads back to this row")
    has_runs = row.runs_of is not None or not (row.choose or row.join)
    _require(has_runs, f"{title}: choose and join need runs_of, the name of a row")
    _require(bool(row.best_of) == bool(row.by), f"{title}: best_of and by need each other")
    _require(
        not row.by or row.by.startswith("val/"),
        f"{title}: by={row.by!r} must be a score of held-out classes, such as 'val/MAP@R': a "
        "choice by test scores leaves no unseen classes",
    )
    for name in row.best_of:
        shared = sorted(set(study.seeds_of(row)) & set(study.seeds_of(study.row(name))))
        _require(
            not shared,
            f"{title} and its candidate {name!r} share the seeds {shared}: the best candidate is "
            "trained again with new seeds",
        )
    if row.join == "folds":
        _require(study.folds is not None, f"{title}: join='folds' needs folds, such as 4")
    elif row.join is not None:
        title += f": join={row.join!r}"
        is_count = isinstance(row.join, int) and row.join >= 2
        _require(is_count, f"{title} must be 'folds' or a number of nets from 2 on")
        _require(study.folds is None and not row.choose, f"{title} excludes folds and choose")
        available = len(study.seeds_of(study.row(row.runs_of or "")))
        ensembles = len(study.seeds_of(row))
        needed = int(row.join) * ensembles
        _require(
            needed <= available,
            f"{title}: {ensembles} ensembles need {needed} seeds of {row.runs_of!r}, which has "
            f"{available}",
        )


def _check_test(study: Study) -> None:
    if all(row.baseline is None for row in study.rows) and study.baseline is None:
        names = ", ".join(row.name for row in study.rows)
        _require(study.test is None, f"test={study.test!r} needs a baseline, one of {names}")
        return
    _require(
        study.test in TESTS,
        f"test must be chosen before the runs, got {study.test!r}: 'welch' for 3 seeds, 'paired' "
        "from 5 seeds on, 'folds' for scores of held-out folds",
    )
    if study.test == "folds":
        _require(study.folds is not None, "test='folds' needs folds, such as 4")
        other = next((x for x in study.scores if not x.startswith("val/")), None)
        _require(
            other is None,
            f"test='folds' compares scores of held-out folds, such as 'val/{other}', and "
            f"{other!r} is a score of the test classes: choose 'paired' or 'welch'",
        )
