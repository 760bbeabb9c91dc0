"""`dmljax train`: `--dry-run`, and the flag of XLA for `runtime.deterministic`."""

import json
import re

import jax
import pytest
from processes import python
from system import tiny, write_config

from dmljax.config.build import build
from dmljax.main import main
from dmljax.nets import token_attention
from dmljax.runs import dry_run, summary
from dmljax.train import devices, start

_CODE = """
import json, os, sys
from dmljax import main
from dmljax.commands import train

seen = []
def note(arguments, overrides):
    bridge = sys.modules.get("jax._src.xla_bridge")
    assert bridge is None or not bridge.backends_are_initialized()
    seen.append(os.environ["XLA_FLAGS"])
train._train = note
for flags, words in json.loads(sys.argv[1]):
    os.environ["XLA_FLAGS"] = flags
    assert main.main(words) == 0
print(json.dumps(seen))
"""


def test_it_counts_what_learns_and_trains_nothing(tmp_path, capsys):
    file = write_config(tmp_path, tiny(tmp_path))
    assert main(["train", f"--config={file}", "--dry-run", f"--workdir={tmp_path / 'run'}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = sum(x.size for x in jax.tree.leaves(build(tiny(tmp_path)).shapes.params))
    assert f"parameters: {count:,}, {count:,} of them learn (100.0 %)" in lines[0]
    assert "a step: 8 images" in lines[1] and "6 steps" in lines[1]
    # Two convolutions of 3 x 3 on 12 x 12 pixels with strides of 2, and a linear layer, for 8
    # images; the backward pass takes twice as many, and more where strides leave holes.
    forward = 2 * 8 * (6 * 6 * 4 * 27 + 3 * 3 * 8 * 36 + 8 * 4)
    flops = float(re.search(r"([\d.e+]+) floating-point", lines[1])[1])
    assert 2 * forward < flops < 10 * forward
    sizes = [int(x.replace(",", "")) for x in re.findall(r"([\d,]+) with", lines[-1])]
    assert len(sizes) == 3 and sizes == sorted(sizes) and sizes[0] > 1000
    assert "for cpu; accelerators usually need smaller temporaries" in lines[-2]
    assert not (tmp_path / "run").exists()


def test_a_frozen_backbone_does_not_learn(source, tmp_path, capsys):
    fields = {"start": {"name": str(source), "takes": "backbone"}, "trained": "last"}
    config = tiny(tmp_path, **fields, held_out=0.5)
    config["ladder"] = [{"name": "head"}, {"name": "all", "trained": "all"}]
    assert main(["train", f"--config={write_config(tmp_path, config)}", "--dry-run"]) == 0
    text = capsys.readouterr().out
    head = build(config).shapes.params["head"]
    count = sum(x.size for x in head["red"].values())
    assert text.index("== head") < text.index(f"{count:,} of them learn") < text.index("== all")
    assert "learn (100.0 %)" in text.partition("== all")[2]


def test_a_wrong_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no field 'stepz'"):
        main(["train", f"--config={write_config(tmp_path, tiny(tmp_path, stepz=3))}", "--dry-run"])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"net": {"name": "convnet", "weights": "no.safetensors"}},
            "no.safetensors does not exist",
        ),
        ({"net": {"name": "convnet", "weights": __file__}}, "is not a known file of weights"),
        ({"start": "no_run"}, "no_run holds no run"),
        ({"runtime": {"devices": 9}}, "runtime.devices=9, and this process has 8 devices"),
    ],
)
def test_what_the_start_refuses_is_refused_by_the_same_line(tmp_path, change, message):
    file = write_config(tmp_path, tiny(tmp_path, **change))
    lines = []
    for words in ([], ["--dry-run"]):
        with pytest.raises((ValueError, OSError), match=message) as refusal:
            main(["train", f"--config={file}", f"--workdir={tmp_path / 'run'}", *words])
        lines.append(str(refusal.value))
    assert lines[0] == lines[1] and not (tmp_path / "run").exists()


def test_products_are_counted_whatever_form_of_attention_runs(tmp_path, monkeypatch):
    """Those of a form such as cuDNN's are hidden; here it has none."""
    hidden = {**token_attention.FORMS, "xla": lambda q, k, v, is_causal: v}
    monkeypatch.setattr(token_attention, "FORMS", hidden)
    lines = []
    for form in ("plain", "xla"):
        net = {"name": "vit_s16", "width": 32, "heads": 2, "depth": 1, "patch": 4}
        net |= {"image_size": 12, "attention": form}
        lines.append([*dry_run._of_step(build(tiny(tmp_path, net=net)))])
    assert lines[0] == lines[1] and "floating-point" in lines[0][1]


def test_the_flag_is_set_before_jax_starts():
    flag, words = "--xla_gpu_deterministic_ops=true", ["--config=glyphs"]
    off, deterministic = flag.replace("true", "false"), "--config.runtime.deterministic=True"
    cases = [("--xla_a=1", [*words, deterministic]), ("", words), (off, [*words, deterministic])]
    # What the user has set stays.
    assert json.loads(python(_CODE, json.dumps(cases)).stdout) == [f"--xla_a=1 {flag}", "", off]


def test_a_gpu_without_the_flag_is_refused_and_the_header_says_so(tmp_path):
    devices.check_determinism("cpu", "")
    devices.check_determinism("gpu", "--a=1 --xla_gpu_deterministic_ops=true")
    with pytest.raises(ValueError, match=r"read before JAX starts.*xla_gpu_deterministic_ops=true"):
        devices.check_determinism("gpu", "--xla_gpu_deterministic_ops=false")
    assert "--xla_gpu_deterministic_ops=true" in devices.describe_determinism("gpu")
    run = build(tiny(tmp_path, runtime={"deterministic": True}))
    assert "; deterministic" in summary.header(run, start.first_state(run))[-1]
