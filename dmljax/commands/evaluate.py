"""Score a checkpoint of a finished or unfinished run.

    dmljax evaluate runs/glyphs
    dmljax evaluate runs/glyphs --split=train --step=325
    dmljax evaluate runs/photos --config.dataset.root=elsewhere

The command uses the config of the run; --config.field=value changes a field. It refuses data whose
labels, paths or sampled file sizes have changed since the training, unless --config.dataset...
names them.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import add_trust, refuse
from dmljax.files import reading


def add_run(parser: argparse.ArgumentParser, *, split: bool = False) -> None:
    """Adds the arguments that name a checkpoint of a run, and with `split` the flag `--split`."""
    parser.add_argument("run", nargs="?", help="folder of a run, such as runs/glyphs")
    if split:
        text = "train, val or test (default %(default)s)"
        parser.add_argument("--split", default="test", help=text)
    add_step(parser)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Adds the flags `--step` and `--trust-modules`, to read a checkpoint."""
    parser.add_argument(
        "--step", type=int, help="step of the checkpoint; by default the chosen one"
    )
    add_trust(parser)


def run_of(
    verb: str, arguments: argparse.Namespace, extras: Sequence[str]
) -> tuple[str, dict[str, Any]]:
    """Returns the folder of the run, and `step` and `overrides` to open it.

    For a ladder, it is the folder of its chosen step.
    """
    overrides = overrides_of(verb, extras)
    if arguments.run is None:
        raise ValueError(f"{verb} needs the folder of a run, such as: dmljax {verb} runs/glyphs")
    options = {"step": arguments.step, "overrides": overrides}
    return str(reading.chosen_run(arguments.run)), options


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
    add_run(parser, split=True)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    folder, options = run_of("evaluate", arguments, extras)
    from dmljax.runs import folder as saved

    print("\n".join(saved.evaluate(folder, split=arguments.split, **options)[1]))
    return 0
