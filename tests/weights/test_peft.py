"""Adapters in files of peft: read against what transformers computes with them, and written."""

import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import traverse_util
from pretrained import with_weights
from seeded import images, values

from dmljax import adapt, nets, weights
from dmljax.adapt.lowrank import lora_scale
from dmljax.config import registry
from dmljax.main import main

HERE = pathlib.Path(__file__).parent / "peft"
SIZES = {"width": 16, "heads": 2, "depth": 2, "patch": 4, "image_size": 12}
NETS = {
    "dinov2": {"name": "dinov2_s14", **SIZES, "epsilon": 1e-6},
    "dinov2_dora": {"name": "dinov2_s14", **SIZES, "epsilon": 1e-6},
    "vit": {"name": "vit_s16", **SIZES, "epsilon": 1e-12},
}


def _base(folder, name):
    """The file of weights that the adapter belongs to, and the output of both."""
    with safetensors.safe_open(HERE / name / "expected.safetensors", "np") as file:
        shapes, expected = json.loads(file.metadata()["shapes"]), file.get_tensor("output")
    tensors = {n: values(n, s) for n, s in shapes.items() if "classifier" not in n}
    tensors = {n.removeprefix("vit."): x for n, x in tensors.items()}
    safetensors.numpy.save_file(tensors, folder / "base.safetensors")
    return folder / "base.safetensors", expected


def _output(net, params):
    x = jnp.asarray(images((2, 12, 12, 3)))
    return jax.jit(lambda p, x: net.apply({"params": p}, x, train=False)["pooled"])(params, x)


@pytest.mark.parametrize("name", NETS)
def test_an_adapter_of_peft_gives_what_transformers_computes(name, tmp_path):
    base, expected = _base(tmp_path, name)
    net = registry.resolve("net", NETS[name])()
    params = weights.load(base, net)["params"]
    adapters = weights.load_adapter(HERE / name, net, base=base, params=params)
    merged = adapt.merged(params, adapters, scale=1.0)
    np.testing.assert_allclose(_output(net, merged), expected, atol=1e-5)
    assert np.abs(_output(net, params) - expected).max() > 1e-2


def test_an_adapter_fits_a_net_for_images_of_another_shape(tmp_path):
    """The kernels do not depend on the grid of positions."""
    base, _ = _base(tmp_path, "vit")
    net = registry.resolve("net", NETS["vit"])()
    wide = net.clone(image_size=(12, 20))
    adapters = [weights.load_adapter(HERE / "vit", n, base=base) for n in (net, wide)]
    jax.tree.map(np.testing.assert_array_equal, *adapters)


