"""Published layouts fill our nets name by name. What does not fit or is damaged is explained."""

import functools
import hashlib
import re

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import weight_files as make
from flax import traverse_util
from pretrained import VIT, with_weights
from published_layouts import (
    count_values,
    googlenet_blobs,
    random_tensors,
    resnet_tensors,
    small_resnet,
    write_torch,
)

from dmljax import nets, weights
from dmljax.config import registry
from dmljax.weights.loading import fit

CONVNEXT = {"name": "convnext_t", "width": 8, "blocks": (1, 1, 2, 1)}


def test_a_resnet_gets_the_tensors_of_torchvision(tmp_path):
    tensors = resnet_tensors()
    notes = []
    path = write_torch(tmp_path, tensors)
    variables = weights.load(path, small_resnet(classes=10), report_fn=notes.append)
    assert notes == []
    params, stats = variables["params"], variables["batch_stats"]
    block, running = params["layer2"]["0"], stats["layer2"]["0"]
    for ours, theirs in (
        (params["conv1"]["kernel"].transpose(3, 2, 0, 1), "conv1.weight"),
        (block["downsample"]["0"]["kernel"][0, 0].T, "layer2.0.downsample.0.weight"),
        (block["bn2"]["scale"], "layer2.0.bn2.weight"),
        (block["bn2"]["bias"], "layer2.0.bn2.bias"),
        (running["bn2"]["mean"], "layer2.0.bn2.running_mean"),
        (running["bn2"]["var"], "layer2.0.bn2.running_var"),
        (params["fc"]["kernel"].T, "fc.weight"),
        (params["fc"]["bias"], "fc.bias"),
    ):
        np.testing.assert_array_equal(ours.squeeze(), tensors[theirs].squeeze())
    assert count_values(variables) == sum(a.size for a in tensors.values()) - 1
    types = {(type(leaf), leaf.dtype.name) for leaf in jax.tree.leaves(variables)}
    assert types == {(np.ndarray, "float32")}
    # The same shapes as the net's own variables.
    image = np.zeros((1, 32, 32, 3), np.float32)
    net = small_resnet(classes=10)
    shapes = jax.eval_shape(lambda: net.init(jax.random.key(0), image, train=False))
    assert jax.tree.map(np.shape, variables) == jax.tree.map(np.shape, shapes)


def test_a_classifier_that_the_net_lacks_is_left_out_and_reported(tmp_path):
    notes = []
    variables = weights.load(
        write_torch(tmp_path, resnet_tensors()), small_resnet(), report_fn=notes.append
    )
    assert "fc" not in variables["params"]
    assert len(notes) == 1 and "classifiers left out" in notes[0]
    assert "fc.weight, fc.bias" in notes[0]


def test_a_range_of_stages_takes_its_part_of_the_file(tmp_path):
    tensors, notes = resnet_tensors(), []
    path = write_torch(tmp_path, tensors)
    stages = small_resnet(start="layer2", stop="layer3")
    variables = weights.load(path, stages, report_fn=notes.append)
    assert set(variables["params"]) == set(variables["batch_stats"]) == {"layer2", "layer3"}
    np.testing.assert_array_equal(
        variables["params"]["layer3"]["0"]["conv1"]["kernel"].transpose(3, 2, 0, 1),
        tensors["layer3.0.conv1.weight"],
    )
    assert [("other stages" in line) for line in notes] == [False, True]
    del tensors["layer3.0.bn1.bias"]
    with pytest.raises(ValueError, match=r"missing: layer3\.0\.bn1\.bias$"):
        weights.load(write_torch(tmp_path, tensors), stages)
    # A stage that no resnet has is not another stage.
    with pytest.raises(ValueError, match=r"not in the net: layer9\.x"):
        weights.load(write_torch(tmp_path, resnet_tensors() | {"layer9.x": np.zeros(1)}), stages)


def test_what_does_not_fit_is_listed_together(tmp_path):
    tensors = resnet_tensors()
    del tensors["layer1.0.bn1.weight"], tensors["bn1.running_var"]
    tensors["layer1.0.se.weight"] = np.zeros(3, np.float32)
    tensors["conv1.weight"] = np.zeros((4, 1, 7, 7), np.float32)
    tensors["bn1.bias"] = np.zeros(4, np.int64)
    path = write_torch(tmp_path, tensors)
    with pytest.raises(ValueError, match="does not fit the net") as error:
        weights.load(path, small_resnet())
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    for fragment in (
        "missing: bn1.running_var, layer1.0.bn1.weight",
        "not in the net: layer1.0.se.weight",
        "shape: conv1.weight [4 1 7 7], in the net [4 3 7 7]",
        "no floats: bn1.bias of int64",
    ):
        assert fragment in message


def test_another_number_of_classes_is_refused_with_the_fix(tmp_path):
    path = write_torch(tmp_path, resnet_tensors(classes=7))
    expected = (
        r"shape: fc.bias \[7\].*, fc.weight \[7 32\], in the net \[10 32\]. A .* classes=None"
    )
    with pytest.raises(ValueError, match=expected):
        weights.load(path, small_resnet(classes=10))


