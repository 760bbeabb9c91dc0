"""Towers for text from published files against PyTorch, without torch (fixtures/make_text.py)."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from backbone_cases import jit
from nets.fixtures.drawn import draw

from dmljax import nets
from dmljax.nets import clip as towers
from dmljax.nets.transformer import quick_gelu
from dmljax.weights.loading import load_text

with np.load(pathlib.Path(__file__).parent / "fixtures" / "text.npz") as _file:
    STORED = dict(_file)
CASES = json.loads(STORED.pop("cases").tobytes())
TINY = {"vocabulary": 40, "width": 16, "heads": 2, "depth": 2}
CLIP = TINY | {"length": 7, "end": 39, "projection": 12}
SIGLIP = TINY | {"length": 6, "hidden": 24, "projection": 16, "projection_bias": True}
TOWERS = {
    "clip": functools.partial(towers.TextTower, **CLIP | {"hidden": 24, "activation": quick_gelu}),
    "openclip": functools.partial(towers.TextTower, **CLIP),
    "siglip2": functools.partial(
        towers.TextTower, **SIGLIP | {"activation": towers.tanh_gelu, "epsilon": 1e-6}
    ),
}


@pytest.fixture(autouse=True)
def tiny_towers(monkeypatch):
    for name, tower in TOWERS.items():
        monkeypatch.setitem(towers.TOWERS, name, tower)


def file(folder, name, **changed):
    tensors = {n: draw(n, shape) for n, shape in CASES[name].items()} | changed
    path = folder / "model.safetensors"
    path.write_bytes(safetensors.numpy.save({n: x for n, x in tensors.items() if x is not None}))
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_published_file_gives_the_vectors_of_its_own_code(name, tmp_path):
    tower, variables = load_text(file(tmp_path, name), name)
    tokens, expected = STORED[f"{name}/tokens"], STORED[f"{name}/vectors"]
    vectors = jit(tower.apply)(variables, tokens)
    assert np.abs(vectors - expected).max() < 1e-5 * np.abs(expected).max()
    # The second text is longer; its last words count.
    tokens = tokens.copy()
    tokens[1, -2] = 11
    assert np.abs(jit(tower.apply)(variables, tokens) - vectors)[1].max() > 1e-3


def test_what_follows_the_end_does_not_count_for_clip(tmp_path):
    tower, variables = load_text(file(tmp_path, "clip"), "clip")
    tokens = STORED["clip/tokens"][:1]
    other = np.where(np.arange(7) > 3, 5, tokens)
    first, second = (jit(tower.apply)(variables, x) for x in (tokens, other))
    np.testing.assert_allclose(first, second, atol=1e-6)


def test_a_file_without_text_or_with_another_tower(tmp_path):
    names = [n for n in CASES["clip"] if n.startswith("text")]
    assert load_text(file(tmp_path, "clip", **dict.fromkeys(names)), "clip") is None
    missing = "text_model.final_layer_norm.bias"
    with pytest.raises(ValueError, match=f"missing: {missing}"):
        load_text(file(tmp_path, "clip", **{missing: None}), "clip")
    small = {"text_projection.weight": np.zeros((12, 8), np.float32)}
    with pytest.raises(ValueError, match=r"text_projection.weight \[12 8\], in the net \[12 16\]"):
        load_text(file(tmp_path, "clip", **small), "clip")
    broken = {"text_projection.weight": np.full((12, 16), np.nan, np.float32)}
    with pytest.raises(ValueError, match=r"NaN or infinity in text_projection.weight"):
        load_text(file(tmp_path, "clip", **broken), "clip")


# Counted on the meta device of transformers 5.23 (CLIP, SigLIP 2) and of open_clip 3.3.
COUNTS = {
    "clip_b32": 63_428_096,
    "clip_l14": 123_650_304,
    "openclip_h14": 354_032_640,
    "siglip2_b16_224": 282_303_744,
    "siglip2_l16_256": 565_570_560,
    "siglip2_so400m14_384": 707_782_896,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name):
    tower = towers.TOWERS[name]()
    tokens = jax.ShapeDtypeStruct((1, tower.length), np.int32)
    shapes = jax.eval_shape(tower.init, jax.random.key(0), tokens)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == COUNTS[name]


@pytest.mark.parametrize("name", towers.TOWERS)
def test_every_tower_stands_beside_a_net_with_vectors_of_its_width(name):
    net = getattr(nets, name)()
    assert towers.TOWERS[name]().projection == (net.projection or net.width)
