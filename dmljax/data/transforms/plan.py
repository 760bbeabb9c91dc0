"""The random numbers of a transform without its pixels, so that a device can change the pixels.

A transform draws its numbers from the size of an image, and hands them to a few operations on
pixels. Called with a `Plan` in place of an image, it draws the same numbers from the same
generator, and the plan notes which operations get them. So host and device share every draw. The
numbers are a few floats for each image; `train.augment` computes the operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

_Shape = tuple[int, ...]
_Pattern = tuple[tuple["Step", ...], tuple[_Shape, ...]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


class NoDeviceForm(ValueError):
    """A transform that only the host can compute, because it reads or writes pixels itself."""


class Step(NamedTuple):
    """One operation, and its arguments that are the same for every image."""

    name: str
    constants: tuple[tuple[str, Any], ...] = ()


_ROW, _CUT = Step("row"), Step("cut")
_OF_ANY_SIZE = ("scale", "paste")  # operations on images of several sizes


class Plan:
    """What a transform would do to an image of a shape, in place of the image.

    It can be cut by two slices as an image can, and one of its rows can be taken by an integer.
    `shapes` has the shape of the image and the shape after each of the `steps`; `numbers` has a
    tuple for each step.
    """

    __slots__ = ("numbers", "shapes", "steps")

    def __init__(
        self,
        *shapes: _Shape,
        steps: tuple[Step, ...] = (),
        numbers: tuple[tuple[Any, ...], ...] = (),
    ):
        self.shapes, self.steps, self.numbers = shapes, steps, numbers

    @property
    def shape(self) -> _Shape:
        return self.shapes[-1]

    def then(self, step: Step, shape: _Shape, numbers: tuple[Any, ...]) -> Plan:
        """The plan with one more step."""
        return Plan(
            *self.shapes, shape, steps=(*self.steps, step), numbers=(*self.numbers, numbers)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Plan:
        if isinstance(index, int | np.integer):
            return self.then(_ROW, self.shape[1:], (index,))
        if not (isinstance(index, tuple) and len(index) == 2):
            raise NoDeviceForm(f"takes image[{index}]")
        box = []
        for part, side in zip(index, self.shape[:2], strict=True):
            if not isinstance(part, slice) or part.step is not None:
                raise NoDeviceForm(f"takes image[{index}]")
            start, stop, _ = part.indices(side)
            box.append((start, stop - start))
        (top, height), (left, width) = box
        return self.then(_CUT, (height, width, *self.shape[2:]), (top, left))

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise NoDeviceForm("it computes pixels itself")


def operation(shape_fn: Callable[..., _Shape]) -> Callable[[_Function], _Function]:
    """Makes `fn(image, *numbers, **constants)` an operation that a `Plan` notes.

    `shape_fn(shape, *numbers, **constants)` is the shape of its result.
    """

    def decorate(fn: _Function) -> _Function:
        @functools.wraps(fn)
        def call(image: Any, *numbers: Any, **constants: Any) -> Any:
            if not isinstance(image, Plan):
                return fn(image, *numbers, **constants)
            step = Step(fn.__name__, tuple(constants.items()))
            return image.then(step, shape_fn(image.shape, *numbers, **constants), numbers)

        return call  # type: ignore[return-value]

    return decorate


class Draws(NamedTuple):
    """The numbers of an image: `scalars` float32 `[k]`, and arrays such as noise."""

    scalars: np.ndarray
    arrays: tuple[np.ndarray, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The steps that a transform takes with every image of a data set, whatever it draws.

    Steps that change no image are left out: prepared images may have the size of a resize already.

    * `bounds`: the largest shape of all images before the first step, and after each step.
    * `layouts`: how many scalars and how many arrays each step has.
    * `resizings`: of each step, the pairs of a length and the length that `scale` makes of it.
    """

    transform_fn: Callable[..., Any]
    title: str
    steps: tuple[Step, ...]
    bounds: tuple[_Shape, ...]
    layouts: tuple[tuple[int, int], ...]
    resizings: tuple[frozenset[tuple[int, int]], ...]
    kept: tuple[int, ...]  # the places of `steps` among all steps of a plan
    patterns: dict[_Shape, _Pattern]  # what the plans of all images of a shape have in common

    def draw(self, shape: _Shape, rng: np.random.Generator) -> Draws:
        """The numbers for an image of one of the shapes; `rng` is used as for the image."""
        plan = self.transform_fn(Plan(shape), rng)
        if _pattern(plan) != self.patterns[shape]:
            raise NoDeviceForm(_refusal(self.title, "its steps depend on what it draws"))
        numbers = [number for i in self.kept for number in _numbers(plan, i)]
        return Draws(
            np.array([x for x in numbers if not isinstance(x, np.ndarray)], np.float32),
            tuple(x for x in numbers if isinstance(x, np.ndarray)),
        )


