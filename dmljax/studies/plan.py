"""The runs of a study: the command of every run, and the digest that names its folder."""

import inspect
import itertools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dmljax.config import fields, registry
from dmljax.config import files as config_files
from dmljax.files import reading
from dmljax.hints import check_known
from dmljax.studies import space as spaces
from dmljax.studies.outcomes import outcome
from dmljax.studies.study_file import Row, Search, Study, flags

DIGITS = 12  # of a digest, in the name of a folder
# Fields that a command line may set for all runs of a study: they cannot change a result.
MOVABLE = (
    "runtime",
    "notes",
    "pictures",
    *(f"{a}.{b}" for a in fields.PATHS for b in fields.PATHS[a]),
)
# Fields of a config that name a function with keywords, by the kind of the function.
_KIND_OF = {"eval_transform": "transform", "normalize": "normalization"}
_NAMED: tuple[str, ...] = (
    "dataset",
    "sampler",
    "transform",
    "eval_transform",
    "normalize",
    "net",
    "method",
)
_NAMED += ("loss", "miner", "optimizer", "schedule")
# Their fields that are not keywords of the function.
OTHER_FIELDS = {
    "net": ("weights",),
    "dataset": ("image_share", "class_share", "full_epochs"),
    "sampler": ("every",),
}
# Fields that `_check_config` reads.
_CHECKED = {"method", "loss", "miner", "tile", "select", "patience", "reload_best_at"}
_CHECKED |= {"evaluate", "held_out"}


class PlannedRun(NamedTuple):
    """One run: `python -m dmljax.main --config=CONFIG FLAGS --workdir=FOLDER`.

    `digest` names the folder. `after` is the digest of the run that this one starts from.
    """

    row: str
    seed: int
    fold: int | None
    config: str
    flags: tuple[str, ...]
    digest: str
    after: str | None = None

    @property
    def title(self) -> str:
        return f"{self.row}, seed {self.seed}" + (
            "" if self.fold is None else f", fold {self.fold}"
        )


def check_flags(words: Sequence[str]) -> None:
    """Refuses words of the command line that would change the rows."""
    for word in words:
        field = word.removeprefix("--config.").partition("=")[0]
        if not field.startswith(tuple(f"{x}." for x in MOVABLE)) and field not in MOVABLE:
            raise ValueError(
                f"{word} would change every row of the study: write it into the study file. The "
                f"command line may set {', '.join(MOVABLE)}"
            )


def check_names(run: PlannedRun, study: Study) -> None:
    """Refuses a run whose config file or modules the study file does not name.

    The index and the database in the folder of a study may be of somebody else.
    """
    if reading.trust_words():
        return
    rows: list[Row | Search] = [*study.rows, *filter(None, [study.search])]
    typed = {text for row in rows for text in _texts([row.config, row.overrides])}
    if study.search is not None:
        typed.update(_texts([study.search.space, study.search.first]))
    words = [word for word in run.flags if not word.startswith("--config.start=")]
    overrides = config_files.override({}, words)
    names = [run.config, *(text for text in _texts(overrides) if ":" in text)]
    if foreign := [name for name in names if name not in typed]:
        raise ValueError(
            f"{run.title}: the folder of the study names {foreign[0]!r}, which the study file does "
            "not, and it could run code: if you trust that folder, add --trust-modules"
        )


def _texts(content: Any) -> Iterator[str]:
    """All text in nested dicts and lists."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        yield from _texts(list(content.values()))
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _texts(item)


def merged(config: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The completed config with overrides."""
    return fields.complete(config_files.read(config, flags(overrides)))


def completed(title: str, row: Row | Search) -> dict[str, Any]:
    """The completed config of a row with its first seed; raises for a field that does not exist."""
    try:
        config = merged(row.config, row.overrides)
        for field in row.overrides:
            check_field(field, config)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{title}: {error}") from error
    return config


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """A completed config with the defaults of every function that it names, to compare rows.

    `{"name": "triplet"}` and `{"name": "triplet", "margin": 0.05}` are equal here if the default
    margin is 0.05.
    """
    content = fields.essential(dict(config))
    for section in _NAMED:
        if content.get(section) is not None:
            content[section] = _with_defaults(_KIND_OF.get(section, section), content[section])
    return content


