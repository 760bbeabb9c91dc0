"""Errors that the user can correct: one line, no traceback."""

from __future__ import annotations

import sys

__all__ = ["USER_ERRORS", "print_error"]

USER_ERRORS = (ValueError, TypeError, OSError, FloatingPointError, ImportError)


def print_error(error: BaseException) -> None:
    """Prints the error as one line on stderr."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
