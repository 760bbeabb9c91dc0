"""`dmljax weights` lists, fetches and converts, and explains errors in one line."""

import os
import pathlib
import shutil
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "weights"))
from published_layouts import resnet_tensors, write_torch

from dmljax import main, weights
from dmljax.weights import PUBLISHED
from dmljax.weights import published as published_lib

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "glyphs.py"


def run(*words):
    return main.main(["weights", *map(str, words)])


@pytest.mark.parametrize("columns", [80, 140])
def test_without_arguments_the_published_files_are_listed(monkeypatch, capsys, columns):
    size = os.terminal_size((columns, 24))
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: size)
    assert run() == 0
    head, *rows, _ = printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= max(columns, 80)
    titles = ["name", "MB", "input", "license", "--net", "trained", "on"]
    assert head.split()[:5] == titles[:5]
    for (name, published), row in zip(PUBLISHED.items(), rows, strict=True):
        cells = [name, published.megabytes, published.preprocessing.size]
        assert row.split()[:3] == [str(cell) for cell in cells]
        assert published.license.name[:4] in row
        assert columns < 140 or f" {published.net} " in row
    assert run("explain", "resnet50") == 0
    assert "sha256:19c8e357" in capsys.readouterr().out


def test_a_file_is_converted_with_the_options_of_the_net(tmp_path, capsys):
    path, to = write_torch(tmp_path, resnet_tensors()), tmp_path / "converted.safetensors"
    flags = ["--net=resnet18", "--net.blocks=(1, 1, 1, 1)", "--net.width=4", f"--to={to}"]
    assert run(path, *flags) == 0
    assert f"wrote {to}" in capsys.readouterr().out
    metadata = weights.read_metadata(to)
    assert metadata["net"]["width"] == 4 and metadata["net"]["classes"] == 10  # of the file
    to.unlink()
    assert run(path, *flags, "--net.classes=None") == 0
    assert "classifiers left out" in capsys.readouterr().out
    assert weights.read_metadata(to)["net"]["classes"] is None


@pytest.mark.parametrize("variable", ["elsewhere", ""])
def test_a_file_is_fetched_into_the_folder_of_the_environment(monkeypatch, capsys, variable):
    folders = []
    environment = os.environ | {"DMLJAX_CACHE": variable}
    monkeypatch.setattr(os, "environ", environment)  # the environment of C code does not change
    monkeypatch.setattr(weights, "fetch", lambda name, *, folder: folders.append(folder) or "path")
    assert run("--fetch=resnet50") == 0
    assert capsys.readouterr().out == "path\n"
    assert folders == [pathlib.Path(variable or "~/.cache/dmljax").expanduser()]
    assert published_lib.fetch is not weights.fetch


def test_errors_leave_no_file(tmp_path):
    path, to = write_torch(tmp_path, resnet_tensors()), tmp_path / "converted.safetensors"
    for words, message in (
        ([path, "--net=resnet19", f"--to={to}"], "did you mean 'resnet18'"),
        ([path, "--net=resnet50", f"--to={to}"], "does not fit the net"),
        ([path, "--net=resnet18", f"--to={tmp_path}/x.pth"], "must end in .safetensors"),
        ([path, "--net=resnet18", f"--to={tmp_path}/no/x.safetensors"], "does not exist"),
        ([path, "--net=resnet18", f"--to={path}"], "file.pth exists: choose another --to"),
        ([path, "--net=resnet18"], "--to=FILE.safetensors are needed"),
        ([path, "--net=resnet18", "--width=4", f"--to={to}"], "'--width=4' is not known"),
        (["--net=resnet18"], "for a file to convert: leave out --net$"),
        (["fetch", "resnet50"], "fetch resnet50 is not known: see dmljax weights --help"),
        (["explain", "resnet50", f"--to={to}"], "for a file to convert: leave out --to$"),
        (["explain", "resnet50", "--net.classes=None"], "leave out --net.classes=None$"),
        ([path, "--fetch=resnet50", "--adapter=a"], f"leave out --adapter, {path}$"),
        (["--fetch=resnet51"], "no published file is called 'resnet51': did you mean 'resnet50'"),
        ([tmp_path / "none.pth", "--net=resnet18", f"--to={to}"], "does not exist"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            run(*words)
    assert [p.name for p in tmp_path.iterdir()] == ["file.pth"]


def test_nested_headers_of_safetensors_are_one_line(tmp_path):
    """Also through training, which looks for the metadata of a converted file first."""
    deep = "[" * 100_000 + "]" * 100_000
    tensor = '"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}'
    headers = {
        "header": f'{{{tensor}, "y": {deep}}}',
        "metadata": f'{{"__metadata__": {{"dmljax": "{deep}"}}, {tensor}}}',
        "no text": f'{{"__metadata__": {{"dmljax": {deep}}}, {tensor}}}',
        "no object": f'{{"__metadata__": {deep}, {tensor}}}',
    }
    for name, header in headers.items():
        path = tmp_path / f"{name.replace(' ', '_')}.safetensors"
        data = header.encode()
        path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(4))
        with pytest.raises(ValueError, match=r"damaged|nested deeper|converted already") as refused:
            run(path, "--net=resnet18", f"--to={tmp_path}/a.safetensors")
        assert "\n" not in str(refused.value) and path.name in str(refused.value)
    words = ["train", f"--config={CONFIG}", f"--config.net.weights={path}", f"--workdir={path}.run"]
    with pytest.raises(ValueError, match=r"nested deeper|damaged"):
        main.main(words)
    assert not list(tmp_path.glob("*.run")) and not (tmp_path / "a.safetensors").exists()
