"""Errors of readers."""

__all__ = ["Refused"]


class Refused(ValueError):
    """A message that explains what a file is. Any other error of a reader means a damaged file."""