def program(transform_fn: Callable[..., Any], shapes: Iterable[_Shape], *, title: str) -> Program:
    """The program of a transform for images of these shapes.

    Raises `NoDeviceForm` in one line if there is none.
    """
    plans = [_plan(transform_fn, shape, title) for shape in sorted(set(shapes))]
    steps = plans[0].steps
    if any(plan.steps != steps for plan in plans):
        raise NoDeviceForm(_refusal(title, "its steps depend on the size of an image"))
    if len(sizes := sorted({plan.shape for plan in plans})) > 1:
        raise ValueError(
            f"images of one batch have the shapes {sizes[:3]}: choose a transform that "
            "returns images of one size, such as --config.transform=standard_train"
        )
    kept = [i for i in range(len(steps)) if not _changes_nothing(plans, i)]
    for i in kept:
        sizes = sorted({plan.shapes[i + (steps[i] == _CUT)] for plan in plans})
        if len(sizes) > 1 and not (steps[i].name in _OF_ANY_SIZE or is_box(plans[0].steps, i)):
            raise NoDeviceForm(_refusal(title, f"{steps[i].name!r} gets images of several sizes"))
    return Program(
        transform_fn=transform_fn,
        title=title,
        steps=tuple(steps[i] for i in kept),
        bounds=tuple(
            tuple(map(max, zip(*(plan.shapes[i] for plan in plans), strict=True)))
            # A box is as large as its image at most.
            for i in (0, *(i + 1 - is_box(plans[0].steps, i) for i in kept))
        ),
        layouts=tuple(_layout(_numbers(plans[0], i)) for i in kept),
        resizings=tuple(frozenset(_resizings(plans, i)) for i in kept),
        kept=tuple(kept),
        patterns={plan.shapes[0]: _pattern(plan) for plan in plans},
    )


def _plan(transform_fn: Callable[..., Any], shape: _Shape, title: str) -> Plan:
    try:
        plan = transform_fn(Plan(shape), np.random.default_rng(0))
    except (NoDeviceForm, AttributeError, TypeError) as error:
        raise NoDeviceForm(_refusal(title, str(error))) from error
    if not isinstance(plan, Plan):
        raise NoDeviceForm(_refusal(title, "it computes pixels itself"))
    return plan


def _refusal(title: str, reason: str) -> str:
    return (
        f"the transform {title} has no form for devices ({reason}). Leave it to the "
        "host by --config.runtime.data=host, or make it of functions of dmljax.data.transforms"
    )


def is_box(steps: Sequence[Step], i: int) -> bool:
    """Whether step `i` cuts a box, of any size, that the next step resizes."""
    return steps[i] == _CUT and [step.name for step in steps[i + 1 : i + 2]] == ["scale"]


def _changes_nothing(plans: Sequence[Plan], i: int) -> bool:
    """Whether step `i` resizes images, not boxes, that all have the size already."""
    return (
        plans[0].steps[i].name == "scale"
        and not (i and is_box(plans[0].steps, i - 1))
        and all(plan.shapes[i] == plan.shapes[i + 1] for plan in plans)
    )


def _pattern(plan: Plan) -> _Pattern:
    """The steps and the shapes, except the sizes of boxes, which are drawn."""
    boxes = {i + 1 for i in range(len(plan.steps)) if is_box(plan.steps, i)}
    return plan.steps, tuple(shape for i, shape in enumerate(plan.shapes) if i not in boxes)


def _numbers(plan: Plan, i: int) -> tuple[Any, ...]:
    """The numbers of step `i`, after the height and the width of its input where it needs them."""
    size = plan.shapes[i][:2] if plan.steps[i].name in _OF_ANY_SIZE else ()
    return (*size, *plan.numbers[i])


def _layout(numbers: tuple[Any, ...]) -> tuple[int, int]:
    arrays = sum(isinstance(number, np.ndarray) for number in numbers)
    return len(numbers) - arrays, arrays


def _resizings(plans: Sequence[Plan], i: int) -> Iterator[tuple[int, int]]:
    """The pairs of step `i`. A box may be as long as its image."""
    if plans[0].steps[i].name != "scale":
        return
    for plan in plans:
        for axis in range(2):
            length, target = plan.shapes[i][axis], plan.shapes[i + 1][axis]
            if i and is_box(plan.steps, i - 1):
                longest = plan.shapes[i - 1][axis]
                yield from ((length, target) for length in range(1, longest + 1))
            else:
                yield length, target
