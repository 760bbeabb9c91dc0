"""Files of other packages give our nets the outputs of these packages.

`make_layouts.py` has written names, shapes and outputs. The values follow from the names.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import seeded

from dmljax import nets, weights

FILES = sorted((pathlib.Path(__file__).parent / "layouts").glob("*.json"))
compiler_options = {"xla_backend_optimization_level": 0}


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def case(request, tmp_path):
    """What a file of `layouts` says, and a file of weights with its names."""
    case = json.loads(request.param.read_text())
    tensors = {name: seeded.values(name, tuple(shape)) for name, shape in case["tensors"].items()}
    safetensors.numpy.save_file(tensors, tmp_path / "file.safetensors")
    return case, tmp_path / "file.safetensors"


def build(case, **keywords):
    keywords = case["keywords"] | keywords
    if "blocks" in keywords:
        keywords["blocks"] = tuple(keywords["blocks"])
    return getattr(nets, case["net"])(**keywords)


def test_outputs_are_those_of_the_code_behind_the_file(case):
    case, path = case
    net, notes = build(case), []
    variables = weights.load(path, net, report_fn=notes.append)
    run = jax.jit(lambda v, x: net.apply(v, x, train=False), compiler_options=compiler_options)
    outputs = run(variables, jnp.asarray(seeded.images(case["images"])))
    assert notes == []
    for name, expected in case["outputs"].items():
        expected = np.array(expected)
        output = outputs[name][:, : expected.shape[1]]
        np.testing.assert_allclose(output, expected, atol=1e-4 * np.abs(expected).max())


def test_classifiers_and_other_stages_are_left_out(case):
    case, path = case
    notes = []
    body = weights.load(path, build(case, classes=None), report_fn=notes.append)
    classifiers = [note for note in notes if "classifiers left out" in note]
    assert len(classifiers) == len(notes) == (case["keywords"]["classes"] is not None)
    part = weights.load(path, build(case, classes=None, start="1", stop="2"))
    flat, flat_part = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (body, part))
    assert 0 < len(flat_part) < len(flat)
    for key, value in flat_part.items():
        np.testing.assert_array_equal(value, flat[key])
    assert (
        weights.classifier_size(weights.torch_tensors(weights.read(path)))
        == case["keywords"]["classes"]
    )


def test_files_of_another_size_are_refused_in_one_line(tmp_path):
    case = json.loads((FILES[0].parent / "efficientnet_package1.json").read_text())
    tensors = {name: seeded.values(name, tuple(shape)) for name, shape in case["tensors"].items()}
    safetensors.numpy.save_file(tensors, tmp_path / "file.safetensors")
    for net in (nets.efficientnet_lite0(multiplier=0.25, classes=10), nets.resnet18()):
        with pytest.raises(ValueError, match="does not fit the net") as error:
            weights.load(tmp_path / "file.safetensors", net)
        assert "\n" not in str(error.value)
    assert "it looks like an efficientnet_lite" in str(error.value)
