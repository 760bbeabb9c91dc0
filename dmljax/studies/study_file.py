"""A study file as typed data: the rows, and how they are compared. Imports no jax."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from dmljax.config.files import function_of_file
from dmljax.files.schema import Limit, at_least
from dmljax.files.schema import parse as typed
from dmljax.hints import check_known, hint
from dmljax.recipes.arguments import parse

TESTS = ("welch", "paired", "folds")
_UNTRAINED = ("raw/", "frozen/")
_SPLITS = ("test/", "val/", "train/", *_UNTRAINED)
_Seeds = Annotated[int, at_least(1)] | tuple[Annotated[int, at_least(0)], ...] | None


@dataclasses.dataclass(frozen=True)
class Row:
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
    overrides: dict[str, Any]
    start_from: str | None = None
    best_of: tuple[str, ...] = ()
    by: str = ""
    runs_of: str | None = None
    choose: str | None = None
    join: str | int | None = None
    seeds: tuple[int, ...] | None = None
    baseline: str | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """A study of `rows` x `seeds` x `folds` runs. A study file sets the fields with a default.

    * `select` is the score that chooses the step, and `test` compares rows with their baselines.
    * `scores` are the columns of the table; of those in `less_is_better`, lower values are better.
    * `collapsed` has the limits of scores below which a run is counted.
    """

    name: str
    source: str
    digest: str
    rows: tuple[Row, ...] = ()
    title: str = ""
    seeds: tuple[int, ...] = (0,)
    folds: Annotated[int, at_least(2)] | None = None
    select: str | None = None
    baseline: str | None = None
    test: str | None = None
    scores: tuple[str, ...] = ()
    less_is_better: tuple[str, ...] = ()
    collapsed: dict[str, float] = dataclasses.field(default_factory=dict)
    published: dict[str, dict[str, float | str]] = dataclasses.field(default_factory=dict)
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


@dataclasses.dataclass(frozen=True)
class _File:
    """The fields that make the rows; the other ones are fields of `Study`."""

    base: str
    rows: Annotated[dict[str, dict[str, Any]], Limit(bool, "a dict of at least one row")]
    argument: str = ""
    all: dict[str, Any] = dataclasses.field(default_factory=dict)
    select: str | None = None
    baseline: str | None = None


_MADE = {"name", "source", "digest"}  # fields of `Study` that a file does not set
_FIELDS = {x.name for kind in (Study, _File) for x in dataclasses.fields(kind)} - _MADE
_ROW_FIELDS = {x.name for x in dataclasses.fields(Row)} - {"name", "config", "overrides"}


def read(name: str) -> Study:
    """Reads the study that a command line names: a Python file with `get_study()`, and arguments.

    'studies/graph_ablations.py:dataset=cars196' calls `get_study(dataset='cars196')`.
    """
    source, _, argument = str(name).partition(":")
    path = pathlib.Path(source)
    if not path.is_file():
        near = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"the study file {path} does not exist{near}")
    get_study = function_of_file(path, "get_study")
    try:
        content = get_study(**parse(get_study, argument, fixed=frozenset()))
    except Exception as error:  # a study file is the user's program
        raise ValueError(f"{source} does not run: {type(error).__name__}: {error}") from error
    stem = "-".join([path.stem, *filter(None, argument.replace("/", "_").split(","))])
    try:
        study = _study(content, stem, str(name), path.parent)
        for problem in _problems(study):
            raise ValueError(problem)
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


def _study(content: Any, name: str, source: str, folder: pathlib.Path) -> Study:
    check_known("the study has no field", content, _FIELDS)
    text = json.dumps(content, sort_keys=True)
    content, digest = json.loads(json.dumps(content)), hashlib.sha256(text.encode()).hexdigest()
    names = [field.name for field in dataclasses.fields(_File)]
    file = typed(_File, {name: content[name] for name in names if name in content})
    rows = [_row(row, options, file, folder) for row, options in file.rows.items()]
    fields = {"title": name, **content, "seeds": _seeds("seeds", content.get("seeds", 1))}
    for field in ("base", "argument", "all", "rows"):
        fields.pop(field, None)
    study = typed(Study, {"name": name, "source": source, "digest": digest, **fields})
    return dataclasses.replace(study, rows=tuple(rows))


def _row(name: str, options: dict[str, Any], study: _File, folder: pathlib.Path) -> Row:
    title = f"row {name!r}"
    base, argument = options.pop("base", study.base), options.pop("argument", "")
    fields = {field: options.pop(field) for field in _ROW_FIELDS & set(options)}
    fields["seeds"] = _seeds(f"{title}: seeds", fields.get("seeds"))
    fields.setdefault("baseline", None if name == study.baseline else study.baseline)
    has_config = argument or base != study.base or fields.get("start_from") is not None
    if base.endswith(".py") and not os.path.isabs(base):
        base = os.path.normpath(folder / base)
    config = ":".join(filter(None, [base, ",".join(filter(None, [study.argument, argument]))]))
    shared = {} if study.select is None else {"select": study.select}
    overrides = options if fields.get("best_of") else {**shared, **study.all, **options}
    for field in overrides:
        if re.fullmatch(r"\w+(\.\w+)*", field) is None:
            raise ValueError(f"{title}: {field!r} is not a field, such as 'optimizer.rate'")
        if field == "seed":
            raise ValueError(f"{title}: write seed as seeds of the study")
    row = typed(Row, {"name": name, "config": config, "overrides": overrides, **fields})
    if (row.best_of and has_config) or (row.runs_of is not None and (has_config or options)):
        raise ValueError(f"{title} has the config of the runs that it reads: remove its own fields")
    return row


def _seeds(title: str, value: Any) -> Sequence[int] | None:
    """Returns the seeds of a number or a list; None stands for the seeds of the study."""
    seeds = typed(_Seeds, value, title)
    seeds = list(range(seeds)) if isinstance(seeds, int) else seeds
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        raise ValueError(f"{title} must be distinct integers of 0 or more, got {value!r}")
    return seeds


def _problems(study: Study) -> Iterator[str]:
    """Yields what is wrong with fields and rows that contradict each other."""
    names, folds = [row.name for row in study.rows], study.folds
    if not study.scores:
        yield "scores lists the columns of the table, such as ('R@1', 'MAP@R')"
    check_known("less_is_better: no column is named", study.less_is_better, study.scores)
    check_known("published: no row is named", study.published, names)
    if study.published and not study.published_from:
        yield "published needs published_from: the source, its runs and its rule"
    if study.baseline is not None:
        check_known("baseline: no row is named", [study.baseline], names)
    for row in study.rows:
        yield from (f"row {row.name!r}: {problem}" for problem in _row_problems(row, study))
    if all(row.baseline is None for row in study.rows) and study.baseline is None:
        if study.test is not None:
            yield f"test={study.test!r} needs a baseline, one of {', '.join(names)}"
    elif study.test not in TESTS:
        yield (
            f"test must be chosen before the runs, got {study.test!r}: 'welch' for 3 seeds, "
            "'paired' from 5 seeds on, 'folds' for scores of held-out folds"
        )
    elif study.test == "folds" and folds is None:
        yield "test='folds' needs folds, such as 4"
    elif study.test == "folds" and not all(x.startswith("val/") for x in study.scores):
        yield "test='folds' compares scores of held-out folds: name columns such as 'val/R@1'"


def _row_problems(row: Row, study: Study) -> Iterator[str]:
    others = [other.name for other in study.rows if other is not row]
    trained = [name for name in others if study.row(name).runs_of is None]
    named = {"start_from": trained, "runs_of": trained, "baseline": others}
    for field, names in named.items():
        if (name := getattr(row, field)) is not None:
            check_known(f"row {row.name!r}: {field} names no other row", [name], names)
    check_known(f"row {row.name!r}: best_of names no other row", row.best_of, trained)
    if row.name in study.needed({name for name in (row.start_from, *row.best_of) if name}):
        yield "start_from or best_of leads back to this row"
    if row.runs_of is None and (row.choose or row.join):
        yield "choose and join need runs_of, the name of a row"
    if bool(row.best_of) != bool(row.by):
        yield "best_of and by need each other"
    if row.by and not row.by.startswith("val/"):
        yield (
            f"by={row.by!r} must be a score of held-out classes, such as 'val/MAP@R': a choice by "
            "test scores leaves no unseen classes"
        )
    for name in row.best_of:
        if shared := sorted(set(study.seeds_of(row)) & set(study.seeds_of(study.row(name)))):
            yield (
                f"it and its candidate {name!r} share the seeds {shared}: the best candidate is "
                "trained again with new seeds"
            )
    if row.join == "folds" and study.folds is None:
        yield "join='folds' needs folds, such as 4"
    if isinstance(row.join, int) and row.join >= 2 and row.runs_of is not None:
        if study.folds is not None or row.choose:
            yield f"join={row.join} excludes folds and choose"
        needed, seeds = row.join * len(study.seeds_of(row)), study.seeds_of(study.row(row.runs_of))
        if needed > len(seeds):
            yield f"join={row.join} needs {needed} seeds of {row.runs_of!r}, got {len(seeds)}"
    elif row.join not in (None, "folds"):
        yield f"join={row.join!r} must be 'folds' or a number of nets from 2 on"