def test_other_architectures_are_named(tmp_path):
    caffe_file = tmp_path / "caffe"
    caffe_file.write_bytes(make.caffe(googlenet_blobs(), old=True))
    torchvision = {
        "inception3a.branch1.conv.weight": (64, 192, 1, 1),
        "conv1.conv.weight": (64, 3, 7, 7),
    }
    for path, net, message in (
        (
            write_torch(tmp_path, resnet_tensors(), "r.pth"),
            nets.googlenet(),
            "it looks like a resnet. missing",
        ),
        (
            write_torch(tmp_path, random_tensors(torchvision), "g.pth"),
            nets.googlenet(),
            "is a googlenet_bn, not a googlenet",
        ),
        (caffe_file, small_resnet(), "looks like a googlenet. missing"),
        (
            write_torch(tmp_path, random_tensors({"x.weight": (2,)}), "x.pth"),
            small_resnet(),
            "another architecture",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            weights.load(path, net)
        assert len(str(error.value)) < 1500  # hundreds of names are cut short


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        (np.float16, "float16, widened"),
        (ml_dtypes.bfloat16, "bfloat16, widened"),
        (np.float64, "float64, rounded"),
    ],
)
def test_other_floats_become_float32_and_this_is_reported(tmp_path, dtype, note):
    tensors = {n: a.astype(dtype) if a.ndim else a for n, a in resnet_tensors().items()}
    notes = []
    path = write_torch(tmp_path, tensors)
    variables = weights.load(path, small_resnet(classes=10), report_fn=notes.append)
    assert len(notes) == 1 and note in notes[0] and "to float32" in notes[0]
    kernel = variables["params"]["conv1"]["kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(
        kernel.transpose(3, 2, 0, 1), tensors["conv1.weight"].astype(np.float32)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(tmp_path, bad):
    tensors = resnet_tensors()
    tensors["layer1.0.bn1.bias"][2] = bad
    with pytest.raises(ValueError, match=r"NaN or infinity in layer1\.0\.bn1\.bias$"):
        weights.load(write_torch(tmp_path, tensors), small_resnet())


def test_the_prefix_of_data_parallel_is_removed(tmp_path):
    tensors = resnet_tensors()
    path = write_torch(tmp_path, {f"module.{n}": a for n, a in tensors.items()})
    variables = weights.load(path, small_resnet())
    np.testing.assert_array_equal(variables["params"]["bn1"]["bias"], tensors["bn1.bias"])


def test_the_digest_in_a_name_is_checked(tmp_path):
    path = write_torch(tmp_path, resnet_tensors())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    named = path.rename(tmp_path / f"resnet-{digest[:8]}.pth")
    assert count_values(weights.load(named, small_resnet()))
    data = bytearray(named.read_bytes())
    data[-1] ^= 1
    named.write_bytes(data)
    with pytest.raises(ValueError, match=f"begins with {digest[:8]}, but it is"):
        weights.load(named, small_resnet())


def test_a_name_in_place_of_a_file_is_refused_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="--fetch=resnet50"):
        weights.load("resnet50", small_resnet())


@pytest.mark.parametrize("form", ["old", "new", "onnx"])
def test_googlenet_gets_the_blobs_of_caffe_and_onnx(tmp_path, form):
    blobs, notes = googlenet_blobs(aux=form != "onnx"), []
    path = tmp_path / "file"
    if form == "onnx":
        tensors = {"OC2_DUMMY_1": np.array([1, 1024])}
        for name, (kernel, bias) in blobs.items():
            tensors |= {f"{name}_w_0": kernel, f"{name}_b_0": bias}
        path.write_bytes(make.onnx(tensors))
    else:
        path.write_bytes(make.caffe(blobs, old=form == "old"))
    classes = None if form == "new" else 10
    variables = weights.load(path, nets.googlenet(classes=classes), report_fn=notes.append)[
        "params"
    ]
    left_out = {"old": ["loss1.conv"], "new": ["loss1.conv", "loss3.classifier"], "onnx": []}[form]
    assert len(notes) == bool(left_out)
    assert all(name in notes[0] for name in left_out)
    five = variables["inception_4e"]["5x5"]
    np.testing.assert_array_equal(
        five["kernel"].transpose(3, 2, 0, 1), blobs["inception_4e/5x5"][0]
    )
    np.testing.assert_array_equal(five["bias"], blobs["inception_4e/5x5"][1])
    if classes:
        linear = variables["loss3"]["classifier"]
        np.testing.assert_array_equal(linear["kernel"].T, blobs["loss3/classifier"][0])
    # The sum in published fact sheets of the net.
    assert count_values(variables) == 5_973_552 + (10 * 1025 if classes else 0)


@pytest.mark.parametrize(
    ("net", "start"),
    [(VIT | {"registers": 1}, "1"), (CONVNEXT, "2.1")],
)
def test_a_part_of_a_transformer_or_convnext_takes_its_blocks(tmp_path, net, start):
    spec = with_weights(tmp_path, net, size=32)
    path, make = spec["weights"], registry.resolve("net", net)
    everything, part = (
        traverse_util.flatten_dict(weights.load(path, n)["params"], sep="/")
        for n in (make(), make(start=start))
    )
    block = start.replace(".", "/blocks/")
    assert 0 < len(part) < len(everything) and any(f"/{block}/" in name for name in part)
    for name, value in part.items():
        np.testing.assert_array_equal(value, everything[name])


