"""Files of run folders as plain data, and whether their text may name modules to import."""

import contextlib
import contextvars
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from dmljax.files import schema
from dmljax.files.run_folder import RunFolder

_LEVELS = 100  # of lists and objects
_TRUSTED = contextvars.ContextVar("_TRUSTED", default=False)


class FileText(str):
    """Text of a file that somebody else may have written; `path` is that file.

    `config.registry` imports no module that such text names. Text that the user typed is a plain
    `str`. The mark survives copies of the config, `pickle` and overrides of other fields. Text
    that is built or parsed again loses it.
    """

    path: str


@contextlib.contextmanager
def trusting_modules(trust: bool) -> Iterator[None]:
    """Allows files that are read within the block to name modules to import, if `trust`."""
    token = _TRUSTED.set(trust or _TRUSTED.get())
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def trust_words() -> list[str]:
    """Returns the flag by which this process passes its trust on to another command."""
    return ["--trust-modules"] if _TRUSTED.get() else []


def marked(content: Any, path: str | os.PathLike) -> Any:
    """Returns the content of the file `path`, with text that could name a module as `FileText`.

    Within `trusting_modules(True)` it stays plain text.
    """
    if isinstance(content, dict):
        return {name: marked(value, path) for name, value in content.items()}
    if isinstance(content, list):
        return [marked(value, path) for value in content]
    if not isinstance(content, str) or ":" not in content or _TRUSTED.get():
        return content
    text = FileText(content)
    text.path = str(path)
    return text


def json_value(text: str | bytes) -> Any:
    """Parses JSON text that somebody else may have written.

    Raises ValueError for text that is not JSON, or is nested deeper than 100 levels: deeper values
    exhaust the stack of recursive functions.
    """
    with contextlib.suppress(RecursionError):
        value = json.loads(text)
        nodes = [value]
        for _ in range(_LEVELS + 1):
            nodes = [x for x in nodes if isinstance(x, dict | list)]
            if not nodes:
                return value
            items = (node.values() if isinstance(node, dict) else node for node in nodes)
            nodes = list(itertools.chain.from_iterable(items))
    raise ValueError(f"it is nested deeper than {_LEVELS} levels")


def json_file(path: str | os.PathLike, kind: Any = Any) -> Any:
    """Reads a JSON file as the type `kind`; raises ValueError with its path if it is damaged."""
    text = pathlib.Path(path).read_bytes()
    try:
        return schema.parse(kind, json_value(text))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def json_object_or_empty(path: str | os.PathLike) -> dict[str, Any]:
    """Reads an object from a JSON file; returns {} if there is none or it cannot be read."""
    try:
        return json_file(path, dict[str, Any])
    except (OSError, ValueError):
        return {}


def json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the lines of a `.jsonl` file that have a step; skips torn lines of a live run."""
    lines = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for text in pathlib.Path(path).read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                line = json_value(text)
                if math.isfinite(line["step"]):
                    lines.append(line)
    return lines


def chosen_run(workdir: str | os.PathLike) -> pathlib.Path:
    """Returns `workdir`, or for a finished ladder the folder of its chosen step.

    Raises for a ladder that is not finished or has chosen no step, and for a bundle.
    """
    files = RunFolder(workdir)
    folder = files.path
    if (folder / "embed.jaxexport").is_file():
        raise ValueError(
            f"{folder} is a bundle, and this command reads the folder of the run that it was "
            "exported from. Bundles are read by dmljax bundle check, embed, index, search and serve"
        )
    if not files.ladder.is_file():
        if json_object_or_empty(files.config).get("ladder"):
            raise ValueError(
                f"the ladder in {folder} is not finished: the same command continues it. Each step "
                f"is a run in its own folder in {folder}"
            )
        return folder
    try:
        ladder = json_value(files.ladder.read_bytes())
        chosen = folder / ladder["chosen"]
        is_chosen = any(row["folder"] and row["is_kept"] for row in ladder["rows"])
    except (ValueError, KeyError, TypeError) as error:
        problem = f"{files.ladder} is damaged ({error!r})"
        raise ValueError(f"{problem}: the command of the run writes it again") from error
    if not is_chosen:
        advice = ladder.get("frozen", "`dmljax export --net=...` makes a bundle of that backbone")
        raise ValueError(
            f"the ladder in {folder} has chosen no step, because none is better than the frozen "
            f"backbone: {advice}; to read a step anyway, name its folder, such as {chosen}"
        )
    return chosen


def config_of_run(folder: str | os.PathLike) -> dict[str, Any]:
    """Reads the config of the run in a folder, as `marked`."""
    return object_of_run(RunFolder(folder).config)


def object_of_run(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object in the folder of a run, as `marked`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} holds no run: {path} is missing")
    try:
        return marked(json_file(path, dict[str, Any]), path)
    except ValueError as error:
        raise ValueError(f"{error}: restore it, or make the run again with --overwrite") from error