def test_names_of_older_transformers_are_read_too(tmp_path):
    old = {"q_proj": "attention.query", "k_proj": "attention.key", "v_proj": "attention.value"}
    old |= {"o_proj": "output.dense"}
    folder = tmp_path / "adapter"
    folder.mkdir()
    tensors = safetensors.numpy.load_file(HERE / "vit" / "adapter_model.safetensors")
    renamed = {}
    for key, tensor in tensors.items():
        key = re.sub(r"vit\.layers\.", "vit.encoder.layer.", key)
        key = re.sub(r"attention\.(._proj)", lambda m: f"attention.{old[m[1]]}", key)
        renamed[key.replace("mlp.fc2", "output.dense")] = tensor
    assert len(renamed) == len(tensors) and not set(renamed) & set(tensors)
    safetensors.numpy.save_file(renamed, folder / "adapter_model.safetensors")
    config = json.loads((HERE / "vit" / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"attention.output.dense": 5}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    net = registry.resolve("net", NETS["vit"])()
    expected = weights.load_adapter(HERE / "vit", net)
    for x, y in zip(
        *map(jax.tree.leaves, (weights.load_adapter(folder, net), expected)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def _drawn(params, *, dora=False, **options):
    """Adapters without zeros."""
    adapters = adapt.lora(jax.random.key(0), params, **options)
    adapters = adapt.with_magnitudes(params, adapters) if dora else adapters
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + rng.normal(size=x.shape).astype(np.float32), adapters)


def _same_kernels(params, one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, one)
    assert max(jax.tree.leaves(changes)) > 0.1


@pytest.mark.parametrize(("rslora", "dora"), [(True, False), (False, True)])
def test_what_is_written_is_read_again(tmp_path, rslora, dora):
    """Queries, keys and values apart, as the base has them."""
    base, _ = _base(tmp_path, "dinov2")
    net = registry.resolve("net", NETS["dinov2"])()
    params = weights.load(base, net)["params"]
    adapters = _drawn(params, rank=3, targets="qkv|blocks/1/mlp/fc1", dora=dora)
    options = {"rank": 3, "alpha": 5.0, "rslora": rslora}
    weights.write_adapter(tmp_path / "adapter", adapters, net, **options, base=base)
    scale = lora_scale(**options)
    expected = adapt.merged(params, adapters, scale=scale)
    read = weights.load_adapter(tmp_path / "adapter", net, base=base)
    _same_kernels(params, expected, adapt.merged(params, read, scale=1.0))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    attention = [f"encoder.layer.{i}.attention" for i in (0, 1)]
    targets = {f"{x}.attention.{part}" for x in attention for part in ("query", "key", "value")}
    targets |= {f"{x}.{part}_proj" for x in attention for part in "qkv"}
    assert set(config["target_modules"]) == targets | {"encoder.layer.1.mlp.fc1"}
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 5.0, rslora)
    assert config["use_dora"] == dora
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    names = set(safetensors.numpy.load_file(file))
    assert "base_model.model.encoder.layer.0.attention.attention.query.lora_A.weight" in names
    other = with_weights(tmp_path)["weights"]
    with pytest.raises(ValueError, match="is an adapter of another file of weights than"):
        weights.load_adapter(tmp_path / "adapter", net, base=other)


def test_one_by_one_convolutions_have_adapters_in_the_names_of_the_net(tmp_path):
    sizes = {"width": 8, "blocks": (1, 1, 1, 1)}
    net = nets.resnet18(**sizes)
    spec = with_weights(tmp_path, {"name": "resnet18", **sizes})
    params = weights.load(spec["weights"], net)["params"]
    adapters = _drawn(params, rank=2, targets="layer[34]/0/downsample/", dora=True)
    weights.write_adapter(tmp_path / "a", adapters, net, rank=2, alpha=2.0, base=spec["weights"])
    read = weights.load_adapter(tmp_path / "a", net, base=spec["weights"])
    flat = traverse_util.flatten_dict(adapters, sep="/")
    leaves = ("a", "b", "magnitude")
    assert sorted(flat) == [f"layer{i}/0/downsample/0/{x}" for i in (3, 4) for x in leaves]
    file = tmp_path / "a" / "adapter_model.safetensors"
    shapes = {
        len(x.shape): x.shape for k, x in safetensors.numpy.load_file(file).items() if "mag" in k
    }
    assert shapes[4][0] == shapes[4][2] == shapes[4][3] == 1 and len(shapes) == 1
    expected = adapt.merged(params, adapters, scale=1.0)
    _same_kernels(params, expected, adapt.merged(params, read, scale=1.0))


def test_one_matrix_for_gate_and_values_is_divided_when_read_and_refused_when_written(tmp_path):
    gated = {"hidden": 16, "gated": True, "activation": jax.nn.silu, "depth": 1}
    net = registry.resolve("net", NETS["dinov2"])(**gated)
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 16), (32, 2)))
    name = "base_model.model.encoder.layer.0.mlp.weights_in.lora_{}.weight"
    tensors = {name.format("A"): a, name.format("B"): b}
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    adapters = weights.load_adapter(tmp_path, net)
    zeros = {x: {"kernel": jnp.zeros((16, 16))} for x in ("gate", "fc1")}
    merged = adapt.merged({"blocks": {"0": {"mlp": zeros}}}, adapters, scale=1.0)
    added = 3.0 * (b @ a).T
    for part, columns in (("gate", added[:, :16]), ("fc1", added[:, 16:])):
        kernel = merged["blocks"]["0"]["mlp"][part]["kernel"]
        np.testing.assert_allclose(kernel, columns, rtol=1e-4, atol=1e-4)
    names = ("encoder.layer.0.layer_scale1.lambda1", "encoder.layer.0.mlp.weights_in.weight")
    base = tmp_path / "base.safetensors"
    safetensors.numpy.save_file({n: np.zeros((32, 16), np.float32) for n in names}, base)
    with pytest.raises(ValueError, match=r"no adapter of one part of encoder\.layer"):
        weights.write_adapter(tmp_path / "new", adapters, net, rank=2, alpha=2.0, base=base)
    assert not (tmp_path / "new").exists()


