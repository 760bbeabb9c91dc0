"""A transform: a list of operations, with a title for the reader."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.data.transforms.operations import OPERATIONS, Operation, Rng, Shape, resize_shorter_side

PixelFn = Callable[..., np.ndarray]  # (image, rng, **options) -> image


@dataclasses.dataclass(frozen=True)
class OwnFunction:
    """An operation that a user wrote: a function `(image, rng, **options) -> image`.

    Only the host can compute it, and a bundle, which holds no code, refuses it.
    """

    function: PixelFn
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    least_side = None

    def __call__(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        return self.function(image, rng, **self.options)

    def to_json(self) -> dict[str, Any]:
        """Returns the import path of the function with all its options."""
        parameters = inspect.signature(self.function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        function = _without_partial(self.function)
        name = f"{function.__module__}:{function.__qualname__}"
        return {"name": name, **defaults, **self.options}


class Transform(NamedTuple):
    """A list of operations, called in order by `transform(image, rng)`.

    `title` is for the reader. `least_side` is for `decode.decode`, which may decode a large JPEG at
    a fraction of its size; None asks for all pixels.
    """

    operations: tuple[Operation | OwnFunction, ...] = ()
    title: str = ""
    least_side: int | None = None

    def __call__(self, image: np.ndarray, rng: Rng) -> np.ndarray:
        for operation in self.operations:
            image = operation(image, rng)
        return image

    @property
    def batch(self) -> Callable[[np.ndarray, Iterable[Rng]], np.ndarray] | None:
        """A function of images `[b h w c]` and generators, which is quicker, if there is one."""
        return getattr(self.operations[0], "batch", None) if len(self.operations) == 1 else None

    def shapes(self, shape: Shape) -> list[Shape]:
        """Returns the shape of an image before the first operation and after each of them."""
        shapes = [shape]
        for operation in self.operations:
            assert isinstance(operation, Operation)
            shapes.append(operation.shape(shapes[-1]))
        return shapes

    def draws(self, shape: Shape, rng: Rng) -> list[tuple[Any, ...]]:
        """Draws the numbers of every operation for an image of this shape, for `train.augment`.

        An operation's numbers follow the height and the width of the image that it gets. The last
        tuple holds a seed of noise, in place of the noise that `apply` draws.
        """
        numbers = []
        for operation, before in zip(self.operations, self.shapes(shape), strict=False):
            assert isinstance(operation, Operation)
            numbers.append((*before[:2], *operation.draw(before, rng)))
        return [*numbers, (int(rng.integers(1 << 24)),)]

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the operations by name, for bundles and for the keys of caches."""
        return [operation.to_json() for operation in self.operations]


def bind(transform_fn: Transform | Callable[..., Any], **options: Any) -> Transform:
    """Builds a transform from a recipe, an operation, or a function of pixels.

    A recipe is a function of keywords that returns a list of operations and functions of pixels,
    such as `transforms.standard_eval`. A function whose first parameters are an image and a
    generator is a function of pixels. `options` are keywords of `transform_fn`.

    >>> from dmljax.data import transforms
    >>> transform = bind(transforms.standard_eval, size=64)
    >>> transform(np.zeros((90, 80, 3), np.uint8), np.random.default_rng(0)).shape
    (64, 64, 3)
    >>> transform.title
    'standard_eval(size=64, shorter=72)'
    """
    if isinstance(transform_fn, Transform):
        return transform_fn
    parameters = inspect.signature(transform_fn).parameters
    if any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values()):
        operations: Sequence[Any] = [OwnFunction(transform_fn, options)]
    else:
        result = transform_fn(**options)
        items = [result] if isinstance(result, Operation) else result
        operations = [x if isinstance(x, Operation) else OwnFunction(x) for x in items]
    least_side = operations[0].least_side if operations else None
    return Transform(tuple(operations), _title(transform_fn, options, operations), least_side)


def of_json(data: Iterable[dict[str, Any]]) -> list[Operation]:
    """Builds operations from `Transform.to_json`."""
    items = [dict(item) for item in data]
    return [OPERATIONS[item.pop("name")](**item) for item in items]


def _title(
    transform_fn: Callable[..., Any], options: dict[str, Any], operations: Sequence[Any]
) -> str:
    """Returns the name with sizes and options, such as `standard_eval(size=64, shorter=72)`."""
    parameters = inspect.signature(transform_fn).parameters
    sizes = {name: parameters[name].default for name in ("size", "shorter") if name in parameters}
    values = sizes | options
    first = next(iter(operations), None)
    if "shorter" in values and isinstance(first, resize_shorter_side):
        values["shorter"] = first.size
    text = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    name = _without_partial(transform_fn).__name__
    return f"{name}({text})" if text else name


def _without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function