def _with_defaults(kind: str, spec: Any) -> Any:
    options = dict(fields.named(spec))
    function = _function(kind, options["name"])
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name, default in defaults.items():
        if default is not inspect.Parameter.empty:
            options.setdefault(name, getattr(default, "__name__", default))
    for name, value in options.items():
        if name in registry.ARGUMENTS and isinstance(value, str | Mapping):
            options[name] = _with_defaults(name, value)
    return options


def _function(kind: str, name: str) -> Any:
    """The function that a config names; raises, and lists the names, if there is none."""
    if ":" in name or name not in registry.table(kind):
        return registry.resolve(kind, name)
    return registry.table(kind)[name]


def check_field(field: str, config: Mapping[str, Any]) -> None:
    """Raises unless a config has the field, or the function that it names has the keyword."""
    section, _, leaf = field.partition(".")
    if not leaf or section not in _NAMED:
        return  # `complete` knows all other fields
    leaf = leaf.partition(".")[0]
    spec = fields.named(config[section])
    if spec is None:
        raise ValueError(f"{field}: {section} is None and has no fields")
    names = {"name", *OTHER_FIELDS.get(section, ())}
    name = spec["name"]
    function = _function(_KIND_OF.get(section, section), name)
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    names |= {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    if section == "optimizer":
        from dmljax.train import optimizers

        names |= set(inspect.signature(optimizers.build).parameters) - {"direction", "schedule"}
    check_known(f"{section} ({name}) has no field", [leaf], names)


def check_rows(study: Study) -> dict[str, dict[str, Any]]:
    """The completed configs of all rows. Raises for a wrong one, and for two equal ones."""
    configs: dict[str, dict[str, Any]] = {}
    rows_by_content: dict[str, str] = {}
    for row in study.rows:
        if row.runs_of is not None or row.from_search:
            continue
        config = configs[row.name] = completed(f"row {row.name!r}", row)
        other_run = config["start"] and config["start"]["mixed_with"]
        content = _comparable([resolved(config), row.start_from, other_run, row.seeds])
        if (other := rows_by_content.setdefault(content, row.name)) != row.name:
            raise ValueError(
                f"the rows {other!r} and {row.name!r} have the same config: remove one of them, "
                "or change it"
            )
    if study.search is not None:
        base = completed("search.row", study.search)
        for field, range_ in study.search.space.items():
            _check_range(field, range_, study.search, base)
        if not any(field.partition(".")[0] in _CHECKED for field in study.search.space):
            _check_config(study, "search", base, [study.search.score])
    for row in study.rows:
        title = f"row {row.name!r}"
        if row.name in configs:
            _check_config(study, title, configs[row.name], study.scores)
        elif row.runs_of in configs and row.choose:
            config = {**configs[row.runs_of], "select": row.choose, "patience": None}
            _check_config(study, title, config, ())
    return configs


def _comparable(value: Any) -> str:
    """Text that is the same for equal values: 1 and 1.0, a list and a tuple."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: plain(item) for key, item in x.items()}
        if isinstance(x, list | tuple):
            return [plain(item) for item in x]
        return float(x) if isinstance(x, int) and not isinstance(x, bool) else x

    return json.dumps(plain(value), sort_keys=True, default=repr)


def _check_range(field: str, range_: tuple, search: Search, base: Mapping[str, Any]) -> None:
    """A field of the space must exist, and its ends must be values that the config can hold."""
    try:
        check_field(field, base)
        for value in {spaces.point({field: range_}, [u])[field] for u in (0.0, 0.999)}:
            merged(search.config, {**search.overrides, field: value})
    except (ValueError, TypeError) as error:
        raise ValueError(f"search.space: {field}: {error}") from error


def _check_config(
    study: Study, title: str, config: Mapping[str, Any], scores: Iterable[str]
) -> None:
    """Raises for what would end each run at its start, or leave a column empty."""
    from dmljax.config.scores import check  # here: it imports jax

    if study.folds is not None:
        if held_out := config["held_out"]:
            raise ValueError(
                f"{title}: folds of the study and held_out={held_out} both hold classes out: leave "
                "out one of them"
            )
        config = {**config, "held_out": _fold(study.folds, 0)}
    try:
        check(config, scores)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{title}: {error}") from error


def _fold(count: int | None, index: int) -> dict[str, Any]:
    return {"name": "fold", "index": index, "count": count, "seed": None}


class Planner:
    """Plans runs, and computes the digest of a data set or of a file of weights once."""

    def __init__(self, study: Study, runs: pathlib.Path, words: Sequence[str] = ()):
        self._study, self._runs, self._words = study, runs, tuple(words)
        self._data_digests: dict[str, str] = {}

    def runs_of(self, rows: Iterable[Row]) -> list[PlannedRun]:
        """The runs of rows: the first seed of every row comes first, so that tables fill evenly.

        A run that starts from another one is left out until that one is finished: its digest
        depends on the step that was chosen there.
        """
        rows = [row for row in rows if row.runs_of is None]
        folds = range(self._study.folds) if self._study.folds else [None]
        seeds = list(dict.fromkeys(s for row in rows for s in self._study.seeds_of(row)))
        planned = [
            self._planned(row, seed, fold)
            for seed, fold, row in itertools.product(seeds, folds, rows)
            if seed in self._study.seeds_of(row)
        ]
        return [run for run in planned if run is not None]

    def _planned(self, row: Row, seed: int, fold: int | None) -> PlannedRun | None:
        overrides, after = {**row.overrides, "seed": seed}, None
        if fold is not None:
            overrides["held_out"] = _fold(self._study.folds, fold)
        if row.start_from is not None:
            start = self._planned(self._study.row(row.start_from), seed, fold)
            if start is None or outcome(self._runs / start.digest).state != "finished":
                return None
            after = start.digest
            overrides["start.name"] = str(self._runs / after)
        words = flags(overrides)
        run = PlannedRun(row.name, seed, fold, row.config, tuple(words), "", after)
        check_names(run, self._study)  # a point of a search is from its database
        config = config_files.read(row.config, [*words, *words_of(self._words, after)])
        return run._replace(digest=self._digest(config)[:DIGITS])

    def _digest(self, config: dict[str, Any]) -> str:
        from dmljax.config import build  # here: it imports jax

        key = json.dumps(config["dataset"], sort_keys=True)
        run_digests = build.digests_of(config, data=self._data_digests.get(key))
        self._data_digests[key] = run_digests.data
        return run_digests.run


def words_of(words: Sequence[str], after: str | None) -> list[str]:
    """The words for a run; one that starts from the run `after` takes its weights from there."""
    return [w for w in words if after is None or not w.startswith("--config.net.weights=")]


def plain_rows(study: Study) -> list[Row]:
    """The rows whose runs are known before any run is made."""
    return [row for row in study.rows if not row.from_search]


def trial_name(number: int) -> str:
    return f"trial {number:04}"


def row_of_trial(search: Search, number: int, point: Mapping[str, Any]) -> Row:
    """A trial as a row: the overrides of the search, and its point."""
    overrides = {**search.overrides, **point}
    return Row(trial_name(number), search.config, overrides, seeds=search.seeds)


def rows_of_search(search: Search) -> list[Row]:
    """The trials of a search as rows, if their points are drawn in advance."""
    return [row_of_trial(search, i, point) for i, point in enumerate(enumerated_points(search))]


def enumerated_points(search: Search) -> list[dict[str, Any]]:
    """The points `first` of a search, and then the points that are drawn in advance."""
    count = search.trials - len(search.first)
    drawn = spaces.points(
        search.space, method=search.method, trials=max(count, 0), seed=search.seed
    )
    return [dict(point) for point in search.first][: search.trials] + drawn