def test_the_command_adds_an_adapter_to_weights(tmp_path, capsys):
    base, expected = _base(tmp_path, "dinov2")
    spec = {k: v for k, v in NETS["dinov2"].items() if k != "name"}
    words = ["weights", str(base), "--net=dinov2_s14", f"--adapter={HERE / 'dinov2'}"]
    words += [f"--net.{k}={v}" for k, v in spec.items()]
    files = [tmp_path / f"{to}.safetensors" for to in ("merged", "twice")]
    assert main([*words, f"--to={files[0]}"]) in (0, None)
    words[1] = str(files[0])  # a converted file may get another adapter
    again = tmp_path / "again"
    shutil.copytree(HERE / "dinov2", again)
    with pytest.raises(ValueError, match=r"again already: give .* without it \(base.safetensors"):
        main([*words, f"--adapter={again}", f"--to={files[1]}"])
    assert not files[1].exists()
    config = json.loads((again / "adapter_config.json").read_text())
    (again / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 3}))
    assert main([*words, f"--adapter={again}", f"--to={files[1]}"]) in (0, None)
    net = registry.resolve("net", NETS["dinov2"])()
    outputs = [_output(net, weights.load(file, net)["params"]) for file in files]
    digests = [weights.read_metadata(file)["adapters"] for file in files]
    assert digests[1][:1] == digests[0] and len(set(digests[1])) == 2
    np.testing.assert_allclose(outputs[0], expected, atol=1e-5)
    assert np.abs(outputs[1] - expected).max() > 1e-2
    assert "the adapter dinov2 is added to the kernels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "not of plain LoRA: peft_type='IA3'"),
        ({"use_dora": True}, "and needs lora_A, lora_B, lora_magnitude_vector of one rank"),
        ("no dora", r"has .*lora_magnitude_vector \[16\], and needs lora_A, lora_B of"),
        ("short", r"does not agree with .* lora_magnitude_vector \[3\], and needs"),
        ("no params", "has DoRA for parts of a fused kernel: it needs params"),
        ({"bias": "all"}, "not of plain LoRA: bias='all'"),
        ({"r": 0}, "not of plain LoRA: r=0"),
        ("lora_A", r"has lora_B \[16, \d\], and needs lora_A, lora_B of one rank"),
        ("net", "is an adapter of another net: no naming of this net has all of its 6 modules"),
        ("width", r"does not fit the net: .* kernel \[16, 48\], and the net has \[8, 24\]"),
        ("config", "adapter_config.json is missing, damaged or not of plain LoRA: peft_type=None"),
    ],
)
def test_wrong_adapters_are_refused_in_one_line(tmp_path, changes, words):
    source = HERE / ("dinov2_dora" if changes in ("no dora", "short", "no params") else "dinov2")
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = safetensors.numpy.load_file(source / "adapter_model.safetensors")
    spec = NETS["dinov2"]
    if isinstance(changes, dict):
        config |= changes
    elif changes == "lora_A":
        del tensors[next(name for name in tensors if changes in name)]
    elif changes == "net":
        spec = {"name": "resnet18", "width": 8}
    elif changes == "no dora":
        config["use_dora"] = False
    elif changes == "short":
        name = next(name for name in tensors if "magnitude" in name)
        tensors[name] = tensors[name][:3]
    elif changes == "width":
        spec = spec | {"width": 8}
    if changes != "config":
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=words) as error:
        weights.load_adapter(tmp_path, registry.resolve("net", spec)())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "folder, message",
    [
        ("alpha_is_a_number", "not of plain LoRA: alpha_pattern=0.5"),
        ("alpha_is_a_list", r"not of plain LoRA: alpha_pattern=.*\[1\]"),
        ("alpha_repeats_for_ever", "not of plain LoRA: alpha_pattern="),
    ],
)
def test_a_pattern_that_is_wrong_or_could_run_for_ever_is_refused(folder, message):
    seeds = HERE.parents[1] / "fuzz" / "seeds" / "adapter"
    with pytest.raises(ValueError, match=message) as error:
        weights.load_adapter(seeds / folder, registry.resolve("net", NETS["vit"])())
    assert "\n" not in str(error.value)
