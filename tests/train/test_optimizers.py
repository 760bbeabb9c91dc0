"""Updates against golden numbers and plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmljax.train import optimizers, schedules

# One parameter from 1, rate 0.01, decay 0.1, gradients sin(1), sin(2), ...
GOLDEN = [0.9905852902, 0.9808230137, 0.9737865480, 0.9707186388, 0.9705068085]
GOLDEN += [0.9695790017, 0.9685958812, 0.9675254130, 0.9664157648]


def _run(transform, params, gradients):
    state, out = transform.init(params), []
    for gradient in gradients:
        updates, state = transform.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        out.append(params)
    return out, state


def _build(direction, **options):
    options = {"rate": 0.01, "schedule": schedules.constant(total=10)} | options
    return optimizers.build(direction, **options)


def test_radam_is_that_of_the_first_code():
    transform = _build(optimizers.radam(), groups=[{"path": ".", "decay": 0.1}])
    gradients = [{"w": jnp.asarray(np.sin(t), jnp.float32)} for t in range(1, 10)]
    updated, _ = _run(transform, {"w": jnp.ones(())}, gradients)
    np.testing.assert_allclose([float(p["w"]) for p in updated], GOLDEN, rtol=2e-6)


def test_adam_with_decay_is_adamw():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)}
    gradients = [{"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)} for _ in range(5)]
    ours, _ = _run(_build(optimizers.adam(), decay=0.1), params, gradients)
    theirs, _ = _run(optax.adamw(0.01, weight_decay=0.1), params, gradients)
    np.testing.assert_allclose(ours[-1]["w"], theirs[-1]["w"], rtol=1e-6)


def test_groups_set_rate_decay_and_stillness():
    params = {"net": {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}, "head": jnp.ones((2, 2))}
    groups = [{"path": "^net/a", "frozen": True}, {"path": "^head", "factor": 10.0, "decay": 0.0}]
    ones = jax.tree.map(jnp.ones_like, params)
    updated, _ = _run(_build(optimizers.sgd(momentum=0), decay=0.5, groups=groups), params, [ones])
    np.testing.assert_array_equal(updated[0]["net"]["a"], 1)
    np.testing.assert_allclose(updated[0]["net"]["b"], 0.99)  # a vector does not decay
    np.testing.assert_allclose(updated[0]["head"], 0.9)


def test_matrices_decay_unless_told():
    params = {"w": 2 * jnp.ones((2, 2))}
    updated, _ = _run(
        _build(optimizers.sgd(momentum=0), decay=0.5), params, [{"w": jnp.zeros((2, 2))}]
    )
    np.testing.assert_allclose(updated[0]["w"], 2 - 0.01 * 0.5 * 2)


def test_the_average_follows_and_clipping_bounds():
    params = {"w": jnp.zeros((2, 2))}
    transform = _build(optimizers.sgd(momentum=0), clip=1.0, average=0.9, rate=1.0)
    updated, state = _run(transform, params, [{"w": jnp.full((2, 2), 50.0)}] * 3)
    np.testing.assert_allclose(updated[-1]["w"], -1.5, rtol=1e-6)  # a step has length 1
    steps, mean = [-0.5, -1.0, -1.5], 0.0
    for step in steps:
        mean = 0.9 * mean + 0.1 * step
    np.testing.assert_allclose(optimizers.averaged(updated[-1], state)["w"], mean, rtol=1e-6)
    np.testing.assert_array_equal(optimizers.averaged(params, ())["w"], 0)


def test_accumulated_gradients_are_one_step():
    params = {"w": jnp.zeros((2, 2))}
    gradients = [{"w": jnp.full((2, 2), g)} for g in (1.0, 3.0)]
    updated, _ = _run(_build(optimizers.sgd(momentum=0), accumulate=2, rate=1.0), params, gradients)
    np.testing.assert_array_equal(updated[0]["w"], 0)
    np.testing.assert_allclose(updated[1]["w"], -2)


def test_accumulating_the_schedule_counts_steps_and_the_average_updates():
    params, schedule = {"w": jnp.zeros((2, 2))}, schedules.steps(total=8, at=[4])
    transform = optimizers.build(
        optimizers.sgd(momentum=0), rate=1.0, schedule=schedule, accumulate=2, average=0.5
    )
    updated, state = _run(transform, params, [{"w": jnp.ones((2, 2))}] * 8)
    # Steps 1 to 8 from 0 on: 1 and 3 move by 1, 5 and 7 by a tenth.
    moved = [float(x["w"][0, 0]) for x in updated]
    np.testing.assert_allclose(moved, [0, -1, -1, -2, -2, -2.1, -2.1, -2.2], rtol=1e-6)
    mean = 0.0
    for place in (-1, -2, -2.1, -2.2):
        mean = 0.5 * mean + 0.5 * place
    np.testing.assert_allclose(optimizers.averaged(updated[-1], state)["w"], mean, rtol=1e-6)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (schedules.constant(total=4, warmup=2), [0.5, 1, 1, 1]),
        (schedules.cosine(total=4), [1, 0.853553, 0.5, 0.146447]),
        (schedules.steps(total=4, at=[1, 3]), [1, 0.1, 0.1, 0.01]),
    ],
)
def test_schedules(schedule, expected):
    factors = [float(schedule(jnp.asarray(step))) for step in range(4)]
    np.testing.assert_allclose(factors, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "group, message",
    [({"pth": "x"}, "not pth"), ({"factor": 2.0}, "no path"), ({"path": "("}, "no regular")],
)
def test_a_wrong_group_is_named(group, message):
    with pytest.raises(ValueError, match=message):
        _build(optimizers.sgd(), groups=[group])
