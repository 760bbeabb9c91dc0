"""Nets from published files against the code that wrote the files, without torch.

tests/nets/fixtures/make.py stored what transformers, timm, open_clip, efficientnet_lite_pytorch and
the original codes compute from files whose values are drawn again here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from published import (
    CASES,
    STORED,
    apply,
    direction,
    draw,
    images,
    keys,
    load,
    narrow_statistics,
    net,
    sample,
    stored,
    summary,
    tensors,
)

from dmljax import weights


def close(ours, theirs, tolerance=1e-5):
    ours = np.asarray(ours)
    assert ours.shape == theirs.shape
    assert np.max(np.abs(ours - theirs)) <= tolerance * np.max(np.abs(theirs))


def check_outputs(key, outputs, tolerance=1e-5):
    expected = stored(key)
    for name, theirs in expected.items():
        ours = np.asarray(outputs[name], np.float32)
        if theirs.ndim == ours.ndim == 4:
            close(ours[tuple(slice(n) for n in theirs.shape)], theirs, tolerance)
        else:
            close(summary(name, ours), theirs, tolerance)
    close(outputs["max_pooled"], np.max(np.asarray(outputs["features"]), (1, 2)))
    if "0" in expected:  # a case with stages has all outputs
        assert set(outputs) == set(expected) | {"max_pooled"}


def products(a, b):
    """The inner products a b, a a and b b."""
    total = np.zeros(3)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.ravel(x).astype(np.float64), np.ravel(y).astype(np.float64)
        total += x @ y, x @ x, y @ y
    return total


def check_gradients(
    name, variables, size, along=None, *, train, tolerances=(1e-4, 1e-4), **keywords
):
    """Compares gradients, those of parameters only in the direction `along`.

    The first of `tolerances` is for values of the images' gradient, the second for derivatives.
    Returns the outputs and the new statistics.
    """
    params, model, key = variables["params"], net(name, **keywords), keys(name)[size]

    def loss(x, params):
        all_variables = {**variables, "params": params}
        outputs, new = model.apply(all_variables, x, train=train, mutable=["batch_stats"])
        terms = [outputs[k] * direction(k, outputs[k].shape) for k in stored(key)]
        return sum(map(jnp.sum, terms)), (outputs, new)

    x = np.asarray(images(size), jax.tree.leaves(params)[0].dtype)
    # Without optimizations, XLA's convolutions in float64 take ten times as long.
    options = {"xla_backend_optimization_level": int(x.dtype == np.float64)}
    gradient_fn = jax.value_and_grad(loss, argnums=(0, 1) if along else (0,), has_aux=True)
    gradient_fn = jax.jit(gradient_fn, compiler_options=options)
    (loss_value, aux), gradients = gradient_fn(x, params)
    expected_loss, *derivatives = STORED[f"{key}/derivatives"]
    np.testing.assert_allclose(loss_value, expected_loss, rtol=1e-4, atol=1e-3)
    close(sample(gradients[0]), STORED[f"{key}/gradient"], tolerances[0])
    directions = [draw("image", x.shape, "along"), along and along["params"]]
    for ours, theirs, expected in zip(gradients, directions, derivatives, strict=False):
        # A sum of n terms of both signs: its error is relative to its size for random vectors.
        n = sum(leaf.size for leaf in jax.tree.leaves(ours))
        product, *squares = products(ours, theirs)
        tolerance = tolerances[1] * np.sqrt(np.prod(squares) / n)
        assert abs(product - expected) <= tolerance
        assert abs(expected) > tolerance
    return aux


def check_exactly(name, variables, size, along, **options):
    """In float64, because rounding decides some relus. Returns the new statistics."""
    with jax.enable_x64(True):
        variables, along = jax.tree.map(np.float64, (variables, along))
        options["tolerances"] = (1e-6, 1e-6)
        outputs, new = check_gradients(name, variables, size, along, **options)
    check_outputs(keys(name)[size], outputs, 1e-6)
    return new


# The first file of each net has all sizes and gradients; other namings have one size, as have
# nets whose parts are all in another one.
ALIKE = ("dinov2_g", "dinov2_reg", "dinov3_s", "openclip", "siglip_tower", "augreg_timm", "vit")
WITH_GRADIENTS = [
    n for n in CASES if n not in ALIKE and f"{list(keys(n).values())[-1]}/gradient" in STORED
]
RECTIFIED = [f"{n}_real_width" for n in ("efficientnet", "mobilenet", "resnet")]
WHOLE = ("vit_s16_whole", "vit_b16_whole")  # of real width and depth
# A small net has the same parts, and is compared with its gradients and at all sizes.
WIDE = [n for n in CASES if n.endswith("_real_width") and not n.startswith(("mobile", "resnet"))]
# Compiling the gradients of depthwise convolutions in our own form takes half a minute.
# tests/kernels compares this form with XLA's.
SLOW_FORMS = ("efficientnet_timm", "convnext_timm", "convnext_real_width")


def gradient_form(name):
    is_depthwise = name in WITH_GRADIENTS and name.startswith(("convnext", "efficient", "mobile"))
    return "xla" if is_depthwise else "auto"


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        pytest.param(
            name, gradient_form(name), marks=[pytest.mark.slow] * (name in (*WHOLE, *WIDE))
        )
        for name, case in CASES.items()
        if not case["train"]
    ]
    + [pytest.param(name, "auto", marks=pytest.mark.slow) for name in SLOW_FORMS],
)
def test_a_published_file_gives_the_outputs_and_gradients_of_its_own_code(name, impl, tmp_path):
    variables = load(tmp_path, name)
    along = load(tmp_path, name, "along") if name in WITH_GRADIENTS else None
    tolerance = 1e-4 if name == "mobilenet_real_width" else 1e-5  # it has 52 convolutions
    *_, last = keys(name)
    for size, key in list(keys(name).items())[0 if along else -1 :]:
        has_gradients = along and f"{key}/gradient" in STORED
        has_gradients = has_gradients and (size == last or name not in RECTIFIED)
        if not has_gradients or (impl == "xla" and name in SLOW_FORMS):
            check_outputs(key, apply(name, variables, images(size)), tolerance)
        if has_gradients:
            options = {"along": along if size == last else None, "impl": impl}
            # Without batch norm, a net computes the same in training.
            options["train"] = size == last and "batch_stats" not in variables
            if CASES[name]["exact"] and "efficientnet" not in name:
                check_exactly(name, variables, size, **options)
                outputs = apply(name, variables, images(size))
            else:  # XLA computes the float64 gradients of an EfficientNet for 10 s
                options["tolerances"] = (0.1, 5e-3) if CASES[name]["exact"] else (1e-4, 1e-4)
                outputs, _ = check_gradients(name, variables, size, **options)
            check_outputs(key, outputs, tolerance)


@pytest.mark.parametrize("name", WIDE)
def test_a_published_file_of_real_width_gives_the_outputs_of_its_own_code(name, tmp_path):
    size, key = list(keys(name).items())[-1]
    check_outputs(key, apply(name, load(tmp_path, name), images(size)))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECTIFIED)
def test_exact_gradients_at_all_sizes(name, tmp_path):
    variables, along = load(tmp_path, name), load(tmp_path, name, "along")
    for size in keys(name):
        check_exactly(name, variables, size, along, train=False)


def test_a_training_step_with_batch_norm(tmp_path):
    name = "efficientnet_training"
    variables, along = load(tmp_path, name), load(tmp_path, name, "along")
    [(size, key)] = keys(name).items()
    new = check_exactly(name, variables, size, along, train=True)

    # A file with the new statistics, as far as they are stored, and -1 elsewhere.
    content = {n: np.full_like(array, -1) for n, array in tensors(name).items()}
    names = narrow_statistics(CASES[name]["tensors"])
    ends = np.cumsum([content[n].size for n in names])
    content |= zip(names, np.split(STORED[f"{key}/statistics"], ends[:-1]), strict=True)
    path = tmp_path / "new.safetensors"
    path.write_bytes(safetensors.numpy.save(content))
    expected, compared = weights.load(path, net(name))["batch_stats"], []

    def compare(ours, theirs):
        if not np.all(theirs == -1):
            compared.append(len(theirs))
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)

    jax.tree.map(compare, dict(new["batch_stats"]), dict(expected))
    assert sum(compared) == ends[-1]
