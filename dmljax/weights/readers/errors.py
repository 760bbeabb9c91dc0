"""Errors of readers."""


class Refused(ValueError):
    """A file is refused; the message says what it is. Other errors of readers mean damage."""
