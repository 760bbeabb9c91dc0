"""Checks of the rows of a study before any run: what would end each run at its start."""

import inspect
import json
from collections.abc import Collection, Mapping
from typing import Any

from dmljax.config import fields, scores
from dmljax.config import files as config_files
from dmljax.config.registry import options_of
from dmljax.studies.study_file import Row, Study, flags
from dmljax.train.options import Spec


def check_rows(study: Study) -> dict[str, dict[str, Any]]:
    """Returns the completed configs of all rows with runs of their own, except `best_of` rows.

    Raises for a wrong config, for two equal ones, and for scores that no run would have.
    """
    configs: dict[str, dict[str, Any]] = {}
    rows_by_content: dict[str, str] = {}
    for row in study.rows:
        if row.runs_of is not None:
            continue
        if row.best_of:
            _check(study, _as_candidate(study, row), study.scores)
            continue
        chosen_by = {other.by for other in study.rows if row.name in other.best_of}
        config = configs[row.name] = _check(study, row, chosen_by or study.scores)
        content = _comparable([_resolved(config), row.start_from, config["start"], row.seeds])
        if (other := rows_by_content.setdefault(content, row.name)) != row.name:
            raise ValueError(
                f"the rows {other!r} and {row.name!r} have the same config: remove one of them, "
                "or change it"
            )
    for row in study.rows:
        if row.runs_of in configs and row.choose:
            rule = {"select": row.choose, "patience": None}
            origin = study.row(row.runs_of)
            _check(
                study, origin._replace(name=row.name, overrides={**origin.overrides, **rule}), ()
            )
    return configs


def _as_candidate(study: Study, row: Row) -> Row:
    """Returns a `best_of` row with the config of its first candidate."""
    if not row.best_of:
        return row
    first = _as_candidate(study, study.row(row.best_of[0]))
    return first._replace(name=row.name, overrides={**first.overrides, **row.overrides})


def _check(study: Study, row: Row, wanted: Collection[str]) -> dict[str, Any]:
    """Returns the completed config of a row; raises if a run would end at its start.

    Also raises if a run would not compute the `wanted` scores.
    """
    try:
        config = fields.complete(config_files.read(row.config, flags(row.overrides)))
        held_out = config["held_out"]
        if study.folds is not None:
            if held_out is not None:
                raise ValueError(
                    f"folds={study.folds} and held_out={held_out['name']} both hold classes out"
                )
            held_out = study.fold(0)
        scores.check({**config, "held_out": held_out}, wanted)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"row {row.name!r}: {error}") from error
    return config


def _resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that can change a result, with the defaults of all named functions.

    `{"name": "triplet"}` and `{"name": "triplet", "margin": 0.05}` are equal here if the default
    margin is 0.05.
    """
    options = options_of(config)
    content = fields.essential(config)
    specs = {name: getattr(options, name) for name in content}
    return content | {n: _with_defaults(x) for n, x in specs.items() if isinstance(x, Spec)}


def _with_defaults(spec: Spec) -> dict[str, Any]:
    parameters = inspect.signature(spec.partial.func).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    named = {name: getattr(value, "__name__", value) for name, value in defaults.items()}
    return {**named, **{name: fields.short(value) for name, value in spec.items()}}


def _comparable(value: Any) -> str:
    """Returns text that is equal for equal values: 1 and 1.0, a list and a tuple."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {key: plain(item) for key, item in x.items()}
        if isinstance(x, list | tuple):
            return [plain(item) for item in x]
        return float(x) if isinstance(x, int) and not isinstance(x, bool) else x

    return json.dumps(plain(value), sort_keys=True, default=repr)
