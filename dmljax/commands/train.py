"""Train and evaluate a model from a config, and write a run folder.

    dmljax train --config=configs/glyphs.py
    dmljax train --config=abe:dataset=cars196,learners=4 --config.dataset.root=cars196
    dmljax train --config=configs/glyphs.py --config.steps=2000 --workdir=runs/longer
    dmljax train --config=configs/glyphs.py --print

A config is a Python file or the name of a recipe (`dmljax list` prints both); arguments follow a
colon. --config.FIELD=VALUE changes a field, also a nested one: `dmljax list fields` explains the
fields, and --print shows their values. The same command continues an interrupted run.
--features=I/N computes a part of the features for features='cached' (docs/choosing.md).
docs/scale.md describes training on several processes.
"""

import argparse
import contextlib
import dataclasses
import importlib
import traceback
from collections.abc import Mapping, Sequence

from dmljax.commands import environment
from dmljax.commands.parser import (
    SHARD,
    USER_ERRORS,
    add_fields,
    add_trust,
    flag,
    given,
    leave_out,
    print_error,
    refuse,
)
from dmljax.config import files as config_files


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of a run."""

    config: str | None = flag(None, "config file or recipe, such as configs/glyphs.py or glyphs")
    workdir: str | None = flag(None, "folder of the run; runs/CONFIG-ARGUMENTS by default")
    overwrite: bool = flag(False, "delete a run of another config in the same folder")
    print: bool = flag(False, "print every value of the config and its origin, and exit")
    dry_run: bool = flag(
        False,
        "check the run, print its parameters, operations, memory and largest batch, and exit",
    )
    topology: str | None = flag(
        None,
        "with --dry-run: compile for GPUs or TPUs, present or not, and print the memory per "
        "device, such as h100:8 or v5e:1x1,v5e:2x4,v5e:8x8",
    )
    features: str | None = flag(
        None, "compute only part I of N of the cached features, and exit", **SHARD
    )


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """Flags of one of several processes."""

    coordinator: str | None = flag(None, "address of process 0", metavar="HOST:PORT")
    processes: int | None = flag(None, "number of processes", type=int)
    process: int | None = flag(None, "index of this process, from 0", type=int)
    distributed: bool = flag(False, "take these values from Slurm, a TPU pod or Open MPI")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_fields(parser, Flags)
    add_trust(parser)
    add_fields(parser.add_argument_group("several processes"), ProcessFlags)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    overrides = [word for word in extras if word.startswith("--config.")]
    refuse("train", [word for word in extras if word not in overrides])
    if arguments.config is None:
        raise ValueError(
            "no --config is given, such as --config=configs/glyphs.py; `dmljax list` lists them"
        )
    if arguments.print:
        print(config_files.table(arguments.config, overrides))
        return 0
    if arguments.topology is not None and not arguments.dry_run:
        raise ValueError("--topology needs --dry-run: a run cannot use these devices")
    if arguments.dry_run:
        from dmljax.runs import dry_run

        config = config_files.read(arguments.config, overrides)
        names = [] if arguments.topology is None else arguments.topology.split(",")
        for line in dry_run.lines(config, described=names):
            print(line, flush=True)
        return 0
    processes = given(arguments, ProcessFlags)
    if arguments.features:
        ignored = [*given(arguments, "workdir", "overwrite"), *processes]
        leave_out(ignored, "--features computes features and trains nothing")
        from dmljax.runs import training

        config = config_files.read(arguments.config, overrides)
        images, folder = training.compute_features(config, shard=arguments.features)
        print(f"{folder}: {images:,} images of part {arguments.features}")
        return 0
    # `_train` reports errors of the config: processes must join first, to end together.
    with contextlib.suppress(*USER_ERRORS, LookupError):
        if config_files.read(arguments.config, overrides)["runtime"]["deterministic"] is True:
            environment.require_determinism()
    if processes:
        return _train_with_others(arguments, overrides)
    _train(arguments, overrides)
    return 0


def _train(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    config = config_files.read(arguments.config, overrides)
    from dmljax.data import image_folders
    from dmljax.runs import ladder, training

    workdir = arguments.workdir or f"runs/{config_files.folder_name(arguments.config)}"
    dataset = config.get("dataset")
    if isinstance(dataset, Mapping) and dataset.get("name") == "folder" and dataset.get("root"):
        for folder in image_folders.read_folders(dataset["root"], dataset.get("split")):
            if image_folders.contains(folder, workdir):
                raise ValueError(
                    f"--workdir={workdir} lies in {folder}, whose folders are classes of images: "
                    "choose a folder outside of it"
                )
    run_fn = ladder.run if config.get("ladder") else training.run
    run_fn(config, workdir, overwrite=arguments.overwrite, source=arguments.config)


def _train_with_others(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Trains as one of several processes, then ends this process with its exit status."""
    from dmljax.train import hosts

    # Import the loop before JAX starts: its imports change the environment, which the threads of
    # XLA read.
    importlib.import_module("dmljax.runs.training")
    joined = hosts.start(
        coordinator=arguments.coordinator,
        processes=arguments.processes,
        process=arguments.process,
        detect=arguments.distributed,
    )
    if not joined:
        _train(arguments, overrides)
        return 0
    import jax

    status, all_agree = 1, False  # where all processes end here, they can wait for each other
    try:
        _train(arguments, overrides)
        status, all_agree = 0, True
    except SystemExit as stopped:  # after a signal: all processes agreed on the step, and saved
        status, all_agree = int(stopped.code or 0), True
    except KeyboardInterrupt:  # before training, where there is nothing to save
        status = 130
    except hosts.Process0Failed:
        status = 2
    except USER_ERRORS as error:
        print_error(error)
        status = 2
    except jax.errors.JaxRuntimeError as error:
        first_line = str(error).splitlines()[0]
        print_error(f"another process has ended, or the devices failed: {first_line}")
    except Exception:
        traceback.print_exc()
    if all_agree:
        jax.distributed.shutdown()
    hosts.leave(status)
    return status
