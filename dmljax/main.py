"""Trains and evaluates what a config describes.

    python -m dmljax.main --config=configs/glyphs.py [--workdir=runs/glyphs] [--config.steps=2000]

Any field of the config is overridden by `--config.field.of.field=value`. The same command goes on
with a run that was interrupted. A finished run is scored again by `--mode=evaluate --workdir=...
[--split=train] [--step=600]`, and `--mode=embed --out=FOLDER [--dtype=float16]` writes embeddings.

Several processes train together, each with the devices that it sees: docs/launch.md.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import pathlib
import sys
import traceback

from absl import app, flags, logging

from dmljax.train import config as config_lib

_FLAGS = flags.FLAGS
_ERRORS = (ValueError, TypeError, OSError, FloatingPointError, ImportError)
_XLA = (  # flag, value, versions that know it
    (
        "xla_cpu_experimental_ynn_fusion_type",
        "-individual_convolution",
        ("0.10.", "0.11.", "0.12."),
    ),
    ("xla_cpu_use_fusion_emitters", "false", ("0.10.",)),
)


def tune_cpu() -> None:
    """What makes steps on a CPU faster and has to be set before JAX computes anything.

    glibc is told not to hand freed memory back: a step's temporaries are one block, and got anew
    from the system page by page at every step they cost a sixth of the time of a small net's.
    XLA computes convolutions by its own kernels: dmljax/kernels/convolution.py says why. And of the
    two ways in which jaxlib 0.10 compiles loops it takes the older one: a small net's step is
    compiled in half the time then, and is quicker by a sixth. Flags that are set already stay.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        arena_max, mmap_max, trim_threshold = -8, -4, -1
        libc.mallopt(arena_max, 1)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
    except (OSError, AttributeError):
        pass  # another system, another allocator
    given = os.environ.get("XLA_FLAGS", "")
    version = importlib.metadata.version("jaxlib")
    for flag, value, known in _XLA:
        # A version that does not know a flag ends when it sees it.
        if flag not in given and version.startswith(known):
            given = f"{given} --{flag}={value}".strip()
    os.environ["XLA_FLAGS"] = given


def _define() -> None:
    flags.DEFINE_string("config", None, "what to run, such as configs/glyphs.py")
    flags.DEFINE_string("workdir", None, "folder of the run; runs/NAME OF THE CONFIG by default")
    flags.DEFINE_enum("mode", "train", ["train", "evaluate", "embed"], "what to do")
    flags.DEFINE_string("split", "test", "train, val or test, for evaluate and embed")
    flags.DEFINE_integer("step", None, "the checkpoint for evaluate and embed; the newest if None")
    flags.DEFINE_string("out", None, "folder that embed writes")
    flags.DEFINE_string("dtype", "float32", "of the written embeddings: float32 or float16")
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where several run")
    flags.DEFINE_integer("processes", None, "how many processes train together")
    flags.DEFINE_integer("process", None, "the number of this one, from 0")
    flags.DEFINE_bool(
        "distributed", False, "several processes, as Slurm or a TPU pod describe them"
    )
    flags.DEFINE_bool("overwrite", False, "delete the run of another config in the same workdir")


def _configs() -> str:
    """The configs of this folder, with their first lines."""
    files = sorted(pathlib.Path("configs").glob("*.py"))
    lines = [f"  {f}  {f.read_text().split(chr(10))[0].strip(chr(34))}" for f in files]
    if not lines:
        return "there is no folder configs/ here: run this in a clone of the repository"
    return "choose one of:\n" + "\n".join(lines)


def _main(argv: list[str], overrides: list[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f"{argv[1]!r} is not known: write --config=FILE --config.field=value")
    from dmljax.train import loop as train
    from dmljax.train import run_folder as trained

    workdir = _FLAGS.workdir
    if _FLAGS.mode != "train":
        if not workdir:
            raise ValueError(f"--mode={_FLAGS.mode} needs --workdir, the folder of a run")
        if _FLAGS.config is not None:
            raise ValueError(
                f"--mode={_FLAGS.mode} has the config of the run: leave out --config; fields are "
                "changed by --config.dataset.root=..."
            )
        which = {"split": _FLAGS.split, "step": _FLAGS.step, "overrides": overrides}
        if _FLAGS.mode == "evaluate":
            trained.score(workdir, **which)
            return 0
        if not _FLAGS.out:
            raise ValueError("--mode=embed needs --out, the folder to write")
        trained.export(workdir, _FLAGS.out, dtype=_FLAGS.dtype, **which)
        return 0
    if _FLAGS.config is None:
        raise ValueError(
            "no --config is given, such as --config=configs/glyphs.py; without any flag, "
            "python -m dmljax.main lists them"
        )
    if not workdir:
        workdir = f"runs/{pathlib.Path(_FLAGS.config.partition(':')[0]).stem}"
    config = config_lib.read(_FLAGS.config, overrides)
    train.run(config, workdir, overwrite=_FLAGS.overwrite)
    return 0


def _start() -> bool:
    """Joins the other processes of a run that has several."""
    alone = (_FLAGS.coordinator, _FLAGS.processes, _FLAGS.process) == (None, None, None)
    if alone and not _FLAGS.distributed:
        return False
    if _FLAGS.mode != "train":
        raise ValueError(f"--mode={_FLAGS.mode} runs in one process: leave out --distributed etc.")
    from dmljax.train import hosts

    return hosts.start(
        coordinator=_FLAGS.coordinator,
        processes=_FLAGS.processes,
        process=_FLAGS.process,
        detect=_FLAGS.distributed,
    )


def _run(argv: list[str], overrides: list[str]) -> int:
    if not _FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # libraries tell much of their inner life
    several = together = False
    try:
        several = _start()
        status = _main(argv, overrides)
        together = True
    except _ERRORS as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:  # before training, where there is nothing to save
        status = 130
    except SystemExit as stopped:  # after a signal, agreed on and saved
        status, together = stopped.code, True
    except Exception as error:
        if not several:
            raise
        status = _failed(error)
    if several:
        _end(status, together)
    return status


def _failed(error: Exception) -> int:
    """The exit code for what only happens among several processes."""
    import jax

    from dmljax.train import hosts

    if isinstance(error, hosts.Elsewhere):
        return 2
    if isinstance(error, jax.errors.JaxRuntimeError):
        first = str(error).splitlines()[0]
        print(f"error: another process has ended, or the devices failed: {first}", file=sys.stderr)
    else:
        traceback.print_exc()
    return 1


def _end(status: int, together: bool) -> None:
    """Leaves with the others, or after a failure without waiting for them."""
    import jax

    from dmljax.train import hosts

    if together:
        jax.distributed.shutdown()
    hosts.leave(status)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(f"{__doc__.strip()}\n\n{_configs()}", file=sys.stderr)
        sys.exit(2)
    tune_cpu()
    _define()
    changes = [a for a in sys.argv if a.startswith("--config.")]
    rest = [a for a in sys.argv if not a.startswith("--config.")]
    app.run(functools.partial(_run, overrides=changes), argv=rest)
