"""`dmljax train --dry-run`: what a run would need."""

import re

import jax
import pytest
from system import brief, tiny, write_config

from dmljax.config.build import build
from dmljax.main import main
from dmljax.nets import token_attention


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


def test_a_frozen_backbone_does_not_learn(tmp_path, capsys):
    from dmljax.runs import training

    training.run(brief(tmp_path), tmp_path / "source")
    fields = {"start": {"name": str(tmp_path / "source"), "takes": "backbone"}, "trained": "last"}
    config = tiny(tmp_path, **fields)
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
        ({"net": {"name": "convnet", "weights": "no.safetensors"}}, "no file no.safetensors"),
        ({"net": {"name": "convnet", "weights": __file__}}, "is no file of weights that is known"),
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


def test_products_are_counted_whatever_form_of_attention_runs(tmp_path, capsys, monkeypatch):
    """Those of a form such as cuDNN's are hidden; here it has none."""
    hidden = {**token_attention.FORMS, "xla": lambda q, k, v, is_causal: v}
    monkeypatch.setattr(token_attention, "FORMS", hidden)
    counts = []
    for form in ("plain", "xla"):
        net = {"name": "vit_s16", "width": 32, "heads": 2, "depth": 1, "patch": 4}
        net |= {"image_size": 12, "attention": form}
        file = write_config(tmp_path, tiny(tmp_path, net=net))
        assert main(["train", f"--config={file}", "--dry-run"]) == 0
        counts += re.findall(r"([\d.e+]+) floating-point", capsys.readouterr().out)
    assert len(counts) == 2 and counts[0] == counts[1]
