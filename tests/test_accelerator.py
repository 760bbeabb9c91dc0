"""The command that measures everything on an accelerator works, at tiny sizes on a CPU."""

import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from processes import ROOT

SCRIPT = ROOT / "benchmarks" / "accelerator.py"


def _run(folder, *words, **environment):
    command = [sys.executable, str(SCRIPT), "--reduced", f"--out={folder / 'a.json'}", *words]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    return done, json.loads((folder / "a.json").read_text())


def _began(done):
    """The rows that ran."""
    return [text.split(" s  ")[1] for text in done.stderr.splitlines() if " s  " in text]


def test_a_row_that_is_cut_keeps_its_lines_and_ends_what_it_started(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    accelerator = importlib.import_module("accelerator")
    script = tmp_path / "row.py"
    script.write_text(
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('line ' + json.dumps({'name': 'first', 'child': child.pid}), flush=True)\n"
        "print('line {', end='', flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(accelerator, "__file__", str(script))
    lines = {}
    accelerator.run_rows([("losses", [])], dict(os.environ), lines.__setitem__, jobs=1, limit=6)
    first, cut = lines["losses"]
    assert (first["name"], cut["name"]) == ("first", "losses")
    assert cut["error"] == "no result within 6 s"
    assert _has_ended(first["child"])


def _has_ended(process):
    stat = pathlib.Path(f"/proc/{process}/stat")
    for _ in range(50):  # a killed process ends when it gets a core again
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


# Rows for the command itself: `accelerator` runs this file again for each of them.
OWN_ROWS = """
import os, pathlib, sys, time
sys.path.insert(0, SCRIPTS)
import accelerator
from accelerator import line

HERE = pathlib.Path(__file__).parent


def machine(sizes):
    yield line("machine", note="a machine")


def together(sizes, *, names, title):
    (HERE / f"{title} {' '.join(names)} {accelerator.COMPILE_ONLY}").touch()
    if accelerator.COMPILE_ONLY:
        for _ in range(300):
            if len(list(HERE.glob("* True"))) == 3:
                break
            time.sleep(0.1)
        else:
            raise TimeoutError("the rows do not compile at once")
        yield line(title, compile=3.0)
    else:
        (HERE / "alone").mkdir()  # an error if another row runs
        time.sleep(1)
        (HERE / "alone").rmdir()
        yield line(title, 1.0, note=" ".join(names), compile=0.5)


def reads(sizes):
    import jax
    from dmljax.train import compilation

    before = compilation.compiled()
    jax.jit(lambda x: x * 2 + 1)(3.0)
    after = compilation.compiled()
    programs, read = after.programs - before.programs, after.read - before.read
    yield line("reads", read, note=f"{programs - read} compiled")


def fails_first(sizes):
    if accelerator.COMPILE_ONLY:
        raise MemoryError("of the first stage")
    yield line("fails_first", 1.0, compile=0.25)


def dies(sizes):
    yield line("first", 1.0)
    print("RuntimeError: no such kernel", file=sys.stderr)
    print("W1126 23:59:59.123456 7 cache.py:1] Autotuning cache miss", file=sys.stderr)
    os._exit(3)


def tests(sizes):
    with open(HERE / "tests", "a") as file:
        file.write("x")
    yield line("tests", note="passed")


def attention(sizes):
    assert not list(HERE.glob("* True"))  # nothing compiles yet
    yield line("attention", note="measured")


def waits(sizes):
    (HERE / f"waits {os.getpid()}").touch()
    time.sleep(60)
    yield line("waits")


def row(function, **options):
    return accelerator.functools.partial(function, **options)


accelerator.__file__ = __file__
accelerator.PARTS = {"a": 2}
accelerator.UNTIMED = ("tests",)
accelerator.ROWS = {"machine": machine, "a": row(together, names=("1", "2", "3"), title="a")}
accelerator.ROWS |= {"b": row(together, names=("4",), title="b"), "reads": reads}
accelerator.ROWS |= {"fails first": fails_first, "dies": dies, "tests": tests}
accelerator.ROWS |= {"waits": waits, "waits too": waits, "attention": attention}
sys.exit(accelerator.main())
"""


def _own_rows(folder, *words):
    script = folder / "own_rows.py"
    script.write_text(f"SCRIPTS = {str(SCRIPT.parent)!r}\n{OWN_ROWS}")
    out = folder / "new" / "a.json"
    return [sys.executable, str(script), "--reduced", f"--out={out}", *words]


def _run_own_rows(folder, *words):
    done = subprocess.run(_own_rows(folder, *words), capture_output=True, text=True, cwd=folder)
    return done, json.loads((folder / "new" / "a.json").read_text())


def test_rows_compile_at_once_and_are_timed_one_after_the_other(tmp_path):
    done, results = _run_own_rows(tmp_path, "--rows", "a", "attention", "b", "--jobs=3")
    assert done.returncode == 0 and "TimeoutError" not in done.stderr, done.stderr
    began = sorted(path.name for path in tmp_path.iterdir() if path.name[:2] in ("a ", "b "))
    assert began == ["a 1 2 3 False", "a 1 3 True", "a 2 True", "b 4 False", "b 4 True"]
    (a,), (b,) = results["a"], results["b"]
    assert (a["note"], b["note"]) == ("1 2 3", "4")
    assert a["compile"] == b["compile"] == 3.0  # of the first stage
    assert _began(done)[0] == "attention" and _began(done)[-2:] == ["a", "b"]
    assert results["attention"][0]["note"] == "measured"


def test_rows_with_an_error_are_tried_again_and_others_are_not(tmp_path):
    rows = ("--rows", "reads", "fails", "dies", "tests")
    done, results = _run_own_rows(tmp_path, *rows, "--minutes=0")
    assert done.returncode == 1 and "no time was left" in results["dies"][0]["error"]
    done, results = _run_own_rows(tmp_path, *rows)
    assert done.returncode == 1 and "same command" in done.stderr
    # `reads` is timed with the programs of the first stage.
    assert results["reads"][0]["value"] > 0 and results["reads"][0]["note"] == "0 compiled"
    # An error of the first stage is none of the row.
    assert "fails first: first stage, MemoryError: of the first stage" in done.stderr
    assert results["fails first"] == [
        {"name": "fails_first", "value": 1.0, "unit": "", "compile": 0.25}
    ]
    # The error of a row that dies is its last line that is no warning; later rows run.
    measured, error = results["dies"]
    assert measured["value"] == 1 and error["error"] == "RuntimeError: no such kernel"
    assert results["tests"][0]["note"] == "passed"
    table = (tmp_path / "new" / "a.md").read_text()
    assert "ERROR" in table and "| fails_first" in table
    done, _ = _run_own_rows(tmp_path, *rows)
    assert {name.partition(":")[0] for name in _began(done)} == {"dies"}
    assert (tmp_path / "tests").read_text() == "x"


def test_an_unknown_row_is_refused(tmp_path):
    command = [sys.executable, str(SCRIPT), "--rows", "machine", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    message = "no row begins with 'nonsense': there are machine, a"
    assert done.returncode == 2 and message in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tests": [{"name": "te', "cannot be used.*give another --out"),
        ('{"tests": [{"unit": ""}]}', "cannot be used.*give another --out"),
        (None, "cannot be used.*give another --out"),
        (
            '{"device": ["a machine", true, "01234567"], "tests": []}',
            r"has results of \['a machine', True, '01234567'\]",
        ),
    ],
)
def test_results_that_cannot_be_read_or_written_or_continued_are_refused(tmp_path, text, message):
    path = tmp_path / "new" / "a.json"
    if text is None:
        path.parent.touch()
    else:
        path.parent.mkdir()
        path.write_text(text)
    command = _own_rows(tmp_path, "--rows", "tests")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    [error] = done.stderr.splitlines()
    assert done.returncode == 1 and re.search(message, error)
    assert not (tmp_path / "tests").exists() and (text is None or path.read_text() == text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_rows(tmp_path, number):
    command = _own_rows(tmp_path, "--rows", "waits", "--jobs=2")
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    for _ in range(600):
        if len(files := list(tmp_path.glob("waits *"))) == 2:
            break
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode not in (0, 1)
    assert len(files) == 2 and all(_has_ended(path.name.split()[1]) for path in files)
    if number != signal.SIGKILL:
        assert not list(tmp_path.glob("tmp*"))  # the programs


def test_without_an_accelerator_nothing_is_measured_at_full_size(tmp_path):
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path / 'a.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "JAX sees no accelerator: --reduced" in done.stderr


@pytest.mark.slow
def test_every_row_works(tmp_path):
    done, results = _run(tmp_path, "--minutes=60")
    errors = [cells for name in results if name != "device" for cells in results[name]]
    errors = [cells for cells in errors if "error" in cells]
    assert done.returncode == 0 and not errors, errors
    assert len(results) > 15 and all(results.values())
