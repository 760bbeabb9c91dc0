"""The errors about folders that are no bundles, and about images that no net can take."""

import contextlib
from collections.abc import Iterator

# Why an image is refused, and the status that a service answers with.
KINDS = {"unreadable": 400, "too_large": 413, "format": 415, "too_small": 422}


class BadBundle(ValueError):
    """A folder that is not a bundle, or a bundle that is damaged, changed or of another format."""


class BadImage(ValueError):
    """An image that is refused, in one line.

    `kind` is 'unreadable' (empty, truncated, damaged, missing), 'too_large' (bytes or pixels),
    'format' (not a supported file format, animated, or an array of another type) or 'too_small'
    (it cannot become the input of the net). `status` is the status of HTTP for it.
    """

    def __init__(self, message: str, *, kind: str):
        super().__init__(message)
        self.kind = kind
        self.status = KINDS[kind]


@contextlib.contextmanager
def naming(image: str) -> Iterator[None]:
    """A `BadImage` of the block begins with the name of the image."""
    try:
        yield
    except BadImage as error:
        raise BadImage(f"{image}: {error}", kind=error.kind) from None
