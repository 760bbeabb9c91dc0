"""Nets from published files against the code that wrote the files, without torch.

tests/nets/fixtures/make.py stored what transformers, timm, open_clip, efficientnet_lite_pytorch and
the original codes compute from files whose values are drawn again here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from backbone_cases import jit
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
    stored,
    summary,
    tensors,
)

from dmljax import nets, weights


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


# The first file of each net has all sizes and gradients; other namings have one size.
FIRST = list({case["net"]: name for name, case in reversed(CASES.items())}.values())
WHOLE = ("vit_s16_whole", "vit_b16_whole")  # of real width and depth
REAL_WIDTH = [name for name in CASES if name.endswith("_real_width")]
CONVOLUTIONAL = [n for n in CASES if n.startswith(("convnext", "efficientnet"))]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in WHOLE))
        for name, case in CASES.items()
        if not case["train"] and name not in REAL_WIDTH
    ],
)
def test_a_published_file_gives_the_outputs_of_its_own_code(name, tmp_path):
    variables = load(tmp_path, name)
    for size, key in list(keys(name).items())[0 if name in FIRST else -1 :]:
        check_outputs(key, apply(name, variables, images(size)))


def products(a, b):
    """The inner products a b, a a and b b."""
    total = np.zeros(3)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.ravel(x).astype(np.float64), np.ravel(y).astype(np.float64)
        total += x @ y, x @ x, y @ y
    return total


def check_derivatives(name, variables, along, *, train, tolerance=1e-4, **keywords):
    """In the direction `along`. Returns the outputs and the new statistics."""
    params, model = variables["params"], net(name, **keywords)
    size, key = list(keys(name).items())[-1]

    def loss(params, x):
        all_variables = {**variables, "params": params}
        outputs, new = model.apply(all_variables, x, train=train, mutable=["batch_stats"])
        terms = [outputs[k] * direction(k, outputs[k].shape) for k in stored(key)]
        return sum(map(jnp.sum, terms)), (outputs, new)

    x = np.asarray(images(size), jax.tree.leaves(params)[0].dtype)
    gradient_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (loss_value, aux), gradients = jit(gradient_fn)(params, x)
    expected_loss, of_image, of_params = STORED[f"{key}/derivatives"]
    np.testing.assert_allclose(loss_value, expected_loss, rtol=1e-4, atol=1e-3)
    x_along = draw("image", x.shape, "along")
    for ours, theirs, expected in (
        (gradients[0], along["params"], of_params),
        (gradients[1], x_along, of_image),
    ):
        # A sum of n terms of both signs: its error is relative to its size for random vectors.
        n = sum(leaf.size for leaf in jax.tree.leaves(ours))
        product, *squares = products(ours, theirs)
        size = np.sqrt(np.prod(squares) / n)
        assert abs(product - expected) <= tolerance * size
        assert abs(expected) > tolerance * size
    return aux


# Compiling the derivatives of depthwise convolutions in our own form takes half a minute.
# tests/kernels compares this form with XLA's.
SLOW_FORMS = ("efficientnet_timm", "convnext_timm")


@pytest.mark.parametrize(
    ("name", "impl"),
    [
        (name, "xla" if name in SLOW_FORMS else "auto")
        for name in FIRST
        if name not in (*WHOLE, *REAL_WIDTH)
    ]
    + [pytest.param(name, "auto", marks=pytest.mark.slow) for name in SLOW_FORMS],
)
def test_derivatives_with_respect_to_parameters_and_images(name, impl, tmp_path):
    # Without batch norm, a net computes the same in training.
    variables, along = load(tmp_path, name), load(tmp_path, name, "along")
    check_derivatives(name, variables, along, train="batch_stats" not in variables, impl=impl)


# Where rounding decides one relu of a wide net, a derivative changes by about 1e-3.
RECTIFIED = [f"{n}_real_width" for n in ("efficientnet", "mobilenet", "resnet", "unicom")]


@pytest.mark.parametrize("name", REAL_WIDTH)
def test_nets_of_real_width_have_the_outputs_and_derivatives_of_published_code(name, tmp_path):
    variables, along = load(tmp_path, name), load(tmp_path, name, "along")
    tolerance = 1e-4 if name == "mobilenet_real_width" else 1e-5  # it has 52 convolutions
    *others, last = keys(name).items()
    for size, key in others:
        check_outputs(key, apply(name, variables, images(size)), tolerance)
    is_depthwise = name.startswith(("convnext", "efficientnet", "mobilenet"))
    options = {"train": "batch_stats" not in variables, "impl": "xla" if is_depthwise else "auto"}
    options["tolerance"] = 5e-3 if name in RECTIFIED else 1e-4
    outputs, _ = check_derivatives(name, variables, along, **options)
    check_outputs(last[1], outputs, tolerance)


def test_a_training_step_with_batch_norm(tmp_path):
    name = "efficientnet_training"
    variables, along = load(tmp_path, name), load(tmp_path, name, "along")
    variables = jax.tree.map(np.float64, variables)  # rounding decides some relus
    with jax.enable_x64(True):
        outputs, new = check_derivatives(name, variables, along, train=True)
    key = list(keys(name).values())[-1]
    check_outputs(key, outputs)

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


@pytest.mark.parametrize(
    "name", [n for n in CONVOLUTIONAL if not CASES[n]["train"] and n not in REAL_WIDTH]
)
def test_classifiers_and_other_stages_are_left_out(name, tmp_path):
    path, notes = tmp_path / "file.safetensors", []
    path.write_bytes(safetensors.numpy.save(tensors(name)))
    body = weights.load(path, net(name, classes=None), report_fn=notes.append)
    classes = CASES[name]["keywords"].get("classes")
    classifiers = [note for note in notes if "classifiers left out" in note]
    assert len(classifiers) == len(notes) == (classes is not None)
    part = weights.load(path, net(name, classes=None, start="1", stop="2"))
    flat, flat_part = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (body, part))
    assert 0 < len(flat_part) < len(flat)
    for key, value in flat_part.items():
        np.testing.assert_array_equal(value, flat[key])
    assert weights.classifier_size(weights.torch_tensors(weights.read(path))) == classes


def test_files_of_another_size_are_refused_in_one_line(tmp_path):
    path = tmp_path / "file.safetensors"
    path.write_bytes(safetensors.numpy.save(tensors("efficientnet_package1")))
    for other in (nets.efficientnet_lite0(multiplier=0.25, classes=10), nets.resnet18()):
        with pytest.raises(ValueError, match="does not fit the net") as error:
            weights.load(path, other)
        assert "\n" not in str(error.value)
    assert "it looks like an efficientnet_lite" in str(error.value)
