"""Trains and evaluates what a config describes.

    python -m dmljax.main --config=configs/glyphs.py [--workdir=runs/glyphs] [--config.steps=2000]

Any field of the config is overridden by `--config.field.of.field=value`. The same command goes on
with a run that was interrupted.
"""

from __future__ import annotations

import pathlib
import sys

from absl import app, flags

_FLAGS = flags.FLAGS
_ERRORS = (ValueError, TypeError, OSError, FloatingPointError, ImportError)


def _define() -> None:
    from ml_collections import config_flags

    config_flags.DEFINE_config_file("config", None, "what to run, such as configs/glyphs.py")
    flags.DEFINE_string("workdir", None, "folder of the run; runs/NAME OF THE CONFIG by default")
    flags.DEFINE_bool("overwrite", False, "delete the run of another config in the same workdir")


def _configs() -> str:
    """The configs of this folder, with their first lines."""
    files = sorted(pathlib.Path("configs").glob("*.py"))
    lines = [f"  {f}  {f.read_text().split(chr(10))[0].strip(chr(34))}" for f in files]
    if not lines:
        return "there is no folder configs/ here: run this in a clone of the repository"
    return "choose one of:\n" + "\n".join(lines)


def _main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f"{argv[1]!r} is not known: write --config=FILE --config.field=value")
    from dmljax import train

    name = next(a for a in sys.argv if a.startswith("--config=")).partition("=")[2]
    workdir = _FLAGS.workdir or f"runs/{pathlib.Path(name.partition(':')[0]).stem}"
    train.run(_FLAGS.config, workdir, overwrite=_FLAGS.overwrite)
    return 0


def _run(argv: list[str]) -> int:
    try:
        return _main(argv)
    except _ERRORS as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if not any(a.startswith("--config=") for a in sys.argv[1:]) and "--help" not in sys.argv:
        print(f"{__doc__.strip()}\n\n{_configs()}", file=sys.stderr)
        sys.exit(2)
    _define()
    app.run(_run)
