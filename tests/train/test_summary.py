"""What a run says: where it starts, what was chosen and why."""

from system import tiny

from dmljax.train import initial_state, loop

HELD_OUT = {"validation": 0.5, "sampler": {"name": "plan", "classes": 2, "per_class": 4}}
# From harmless to harmful, so that an early step is the best.
HARMFUL = {
    "optimizer": {"name": "sgd", "rate": 100.0},
    "schedule": {"name": "constant", "warmup": 6},
    "evaluate": {"every": 1, "ks": [1], "clustering": False, "batch_size": 16},
    "checkpoint": {"keep": 1},
    "runtime": {"devices": 1},
}


def _printed(folder, capsys, **fields):
    loop.run(tiny(folder, **HARMFUL | fields), folder / "run")
    return capsys.readouterr().out


def test_a_chosen_step_is_explained(tmp_path, capsys):
    printed = _printed(tmp_path, capsys, select="val/MAP@R", **HELD_OUT)
    line = next(line for line in printed.splitlines() if "was chosen by val/MAP@R" in line)
    assert "is the highest of 6 evaluations (step 6: " in line
    step = int(line.split()[1])
    assert step < 6 and f"after step {step} (select=val/MAP@R)" in printed


def test_a_last_step_that_is_not_the_best_comes_with_advice(tmp_path, capsys):
    printed = _printed(tmp_path, capsys)
    assert "the last step was chosen (select=last), but test/R@1 was higher at step" in printed
    assert "--config.validation=0.2 --config.select=val" in printed


def test_a_last_step_that_is_the_best_needs_no_words(tmp_path, capsys):
    net = {"name": "convnet", "widths": [4, 8], "strides": [2, 2], "frozen": True}
    printed = _printed(tmp_path, capsys, net=net, optimizer={"name": "sgd", "rate": 0.0})
    assert "chosen" not in printed and "after step 6 (select=last)" in printed


def test_a_published_net_without_its_weights_is_told_what_that_means(tmp_path, capsys):
    line = initial_state.missing_weights_note("resnet50")
    assert "resnet50 starts from random values" in line and "--config.net.weights=" in line
    assert initial_state.missing_weights_note("convnet") is None
    assert "random values" not in _printed(tmp_path, capsys)
