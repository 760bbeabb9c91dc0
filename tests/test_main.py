"""The command line as a person types it: verbs, help, errors of one line."""

import dataclasses
import json
import subprocess
import sys

import pytest
from processes import ROOT, command, python
from system import photos, tiny, write_config

import dmljax
from dmljax import main
from dmljax.commands import parser


def test_without_arguments_the_command_lists_verbs_and_recipes():
    completed = command(cwd=ROOT)
    assert completed.returncode == 2 and not completed.stdout
    assert all(f"dmljax {verb} " in completed.stderr for verb in main.VERBS)
    assert "abe " in completed.stderr and "configs/glyphs.py" in completed.stderr
    assert command("--help", cwd=ROOT).stdout == completed.stderr


def test_the_version_is_printed():
    assert command("--version").stdout == f"dmljax {dmljax.__version__}\n"
    words = [sys.executable, "-m", "dmljax", "--version"]
    assert subprocess.check_output(words, cwd=ROOT, text=True) == command("--version").stdout


@pytest.mark.parametrize("is_read, status", [(True, 2), (False, 141)])
def test_only_a_broken_pipe_of_the_output_ends_the_command_without_a_word(is_read, status):
    code = (
        "import os, sys\n"
        "import dmljax.main\n"
        "def main(words): raise BrokenPipeError('the pipe of a worker')\n"
        "dmljax.main.main, sys.argv = main, ['dmljax', 'list']\n"
        "reader, writer = os.pipe()\n"
        "os.dup2(writer, 1)\n"
        f"if not {is_read}: os.close(reader)\n"
        "sys.exit(dmljax.main.console())"
    )
    assert python(code, status=status).stderr == "error: the pipe of a worker\n" * is_read


def test_every_verb_explains_itself_without_starting_jax():
    code = (
        "import sys\n"
        "import dmljax.main\n"
        "for verb in dmljax.main.VERBS:\n"
        "    sys.argv = ['dmljax', verb, '--help']\n"
        "    print('next verb')\n"
        "    try: dmljax.main.console()\n"
        "    except SystemExit as stopped: assert stopped.code == 0, verb\n"
        "    assert 'jax' not in sys.modules, verb"
    )
    texts = python(code).stdout.split("next verb\n")[1:]
    for verb, printed in zip(main.VERBS, texts, strict=True):
        assert f"usage: dmljax {verb}" in printed and f"    dmljax {verb}" in printed


@dataclasses.dataclass(frozen=True)
class _Flags:
    count: int = parser.flag(3, "number of items")
    only_new: bool = parser.flag(False, "leave out old items")
    name: str | None = parser.flag(None, "name of an item", metavar="NAME")
    where: tuple[str, ...] = parser.flag((), "condition; may be repeated")
    hidden: int = 5


def test_a_field_with_a_help_is_a_flag():
    flags = parser.Parser("sort", "Sorts items.")
    parser.add_fields(flags, _Flags, prefix="max-")
    text = flags.format_help()
    assert "number of items (default 3)" in text and "--max-name NAME" in text
    assert "hidden" not in text
    arguments = flags.parse_args(["--max-count=4", "--max-only-new", "--max-where=a"])
    values = parser.values_of(arguments, _Flags, prefix="max-")
    assert values == {"count": 4, "only_new": True, "name": None, "where": ["a"]}
    flags = parser.Parser("sort", "Sorts items.")
    parser.add_fields(flags, _Flags)
    for words, changed in (([], []), (["--count=3"], []), (["--count=0", "--where=a"], None)):
        names = ["--count", "--where"] if changed is None else changed
        assert parser.given(flags.parse_args(words), _Flags) == names


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "no --config is given"),
        (["train", "--config=glyphs", "--steps=3"], "'--steps=3' is not known"),
        (["train", "--config=gliphs"], "did you mean 'glyphs'"),
        (["train", "--config=glyphs", "--processes=x"], "argument --processes: invalid int value"),
        (["train", "--config=glyphs", "--processes=2"], "--coordinator and --process must be"),
        (["train", "--config=glyphs", "--workdir="], "--workdir= is empty: give it a value"),
        (
            ["train", "--config=glyphs", "--config.steps=1e9999"],
            "or a string, got inf",
        ),
        (["study"], "study needs a verb and a file: dmljax study run"),
        (["study", "run", "a.py", "--workdir="], "--workdir= is empty: give it a value"),
        (["evaluate"], "evaluate needs the folder of a run"),
        (["evaluate", "a", "--workdir=b"], "'--workdir=b' is not known"),
        (["evaluate", "no/such/run"], "holds no run"),
        (["embed", "no/such/run"], "needs --out"),
        (["list", "loses"], "did you mean 'losses'"),
        (["list", "losses", "miners"], "'miners' is not known"),
    ],
)
def test_a_wrong_word_is_one_line(unchecked, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(parser.USER_ERRORS) as error:
        main.main(words)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_line_on_stderr(tmp_path):
    completed = command("trian", cwd=tmp_path)
    line = "error: dmljax has no command 'trian': did you mean 'train'?"
    assert completed.returncode == 2 and completed.stderr.startswith(line)
    assert completed.stderr.count("\n") == 1 and not completed.stdout


@pytest.mark.parametrize(
    ("run", "status", "line"),
    [
        ("logging.warning('a.jpg cannot be read') or 0", 0, "warning: a.jpg cannot be read"),
        (
            "np.zeros(1 << 50)",
            1,
            "error: this machine has too little memory for that. Unable to allocate",
        ),
    ],
)
def test_warnings_and_errors_are_lines_without_date_and_file(run, status, line):
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from absl import logging\n"
        "from dmljax.commands import list as verb\n"
        "import dmljax.main\n"
        f"verb.run = lambda *_: {run}\n"
        "sys.exit(dmljax.main.console())"
    )
    printed = python(code, "list", status=status).stderr
    assert printed.startswith(line) and printed.count("\n") == 1


