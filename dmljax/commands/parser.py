"""The parser that all verbs share: flags, help, and errors of one line."""

import argparse
import sys
from collections.abc import Sequence

# Errors that the user can correct: one line, no traceback.
USER_ERRORS = (ValueError, TypeError, OSError, FloatingPointError, ImportError)


class Parser(argparse.ArgumentParser):
    """`argparse`, with a docstring as the help and errors that are raised instead of printed."""

    def __init__(self, verb: str, docstring: str):
        super().__init__(
            prog=f"dmljax {verb}",
            description=docstring,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--verbose", action="store_true", help="also print what the libraries report"
        )

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The flag of every verb that reads the config of a run or of a bundle; `main` obeys it."""
    parser.add_argument(
        "--trust-modules",
        action="store_true",
        help="import modules that a run or a bundle names, which runs their code",
    )


def at_least_one(text: str) -> int:
    """The `type` of a flag whose value is a whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number


def batch_sizes(text: str | None) -> tuple[int, ...] | None:
    """The sizes that `--batch-sizes=1,4,16` names; None without the flag."""
    if text is None:
        return None
    try:
        sizes = tuple(int(word) for word in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--batch-sizes={text} is no list of positive numbers, such as 1,4,16,64")
    return sizes


def refuse(verb: str, extras: Sequence[str]) -> None:
    """Raises an error if `extras` holds a word, which `verb` then does not know."""
    if extras:
        raise ValueError(f"{extras[0]!r} is not known (see dmljax {verb} --help)")


def print_error(error: BaseException | str) -> None:
    """Prints the error as one line on stderr."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
