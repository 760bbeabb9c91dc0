"""A method that stays close to its first backbone, and averages of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from system import brief, tiny

from dmljax import adapt
from dmljax.adapt.distillation import similarity_distance
from dmljax.config.build import build
from dmljax.runs import folder, training
from dmljax.train.start import first_state


def test_the_distance_is_a_loop_over_pairs():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 3)), rng.normal(size=(5, 7))

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    expected = np.mean([(cosine(x[i], x[j]) - cosine(y[i], y[j])) ** 2 for i, j in pairs])
    value = similarity_distance(jnp.asarray(x), jnp.asarray(y))
    assert float(value) == pytest.approx(expected, rel=1e-5)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    assert float(similarity_distance(jnp.asarray(x), jnp.asarray(x @ rotation))) < 1e-10


def test_the_loss_has_the_term_and_the_teacher_stays(source, tmp_path):
    config = brief(tmp_path, start={"name": str(source), "takes": "backbone"})
    config["net"] = config["net"] | {"norm": "frozen_batch_norm"}
    plain, distilled = build(config), build(config | {"distill": 2.0})
    states = [first_state(run) for run in (plain, distilled)]
    batch = {"images": jax.random.uniform(jax.random.key(1), (8, 12, 12, 3))}
    batch["labels"] = jnp.arange(8) // 2
    key = jax.random.key(0)
    values = [
        jax.jit(run.method.loss)(state.params, state.model_state, batch, key=key, step=0)
        for run, state in zip((plain, distilled), states, strict=True)
    ]
    distance = values[1][1][1]["distillation"]
    assert float(distance) > 1e-4
    assert float(values[1][0] - values[0][0]) == pytest.approx(2 * float(distance), rel=1e-4)
    training.run(config | {"distill": 2.0}, tmp_path / "run")
    state = folder.reopen(tmp_path / "run")[1]
    teacher, first = state.model_state["teacher"]["params"]["net"], states[0].params["net"]
    jax.tree.map(np.testing.assert_array_equal, teacher, first)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), state.params["net"], first)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_what_cannot_be_distilled_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"distill=.* needs a pretrained backbone: give"):
        build(tiny(tmp_path, distill=1.0))


def test_interpolated_is_linear_and_exact_at_its_ends():
    a, b = {"x": jnp.arange(3.0), "n": jnp.arange(2)}, {"x": jnp.ones(3), "n": jnp.zeros(2, int)}
    np.testing.assert_allclose(adapt.interpolated(a, b, share=0.25)["x"], [0.25, 1.0, 1.75])
    for share, end in ((0.0, a), (1.0, b)):
        np.testing.assert_array_equal(adapt.interpolated(a, b, share=share)["x"], end["x"])
    np.testing.assert_array_equal(adapt.interpolated(a, b, share=1.0)["n"], a["n"])
    with pytest.raises(ValueError, match="between 0 and 1, not 2"):
        adapt.interpolated(a, b, share=2)
