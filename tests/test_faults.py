"""What goes wrong outside of the run: one line with the fix, and the last checkpoint stays good."""


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    config = tiny(tmp_path, optimizer={"name": "sgd", "rate": 1e30}, normalize="unit")
    with pytest.raises(FloatingPointError, match=r"the loss is .* at step \d+ .*optimizer.rate"):
        train.run(config, tmp_path / "run")
