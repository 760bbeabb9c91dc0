"""A transform with its options bound, and its form for whole batches if it has one."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from dmljax.data.transforms.distortion import distort, distort_batch
from dmljax.data.transforms.recipes import (
    SHORTER_SIDES,
    glyphs_train,
    glyphs_train_batch,
    graph_eval,
    shorter_of,
    standard_eval,
)

# For small images, most of the time of a transform is the overhead of its numpy calls. These
# transforms can share the calls of a batch; the pixels are the same.
_BATCH_FORMS = {distort: distort_batch, glyphs_train: glyphs_train_batch}


class Transform(NamedTuple):
    """Pure functions that transform images. A transform can be called like its `image`.

    `image(image, rng)` transforms one image. `batch(images, rngs)`, if the transform has it,
    transforms images of one size, `[b h w c]`, each with its own generator. `title` is for the
    reader. `least_side` is for `decode.decode`, which may decode a large JPEG at a fraction of its
    size; None asks for all pixels.
    """

    image: Callable[[np.ndarray, np.random.Generator], np.ndarray]
    batch: Callable[[np.ndarray, Iterable[np.random.Generator]], np.ndarray] | None = None
    title: str = ""
    least_side: int | None = None

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return self.image(image, rng)


def bind(transform_fn: Transform | Callable[..., np.ndarray], **options) -> Transform:
    """`transform_fn`, from `transforms` or any other module, with `options` bound.

    >>> transform = bind(distort, rotation=5.0)
    >>> transform(np.zeros((8, 8, 1), np.uint8), np.random.default_rng(0)).shape
    (8, 8, 1)
    """
    if isinstance(transform_fn, Transform):
        return transform_fn
    batch = _BATCH_FORMS.get(transform_fn)
    return Transform(
        functools.partial(transform_fn, **options) if options else transform_fn,
        functools.partial(batch, **options) if batch else None,
        _title(transform_fn, options),
        _least_side(transform_fn, options),
    )


def _title(transform_fn: Callable[..., np.ndarray], options: dict[str, Any]) -> str:
    """The transform with its sizes and options, such as `standard_eval(size=64, shorter=72)`."""
    parameters = inspect.signature(transform_fn).parameters
    sizes = {name: parameters[name].default for name in ("size", "shorter") if name in parameters}
    values = sizes | options
    if transform_fn in (standard_eval, graph_eval) and values["shorter"] is None:
        values["shorter"] = shorter_of(values["size"])
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    name = getattr(transform_fn, "func", transform_fn).__name__  # of a functools.partial, its own
    return f"{name}({shown})" if shown else name


def _least_side(transform_fn: Callable[..., np.ndarray], options: dict[str, Any]) -> int | None:
    """Twice the shorter side that the transform makes, so that its filter has pixels to average."""
    parameters = inspect.signature(transform_fn).parameters.values()
    values = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | options
    rule_fn = SHORTER_SIDES.get(getattr(transform_fn, "func", transform_fn))
    if rule_fn is None or not values["scaled_decode"]:
        return None
    if not values.get("antialias", True):
        raise ValueError(
            "scaled_decode changes the pixels of a filter without antialiasing: leave out one of "
            "scaled_decode=True and antialias=False"
        )
    return 2 * rule_fn(**values)
