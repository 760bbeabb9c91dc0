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


def test_radam_has_the_numbers_of_its_authors_code():
    transform = _build(optimizers.radam(), groups=[{"path": ".", "decay": 0.1}])
    gradients = [{"w": jnp.asarray(np.sin(t), jnp.float32)} for t in range(1, 10)]
    updated, _ = _run(transform, {"w": jnp.ones(())}, gradients)
    np.testing.assert_allclose([float(p["w"]) for p in updated], GOLDEN, rtol=2e-6)


def test_adam_with_decay_is_adamw():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)}
    gradients = [{"w": jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)} for _ in range(5)]
    updated, _ = _run(_build(optimizers.adam(), decay=0.1), params, gradients)
    expected, _ = _run(optax.adamw(0.01, weight_decay=0.1), params, gradients)
    np.testing.assert_allclose(updated[-1]["w"], expected[-1]["w"], rtol=1e-6)


def test_a_group_sets_the_rate_and_the_decay_or_freezes():
    params = {"net": {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}, "head": jnp.ones((2, 2))}
    groups = [{"path": "^net/a", "frozen": True}, {"path": "^head", "factor": 10.0, "decay": 0.0}]
    ones = jax.tree.map(jnp.ones_like, params)
    updated, _ = _run(_build(optimizers.sgd(momentum=0), decay=0.5, groups=groups), params, [ones])
    np.testing.assert_array_equal(updated[0]["net"]["a"], 1)
    np.testing.assert_allclose(updated[0]["net"]["b"], 0.99)  # a vector does not decay
    np.testing.assert_allclose(updated[0]["head"], 0.9)


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
    frozen = _build(optimizers.sgd(), average=0.9, groups=[{"path": "^b", "frozen": True}])
    both = {"w": jnp.ones(2), "b": jnp.full(2, 3.0)}
    averaged = optimizers.averaged(both, frozen.init(both))
    np.testing.assert_array_equal([averaged["w"], averaged["b"]], [[1, 1], [3, 3]])


def test_accumulating_the_schedule_counts_steps_and_the_average_updates():
    params, schedule = {"w": jnp.zeros((2, 2))}, schedules.steps(total=8, at=[3, 6])
    transform = optimizers.build(
        optimizers.sgd(momentum=0), rate=1.0, schedule=schedule, accumulate=2, average=0.5
    )
    updated, state = _run(transform, params, [{"w": jnp.ones((2, 2))}] * 8)
    # Of the steps 0 to 7, step 1 moves by 1, steps 3 and 5 by a tenth, and step 7 by a hundredth.
    moved = [float(x["w"][0, 0]) for x in updated]
    np.testing.assert_allclose(moved, [0, -1, -1, -1.1, -1.1, -1.2, -1.2, -1.21], rtol=1e-6)
    mean = 0.0
    for place in (-1, -1.1, -1.2, -1.21):
        mean = 0.5 * mean + 0.5 * place
    np.testing.assert_allclose(optimizers.averaged(updated[-1], state)["w"], mean, rtol=1e-6)


def _torch_sgd(gradient_fn, *, rate, momentum, l2, steps):
    """One weight from 1 by the loop in PyTorch's manual."""
    weight, velocity = 1.0, 0.0
    for t in range(steps):
        velocity = momentum * velocity + gradient_fn(t) + l2 * weight
        weight -= rate * velocity
    return weight


def _torch_adam(gradient_fn, *, rate, l2, steps, b1=0.9, b2=0.999, eps=1e-8):
    weight, m, v = 1.0, 0.0, 0.0
    for t in range(steps):
        gradient = gradient_fn(t) + l2 * weight
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        corrected_m, corrected_v = m / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
        weight -= rate * corrected_m / (corrected_v**0.5 + eps)
    return weight


def _torch_rmsprop(gradient_fn, *, rate, l2, steps, alpha=0.99, momentum=0.9, eps=1e-8):
    weight, v, velocity = 1.0, 0.0, 0.0
    for t in range(steps):
        gradient = gradient_fn(t) + l2 * weight
        v = alpha * v + (1 - alpha) * gradient**2
        velocity = momentum * velocity + gradient / (v**0.5 + eps)
        weight -= rate * velocity
    return weight


def _last_weight(transform, gradient_fn, *, steps):
    """A weight from 1 after so many steps. It is a vector, which torch decays too."""

    @jax.jit
    def go(weight):
        def step(carry, gradient):
            weight, state = carry
            updates, state = transform.update({"b": gradient[None]}, state, {"b": weight})
            return (optax.apply_updates({"b": weight}, updates)["b"], state), None

        gradients = jnp.asarray([gradient_fn(t) for t in range(steps)], jnp.float32)
        return jax.lax.scan(step, (weight, transform.init({"b": weight})), gradients)[0][0]

    return float(go(jnp.ones(1))[0])


@pytest.mark.parametrize(
    ("direction", "torch_loop", "gradient_fn", "options", "figure"),
    [
        (
            optimizers.sgd(momentum=0.9),
            lambda fn, **kw: _torch_sgd(fn, momentum=0.9, **kw),
            lambda t: 0.0,
            {"rate": 0.1, "l2": 0.01, "steps": 50},
            0.644,
        ),
        (
            optimizers.adam(),
            _torch_adam,
            lambda t: 1e-4 * (-1) ** t,
            {"rate": 3e-5, "l2": 5e-4, "steps": 500},
            0.985,
        ),
        (
            optimizers.rmsprop(),
            _torch_rmsprop,
            lambda t: np.sin(t),
            {"rate": 1e-3, "l2": 1e-2, "steps": 60},
            None,
        ),
    ],
    ids=["sgd", "adam", "rmsprop"],
)
def test_coupled_decay_is_that_of_torch(direction, torch_loop, gradient_fn, options, figure):
    expected = torch_loop(gradient_fn, **options)
    steps = options["steps"]
    transform = _build(direction, rate=options["rate"], l2=options["l2"])
    np.testing.assert_allclose(_last_weight(transform, gradient_fn, steps=steps), expected, 2e-5)
    if figure is not None:  # what PyTorch itself gave
        np.testing.assert_allclose(expected, figure, atol=6e-4)
    # Decoupled from the direction, the same number does something else.
    decoupled = _build(
        direction, rate=options["rate"], groups=[{"path": ".", "decay": options["l2"]}]
    )
    assert abs(_last_weight(decoupled, gradient_fn, steps=steps) - expected) > 1e-3


