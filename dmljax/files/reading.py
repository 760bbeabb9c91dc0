"""Files that a run leaves, as plain data, and whether their text may name modules to import."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

__all__ = ["FileText", "config_of_run", "marked", "trust_words", "trusting_modules"]

_TRUSTED = contextvars.ContextVar("_TRUSTED", default=False)


class FileText(str):
    """Text of a file that somebody else may have written; `path` is that file.

    `config.registry` imports no module that such text names. Text that the user typed is a plain
    `str`. The mark survives copies of the config, `pickle` and overrides of other fields, and ends
    where text is built or parsed again.
    """

    path: str


@contextlib.contextmanager
def trusting_modules(trust: bool) -> Iterator[None]:
    """Within the block, what is read may name modules to import if `trust`, or as outside of it."""
    token = _TRUSTED.set(trust or _TRUSTED.get())
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def trust_words() -> list[str]:
    """The flag with which a command of this process passes its trust on to another command."""
    return ["--trust-modules"] if _TRUSTED.get() else []


def marked(content: Any, path: str | os.PathLike) -> Any:
    """The content of the file `path`, with text that could name a module as `FileText`.

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


def config_of_run(folder: str | os.PathLike, name: str = "config.json") -> dict[str, Any]:
    """The config of the run in a folder, or another JSON object in its file `name`, as `marked`."""
    path = pathlib.Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run: there is no {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is no object with named fields")
        return marked(content, path)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): restore it, or make the run again with --overwrite"
        ) from error