@functools.cache
def described(name, **keywords):
    """The tensors of a file for a net, without memory."""
    net = getattr(nets, name)(**keywords)
    shapes = traverse_util.flatten_dict(nets.layers.shapes(net, 64))
    torch = weights.loading.TORCH
    zero = np.float32(0)
    return {
        torch.name_fn(p): np.broadcast_to(zero, torch.shape_fn(x.shape)) for p, x in shapes.items()
    }


@pytest.mark.parametrize(
    ("file", "net", "message"),
    [
        ("resnet50", "resnet18", "is a resnet50, not a resnet18"),
        ("convnext_t", "convnext_s", "is a convnext_t, not a convnext_s"),
        ("efficientnet_lite0", "efficientnet_lite2", "is an efficientnet_lite0, not an effici"),
        ("mobilenet_v2", "efficientnet_lite0", "is a mobilenet_v2, not an efficientnet_lite0"),
        ("resnet50", "googlenet", "is a resnet50, not a googlenet"),
    ],
)
def test_a_file_of_another_size_is_named_in_one_line(file, net, message):
    with pytest.raises(ValueError, match=f"^x.pth {message}") as error:
        fit("x.pth", described(file), getattr(nets, net)(), weights.loading.TORCH, print)
    assert "\n" not in str(error.value) and len(str(error.value)) < 80


def test_a_net_that_is_only_like_a_published_one_is_not_taken_for_it():
    """Wide nets, nets with other stems and nets with squeeze-and-excitation."""
    tensors = described("resnet50")
    wide = np.zeros((128, 64, 1, 1), np.float32)
    stem = {n if n != "conv1.weight" else "conv1.0.weight": x for n, x in tensors.items()}
    others = [tensors | {"layer1.0.conv1.weight": wide}, stem]
    others += [described("efficientnet_lite0") | {"blocks.1.0.se.conv_reduce.weight": wide}]
    for other in others:
        with pytest.raises(ValueError, match="does not fit the net"):
            fit("x.pth", other, nets.resnet18(), weights.loading.TORCH, print)


def test_bn_inception_with_leading_axes(tmp_path):
    """The norms of the published file have one."""
    tensors = filled("bn_inception")
    tensors = {n: x[None] if "_bn." in n else x for n, x in tensors.items()}
    variables = weights.load(write_torch(tmp_path, tensors), nets.bn_inception())
    assert count_values(variables) == sum(x.size for x in tensors.values())
    var = variables["batch_stats"]["inception_3a_double_3x3_1_bn"]["var"]
    expected = tensors["inception_3a_double_3x3_1_bn.running_var"][0]
    np.testing.assert_array_equal(var, expected)


def filled(name, **keywords):
    shapes = {n: x.shape for n, x in described(name, **keywords).items()}
    return random_tensors(shapes)


def test_convnext_is_read_with_the_names_of_its_authors(tmp_path):
    """facebookresearch/ConvNeXt, models/convnext.py."""
    keywords = {"width": 8, "blocks": (1, 2, 1, 1), "classes": 10}
    tensors = filled("convnext_t", **keywords)
    names = [
        (r"^stem\.", "downsample_layers.0."),
        (r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1."),
        (r"^stages\.(\d)\.blocks\.", r"stages.\1."),
        ("conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"^head\.norm\.", "norm."),
        (r"^head\.fc\.", "head."),
    ]

    def original(name):
        for pattern, new in names:
            name = re.sub(pattern, new, name)
        return name

    renamed = {original(name): x for name, x in tensors.items()}
    assert {"downsample_layers.3.1.bias", "stages.1.1.pwconv2.weight", "norm.bias"} < set(renamed)
    net, loaded = nets.convnext_t(**keywords), []
    for i, named in enumerate((tensors, renamed)):
        path = tmp_path / f"{i}.safetensors"
        path.write_bytes(safetensors.numpy.save(named))
        loaded.append(weights.load(path, net))
    jax.tree.map(np.testing.assert_array_equal, *loaded)
    assert weights.loading.classifier_size(renamed) == 10
    with pytest.raises(ValueError, match=r"does not fit the net: it looks like a convnext\. miss"):
        weights.load(path, nets.googlenet())


def test_a_net_is_loaded_where_jax_computes_in_float64(tmp_path):
    tensors = filled("efficientnet_lite0", multiplier=0.25)
    (tmp_path / "x.safetensors").write_bytes(safetensors.numpy.save(tensors))
    with jax.enable_x64(True):
        loaded = weights.load(tmp_path / "x.safetensors", nets.efficientnet_lite0(multiplier=0.25))
    kernel = loaded["params"]["conv_stem"]["kernel"].transpose(3, 2, 0, 1)
    np.testing.assert_array_equal(kernel, tensors["conv_stem.weight"])
