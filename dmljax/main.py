"""The command line: `dmljax VERB ...`.

    dmljax train --config=configs/glyphs.py        python -m dmljax.main --config=configs/glyphs.py

Both do the same: without a verb, the command trains.
"""

import faulthandler
import gc
import importlib
import logging as python_logging
import os
import select
import signal
import sys
import types
import warnings
from collections.abc import Sequence

from absl import flags, logging

from dmljax import __version__
from dmljax.commands.environment import settle_environment, tune_cpu
from dmljax.commands.parser import USER_ERRORS, Parser, print_error
from dmljax.files import reading
from dmljax.hints import check_known

VERBS = (
    *("train", "study", "zero-shot", "evaluate", "report", "embed", "export", "bundle"),
    *("index", "search", "serve", "doctor", "prepare", "weights", "list"),
)
_REPEAT_SECONDS = 0.02


def _repeat_lost_interrupts() -> None:
    """Repeats a Ctrl-C until its exception ends the command.

    Python drops exceptions in callbacks of the garbage collector, and JAX has such a callback.
    """
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    print_exception = sys.unraisablehook

    def hook(unraisable):
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _REPEAT_SECONDS)
        else:
            print_exception(unraisable)

    sys.unraisablehook = hook


def _print_warnings_plainly() -> None:
    """Prints warnings in one line, `warning: ...`, without date, thread, file name and code."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    logging.use_absl_handler()
    flags.FLAGS.mark_as_parsed()  # absl prints a notice of its own before its flags are parsed
    python_logging.addLevelName(python_logging.WARNING, "warning")
    formatter = python_logging.Formatter("%(levelname)s: %(message)s")
    logging.get_absl_handler().setFormatter(formatter)


def main(words: Sequence[str]) -> int:
    """Runs the verb that `words` name ('train' if the first is a flag); returns the exit status."""
    verb, *words = words if words and not words[0].startswith("-") else ["train", *words]
    check_known("dmljax has no command", [verb], VERBS)
    module = _module(verb)
    parser = Parser(verb, module.__doc__ or "")
    module.add_arguments(parser)
    arguments, extras = parser.parse_known_args(words)
    if not arguments.verbose:
        logging.set_verbosity(logging.WARNING)
    with reading.trusting_modules(getattr(arguments, "trust_modules", False)):
        return module.run(arguments, extras)


def _module(verb: str) -> types.ModuleType:
    return importlib.import_module(f"dmljax.commands.{verb.replace('-', '_')}")


def console() -> int:
    """Runs `main` on this process's arguments, and prints errors in one line."""
    words = sys.argv[1:]
    if words == ["--version"]:
        print(f"dmljax {__version__}")
        return 0
    settle_environment()
    # Imports and tracing make many objects that stay: with Python's threshold of 700, looking at
    # them again and again takes a tenth of the time until the first step.
    gc.set_threshold(10_000)
    faulthandler.enable()
    _repeat_lost_interrupts()
    _print_warnings_plainly()
    for stream in (sys.stdout, sys.stderr):  # names of files need not be valid text
        stream.reconfigure(errors="backslashreplace")
    try:
        if not words or words in (["--help"], ["-h"]):
            print(_overview(), file=sys.stdout if words else sys.stderr, flush=True)
            return 0 if words else 2
        tune_cpu(keep_memory=words[0] != "serve")
        status = main(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError as error:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)  # for errors alone
        if not output.poll(0):  # it was another pipe, such as one to a worker process
            print_error(error)
            return 2
        # Nobody reads the output any more, as in `dmljax list | head`. What is not written yet
        # would fail again at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE  # as of a process that ends by the signal
    except USER_ERRORS as error:
        print_error(error)
        return 2
    except MemoryError as error:
        print_error(f"this machine has too little memory for that. {error}")
        return 1
    except KeyboardInterrupt:  # outside of the train loop, which saves by itself
        print_error("interrupted")
        return 130


def _overview() -> str:
    """Returns all verbs with the first line of their help, and the configs that can be run."""
    from dmljax.commands import list as listing

    helps = {verb: (_module(verb).__doc__ or "").partition("\n")[0] for verb in VERBS}
    lines = "\n".join(f"  dmljax {verb:10s} {text}" for verb, text in helps.items())
    return (
        "dmljax: deep metric learning in JAX. `dmljax VERB --help` explains a verb.\n"
        "`python -m dmljax.main --config=...` is `dmljax train --config=...`.\n\n"
        f"{lines}\n\n{listing.configs()}"
    )


if __name__ == "__main__":
    sys.exit(console())