def test_descriptions_of_config_files_begin_in_one_column():
    lines = command("list", cwd=ROOT).stdout.splitlines()
    files = [line.split(maxsplit=1) for line in lines if line.startswith("  configs/")]
    assert len(files) > 20
    starts = {line.index(files[i][1]) for i, line in enumerate(lines[-len(files) :])}
    assert len(starts) == 1


@pytest.mark.parametrize(
    ("kind", "name", "helper"),
    [
        ("losses", "multi_similarity", "ops"),
        ("datasets", "cub200", "Splits"),
        ("normalizations", "caffe", "INPUTS"),
        ("schedules", "cosine", "Schedule"),
    ],
)
def test_list_names_what_a_config_can_name_and_no_helper(kind, name, helper, capsys):
    assert main.main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    descriptions = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines}
    assert len(descriptions[name]) > 10 and helper not in descriptions


@pytest.mark.parametrize(
    ("parts", "workdir", "is_refused"),
    [
        (["."], "photos/runs/one", True),
        (["train", "test"], "photos/runs", False),
    ],
)
def test_a_run_does_not_go_into_a_class_of_its_images(tmp_path, parts, workdir, is_refused):
    for part in parts:
        photos(tmp_path, lambda i, label, part=part: f"{part}/{label}")
    config = tiny(tmp_path, dataset={"name": "folder", "root": str(tmp_path / "photos")}, steps=0)
    words = ["train", f"--config={write_config(tmp_path, config)}"]
    words.append(f"--workdir={tmp_path / workdir}")
    if is_refused:
        with pytest.raises(ValueError, match=r"--workdir=.* lies in .*photos") as error:
            main.main(words)
        assert "\n" not in str(error.value)
    else:
        assert main.main(words) == 0
    assert (tmp_path / workdir / "config.json").exists() != is_refused


def test_a_run_goes_into_a_folder_named_after_the_config_and_its_argument(
    tmp_path, monkeypatch, capsys
):
    """Two rows of an ablation can run one after the other, as typed in a docstring."""
    (tmp_path / "rows.py").write_text(
        '"""Two rows."""\nimport json\n\n\ndef get_config(argument=None):\n'
        f"    config = json.loads({json.dumps(tiny(tmp_path, steps=0, pictures=None))!r})\n"
        '    config["seed"] = int((argument or "seed=0").partition("=")[2])\n'
        "    return config\n"
    )
    monkeypatch.chdir(tmp_path)
    for words in (["--config=rows.py"], ["train", "--config=rows.py:seed=1"]):
        assert main.main(words) == 0
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert folders == ["rows", "rows-seed=1"]
    capsys.readouterr()
    assert main.main(["evaluate", "runs/rows-seed=1"]) == 0
    printed = capsys.readouterr().out
    assert "seed 1" in printed


def test_an_interrupt_in_a_callback_of_the_garbage_collector_ends_the_command():
    """Python drops the exception there. Before, the command went on."""
    code = """
import gc, os, signal, sys, time
from dmljax import main

def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)

def wait(words):
    gc.callbacks.append(interrupt)
    gc.collect()
    time.sleep(20)

main.main = wait
sys.exit(main.console())
"""
    assert python(code, "embed", status=130).stderr == "error: interrupted\n"


@pytest.mark.parametrize("words", [["report"], ["evaluate"], ["export", "--out=x"]])
def test_a_bundle_in_the_place_of_a_run_is_one_line(words, tmp_path):
    """A bundle has a config, too. What reads it is named."""
    for name in ("manifest.json", "config.json", "embed.jaxexport"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"is a bundle, .* serve$") as error:
        main.main([words[0], str(tmp_path), *words[1:]])
    assert "\n" not in str(error.value)
