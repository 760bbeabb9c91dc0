"""Score a checkpoint of a finished or unfinished run.

    dmljax evaluate runs/glyphs
    dmljax evaluate runs/glyphs --split=train --step=325
    dmljax evaluate runs/photos --config.dataset.root=elsewhere

The command uses the config of the run; --config.field=value changes a field. Data that have changed
since the training are refused, unless --config.dataset... names them.
"""

import argparse
import dataclasses
from collections.abc import Sequence

from dmljax.commands.parser import add_fields, add_trust, flag, refuse
from dmljax.files import reading


@dataclasses.dataclass(frozen=True)
class SplitFlags:
    """The flag of every command that reads a split of a run."""

    split: str = flag("test", "train, val or test")


@dataclasses.dataclass(frozen=True)
class StepFlags:
    """The flag of every command that reads a checkpoint."""

    step: int | None = flag(None, "step of the checkpoint; by default the selected one", type=int)


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a checkpoint and a split of a run."""
    add_run(parser)
    add_fields(parser, SplitFlags)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a checkpoint of a run."""
    parser.add_argument("run", nargs="?", help="folder of a run, such as runs/glyphs")
    add_step(parser)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every command that reads a checkpoint."""
    add_fields(parser, StepFlags)
    add_trust(parser)


def run_folder(verb: str, run: str | None) -> str:
    """Returns the folder of the run; for a ladder, the folder of its chosen step."""
    if run is None:
        raise ValueError(f"{verb} needs the folder of a run, such as: dmljax {verb} runs/glyphs")
    return str(reading.chosen_run(run))


def overrides_of(verb: str, extras: Sequence[str]) -> list[str]:
    """Returns the words that change the config; raises if there is any other word."""
    if any(word.partition("=")[0] == "--config" for word in extras):
        raise ValueError(
            f"{verb} uses the config of the run: leave out --config; "
            "--config.dataset.root=... changes a field"
        )
    refuse(verb, [word for word in extras if not word.startswith("--config.")])
    return list(extras)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    folder = run_folder("evaluate", arguments.run)
    overrides = overrides_of("evaluate", extras)
    from dmljax.runs import folder as saved

    options = {"split": arguments.split, "step": arguments.step, "overrides": overrides}
    for line in saved.evaluate(folder, **options)[1]:
        print(line)
    return 0
