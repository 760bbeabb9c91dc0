"""Errors about bundles and about images."""

# Kinds of refusals of images, with the HTTP status of each.
KINDS = {"unreadable": 400, "too_large": 413, "format": 415, "too_small": 422}


class BadBundle(ValueError):
    """A folder is not a bundle, or the bundle is damaged, changed or of another format."""


class BadImage(ValueError):
    """An image is refused, for a reason of one line.

    `kind` is 'unreadable' (empty, truncated, damaged, missing), 'too_large' (bytes or pixels),
    'format' (not a supported file format, animated, or an array of another type) or 'too_small'
    (it cannot become the input of the net). `status` is the HTTP status for it.
    """

    def __init__(self, message: str, *, kind: str):
        super().__init__(message)
        self.kind = kind
        self.status = KINDS[kind]
