"""The parser that all commands share: flags, flags of dataclasses, help, and one-line errors."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from dmljax.files import parts

# Errors that the user can correct: one line, no traceback.
USER_ERRORS = (ValueError, TypeError, OSError, FloatingPointError, ImportError)


class Parser(argparse.ArgumentParser):
    """`argparse`, with a docstring as the help and errors that are raised instead of printed."""

    def __init__(self, verb: str, docstring: str):
        super().__init__(
            prog=f"dmljax {verb}",
            description=docstring,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=30
            ),
            allow_abbrev=False,
        )
        self.add_argument("--verbose", action="store_true", help="print messages of the libraries")

    def parse_known_args(self, args=None, namespace=None):
        arguments, extras = super().parse_known_args(args, namespace)
        options = {x.option_strings[0]: x for x in self._actions if x.option_strings}
        values = {name: getattr(arguments, x.dest, None) for name, x in options.items()}
        if "" in values.values():
            empty = next(name for name, value in values.items() if value == "")
            self.error(f"{empty}= is empty: give it a value, or leave the flag out")
        given = [name for name, x in options.items() if values[name] not in (x.default, None)]
        arguments.given = given
        return arguments, extras

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def flag(default: Any, text: str, **options: Any) -> Any:
    """Returns a field for `add_fields`, with its help and further options of argparse."""
    return dataclasses.field(default=default, metadata={"help": text, **options})


def add_fields(parser: Any, kind: Any, *, prefix: str = "") -> None:
    """Adds a flag for every field of a dataclass that has `metadata["help"]`.

    The name, the type and the default of the flag are those of the field. The default False makes a
    switch, None an optional text, and () a flag that may be repeated. Other values of `metadata`
    are options of argparse.
    """
    for field in dataclasses.fields(kind):
        options: dict[str, Any] = dict(field.metadata)
        if "help" not in options:
            continue
        if field.default is False:
            options["action"] = "store_true"
        elif field.default == ():
            options |= {"action": "append", "default": []}
        elif field.default is not None:
            options = {"type": type(field.default), "default": field.default, **options}
            options["help"] += " (default %(default)s)"
        parser.add_argument(f"--{prefix}{field.name.replace('_', '-')}", **options)


def values_of(arguments: argparse.Namespace, kind: Any, *, prefix: str = "") -> dict[str, Any]:
    """Returns the parsed values of the flags that `add_fields` added, by the names of fields."""
    return {x: getattr(arguments, f"{prefix}{x}".replace("-", "_")) for x in _names(kind)}


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if "help" in field.metadata]


def given(arguments: argparse.Namespace, *names: Any) -> list[str]:
    """Returns the flags with these names, or of these dataclasses, that differ from their defaults.

    `Parser` lists all such flags as `arguments.given`.
    """
    words = [word for x in names for word in ([x] if isinstance(x, str) else _names(x))]
    flags = [f"--{word.replace('_', '-')}" for word in words]
    return [flag for flag in arguments.given if flag in flags]


def leave_out(flags: Sequence[str], reason: str) -> None:
    """Raises an error if there are flags that a command would ignore for this reason."""
    if flags:
        raise ValueError(f"{reason}: leave out {', '.join(flags)}")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds `--trust-modules`, which `main` applies, to a command that reads configs of others."""
    text = "import modules that a run or a bundle names, which runs their code"
    parser.add_argument("--trust-modules", action="store_true", help=text)


def shard(text: str) -> parts.Shard:
    """Parses the value of a flag such as `--shard=3/8`."""
    try:
        return parts.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


SHARD = {"metavar": "I/N", "type": shard}  # options of a `flag`


def load_bundle(path: str) -> Any:
    """Loads a bundle; programs that it compiles are kept for the next command."""
    from dmljax import bundle
    from dmljax.train import compilation

    compilation.keep_programs()
    return bundle.load(path)


def refuse(verb: str, extras: Sequence[str]) -> None:
    """Raises an error that names the first of the words that `verb` does not know."""
    if extras:
        raise ValueError(f"{extras[0]!r} is not known (see dmljax {verb} --help)")


def print_error(error: BaseException | str) -> None:
    """Prints the error as one line on stderr."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