def test_a_group_sets_the_coupled_decay():
    params = {"a": jnp.ones(2), "b": jnp.ones((2, 2))}
    zeros = jax.tree.map(jnp.zeros_like, params)
    transform = _build(optimizers.sgd(momentum=0), l2=0.5, groups=[{"path": "^a", "l2": 0.0}])
    updated, _ = _run(transform, params, [zeros])
    np.testing.assert_array_equal(updated[0]["a"], 1)
    np.testing.assert_allclose(updated[0]["b"], 1 - 0.01 * 0.5)


def test_clipping_by_value_bounds_each_number_before_the_coupled_decay():
    params = {"w": jnp.array([[1.0, 0.0, 0.0]])}
    transform = _build(optimizers.sgd(momentum=0), clip_value=10.0, l2=4.0, rate=1.0)
    updated, _ = _run(transform, params, [{"w": jnp.array([[50.0, -20.0, 3.0]])}])
    np.testing.assert_allclose(updated[0]["w"], [[1 - 14.0, 10.0, -3.0]])


def test_a_group_learns_from_its_first_step_on_as_if_training_began_there():
    rng = np.random.default_rng(0)
    params = {"net": jnp.asarray(rng.normal(size=(3, 2))), "head": jnp.asarray(rng.normal(size=3))}
    gradients = [
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params) for _ in range(7)
    ]
    groups = [{"path": "^net", "from": 4, "decay": 0.1}]
    updated, _ = _run(_build(optimizers.adam(), l2=0.3, groups=groups), params, gradients)
    for step in range(4):
        np.testing.assert_array_equal(updated[step]["net"], params["net"])
    # Adam's moments and its correction of their bias start at that step.
    plain = _build(optimizers.adam(), l2=0.3, groups=[{"path": "^net", "decay": 0.1}])
    late, _ = _run(plain, {"net": params["net"]}, [{"net": g["net"]} for g in gradients[4:]])
    for step in range(3):
        np.testing.assert_allclose(updated[4 + step]["net"], late[step]["net"], rtol=1e-6)
    # The others learn as if they were alone, and the schedule counts all steps.
    alone, _ = _run(plain, {"head": params["head"]}, [{"head": g["head"]} for g in gradients])
    np.testing.assert_allclose(updated[-1]["head"], alone[-1]["head"], rtol=1e-6)


def test_a_waiting_group_is_not_in_the_clipped_norm():
    params = {"net": jnp.zeros(1), "head": jnp.zeros(1)}
    big = {"net": jnp.full(1, 1000.0), "head": jnp.full(1, 2.0)}
    groups = [{"path": "^net", "from": 1}]
    transform = _build(optimizers.sgd(momentum=0), clip=1.0, rate=1.0, groups=groups)
    updated, _ = _run(transform, params, [big, big])
    np.testing.assert_allclose(updated[0]["head"], -1.0, rtol=1e-6)  # not -0.002
    np.testing.assert_allclose(updated[1]["net"], -1.0, rtol=1e-4)
    frozen = _build(
        optimizers.sgd(momentum=0), clip=1.0, rate=1.0, groups=[{"path": "^net", "frozen": True}]
    )
    updated, _ = _run(frozen, params, [big])
    np.testing.assert_allclose((updated[0]["net"][0], updated[0]["head"][0]), (0, -1), rtol=1e-6)


def test_accumulating_a_group_waits_for_the_update_at_its_first_step():
    params = {"net": jnp.zeros(1)}
    ones = [{"net": jnp.ones(1)}] * 8
    for first, moved in ((1, [0, -1, -1, -2]), (2, [0, 0, 0, -1]), (3, [0, 0, 0, -1])):
        transform = _build(
            optimizers.sgd(momentum=0),
            rate=1.0,
            accumulate=2,
            groups=[{"path": "net", "from": first}],
        )
        updated, _ = _run(transform, params, ones[:4])
        np.testing.assert_allclose([float(x["net"][0]) for x in updated], moved)


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (schedules.constant(total=4, warmup=2), [0.5, 1, 1, 1]),
        (schedules.cosine(total=4), [1, 0.853553, 0.5, 0.146447]),
        (schedules.cosine(total=6, warmup=2, end=0.2), [0.5, 1, 1, 0.882843]),
        (schedules.steps(total=4, at=[1, 3]), [1, 0.1, 0.1, 0.01]),
    ],
)
def test_a_schedule_has_its_factors(schedule, expected):
    factors = [float(schedule(jnp.asarray(step))) for step in range(4)]
    np.testing.assert_allclose(factors, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "group, message",
    [
        ({"pth": "x", "path": "x"}, "'pth'.* may have factor, decay"),
        ({"factor": 2.0}, "needs a path"),
        ({"path": "("}, "a regular expression such as"),
        ({"path": "x", "from": -1}, "from must be 0 or more"),
    ],
)
def test_a_wrong_group_is_named(group, message):
    with pytest.raises(ValueError, match=message):
        _build(optimizers.sgd(), groups=[group])
