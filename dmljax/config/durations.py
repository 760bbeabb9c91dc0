"""Lengths of time in a config, such as 500 or '60 epochs', as numbers of steps."""

from collections.abc import Callable, Collection

# epochs -> the step after which that many epochs of the sampler have ended.
EpochEnd = Callable[[float], float]


def steps(length: int | str, *, epoch_end: EpochEnd, field: str = "length") -> int:
    """The number of steps of a length: 500, '500 steps' or '60 epochs'.

    `field` is the field of the config that holds the length, for error messages.
    """
    count, unit = _parse(length, field)
    if unit == "epochs":
        count = epoch_end(count)
    return max(1, round(count)) if isinstance(length, str) else round(count)


def every(
    length: int | str, *, epoch_end: EpochEnd, total: int, field: str = "length"
) -> Collection[int]:
    """The steps up to `total` at which something is due that happens once per `length`.

    If `length` is a whole number of epochs, these are the steps at which epochs of the sampler end;
    epochs may differ in length. Any other `length` is a fixed number of steps.
    """
    count, unit = _parse(length, field)
    if not count:
        raise ValueError(f"{field}={length!r} is no interval: write steps, or '1 epoch'")
    if unit == "steps" or count < 1 or count != int(count):
        period = max(1, steps(length, epoch_end=epoch_end, field=field))
        return range(period, total + 1, period)
    ends: list[int] = []
    while not ends or ends[-1] < total:
        ends.append(max(1, round(epoch_end(count * (len(ends) + 1)))))
    return frozenset(end for end in ends if end <= total)


def _parse(length: int | str, field: str) -> tuple[float, str]:
    """(60.0, 'epochs') of '60 epochs'."""
    message = f"{field}={length!r} is no duration: write 500, or '60 epochs'"
    if isinstance(length, str):
        number, _, unit = length.partition(" ")
        units = {"steps": "steps", "step": "steps", "epochs": "epochs", "epoch": "epochs"}
        try:
            count, unit = float(number), units[unit]
        except (ValueError, KeyError):
            raise ValueError(message) from None
    else:
        is_number = not isinstance(length, bool) and abs(length) < float("inf")
        if not is_number or int(length) != length:
            raise ValueError(message)
        count, unit = float(length), "steps"
    if not 0 <= count < float("inf"):
        raise ValueError(message)
    return count, unit
