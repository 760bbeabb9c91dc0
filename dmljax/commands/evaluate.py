"""Score a checkpoint of a finished or unfinished run.

    dmljax evaluate runs/glyphs
    dmljax evaluate runs/glyphs --split=train --step=325
    dmljax evaluate runs/photos --config.dataset.root=elsewhere

The config of the run is used; its fields are changed by --config.field=value. Data that have
changed since the training are refused, unless --config.dataset... names them.
"""

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import add_trust, refuse
from dmljax.files import reading


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The flags that name a checkpoint and a split, for every verb that reads a split of a run."""
    add_run(parser)
    parser.add_argument("--split", default="test", help="train, val or test (default)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """The flags that name a checkpoint, for every verb that opens a run."""
    add_folder(parser)
    parser.add_argument("--step", type=int, help="the checkpoint; by default the selected one")


def add_folder(parser: argparse.ArgumentParser) -> None:
    """The flags that name the folder of a run."""
    parser.add_argument("run", nargs="?", help="folder of a run, such as runs/glyphs")
    parser.add_argument("--workdir", help="the same folder, as a flag")
    parser.add_argument("--config", help=argparse.SUPPRESS)
    add_trust(parser)


def run_folder(verb: str, arguments: argparse.Namespace) -> str:
    """The folder of the run, given once, as a word or as a flag."""
    if arguments.config is not None:
        raise ValueError(
            f"{verb} has the config of the run: leave out --config; fields are changed by "
            "--config.dataset.root=..."
        )
    folders = {arguments.run, arguments.workdir} - {None}
    if len(folders) != 1:
        raise ValueError(
            f"{verb} needs --workdir, the folder of one run, such as: dmljax {verb} runs/glyphs"
        )
    return str(reading.chosen_run(folders.pop()))


def overrides_of(verb: str, extras: Sequence[str]) -> list[str]:
    """The words that change the config; any other word is refused."""
    refuse(verb, [word for word in extras if not word.startswith("--config.")])
    return list(extras)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    folder, overrides = run_folder("evaluate", arguments), overrides_of("evaluate", extras)
    from dmljax.runs import folder as saved

    options = {"split": arguments.split, "step": arguments.step, "overrides": overrides}
    for line in saved.evaluate(folder, **options)[1]:
        print(line)
    return 0
