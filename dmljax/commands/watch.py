"""Serve the page of a run that is still training, renewed at every evaluation.

    dmljax watch runs/photos
    dmljax watch runs/photos --port=8123

The page is served to this machine only, from 127.0.0.1. It shows the curves at once, and all
sections as soon as there is a checkpoint. Nothing is written. The test split is embedded on the
CPU: the devices stay with the training.
"""

import argparse
import os
from collections.abc import Sequence

from dmljax.commands import evaluate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_folder(parser)
    parser.add_argument(
        "--port", type=int, default=8600, help="8600 by default; 0 takes a free one"
    )


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    folder = evaluate.run_folder("watch", arguments)
    overrides = evaluate.overrides_of("watch", extras)
    if not 0 <= arguments.port < 65536:
        raise ValueError(f"--port={arguments.port} must lie between 0 and 65535")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.nice(5)
    from dmljax.runs import watch

    watch.serve(folder, port=arguments.port, overrides=overrides)
    return 0
