"""The parser that all commands share: flags, flags of dataclasses, help, and one-line errors."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

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
        self.add_argument(
            "--verbose", action="store_true", help="also print the messages of the libraries"
        )

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
    names = [field.name for field in dataclasses.fields(kind) if "help" in field.metadata]
    return {name: getattr(arguments, f"{prefix}{name}".replace("-", "_")) for name in names}


def changed(arguments: argparse.Namespace, *kinds: Any) -> list[str]:
    """Returns the flags of dataclasses whose values differ from their defaults."""
    names = []
    for field in [x for kind in kinds for x in dataclasses.fields(kind) if "help" in x.metadata]:
        value = getattr(arguments, field.name)
        if (tuple(value) if isinstance(value, list) else value) != field.default:
            names.append(f"--{field.name.replace('_', '-')}")
    return names


def given(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Returns the flags among these arguments that have a value."""
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    return [flag for name, flag in flags.items() if getattr(arguments, name) not in (None, False)]


def leave_out(flags: Sequence[str], reason: str) -> None:
    """Raises an error if there are flags that a command would ignore for this reason."""
    if flags:
        raise ValueError(f"{reason}: leave out {', '.join(flags)}")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Adds `--trust-modules`, for commands that read the config of a run or a bundle.

    `main` applies it.
    """
    parser.add_argument(
        "--trust-modules",
        action="store_true",
        help="import modules that a run or a bundle names, which runs their code",
    )


def at_least_one(text: str) -> int:
    """Returns the value of a flag that is a whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def batch_sizes(text: str) -> tuple[int, ...]:
    """Returns the sizes that `--batch-sizes=1,4,16` names."""
    try:
        return tuple(map(at_least_one, text.split(",")))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of positive numbers, such as 1,4,16,64"
        ) from None


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
