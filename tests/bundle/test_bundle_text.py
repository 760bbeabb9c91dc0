"""Bundles that embed words: from the file of a tiny CLIP to searches by text."""

import argparse
import functools
import json
import shutil

import forged
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from nets.fixtures.drawn import draw
from serve import service_cases

from dmljax import bundle as bundles
from dmljax import nets
from dmljax.bundle import backbones, files, text
from dmljax.bundle.errors import BadBundle
from dmljax.commands import search
from dmljax.config import registry
from dmljax.nets import clip as towers
from dmljax.nets.transformer import quick_gelu
from dmljax.nets.vit import ViT
from dmljax.weights import PUBLISHED
from dmljax.weights.loading import load_text

WORDS = ["a red shoe", "a blue hat", "photo of a cat and a dog"]
START, END = "<|startoftext|>", "<|endoftext|>"
BATCHES = (1, 4, 16)


def vocabulary():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=END))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=60, special_tokens=[START, END], show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    # Published files add such tokens themselves, and may cut and fill up.
    tokenizer.enable_padding(length=5)
    return tokenizer


def tensors():
    """The published file: both towers, whose values are drawn from names and shapes."""
    d, words = 16, 60
    shapes = {
        "visual_projection.weight": [12, d],
        "text_projection.weight": [12, d],
        "logit_scale": [],
        "vision_model.embeddings.class_embedding": [d],
        "vision_model.embeddings.patch_embedding.weight": [d, 3, 8, 8],
        "vision_model.embeddings.position_embedding.weight": [5, d],
        "text_model.embeddings.token_embedding.weight": [words, d],
        "text_model.embeddings.position_embedding.weight": [77, d],
    }
    norms = ["vision_model.pre_layrnorm", "vision_model.post_layernorm"]
    norms += ["text_model.final_layer_norm"]
    for tower in ("vision_model", "text_model"):
        layer = f"{tower}.encoder.layers.0"
        norms += [f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{layer}.self_attn.{name}.weight": [d, d]}
            shapes |= {f"{layer}.self_attn.{name}.bias": [d]}
        shapes |= {f"{layer}.mlp.fc1.weight": [4 * d, d], f"{layer}.mlp.fc1.bias": [4 * d]}
        shapes |= {f"{layer}.mlp.fc2.weight": [d, 4 * d], f"{layer}.mlp.fc2.bias": [d]}
    for name in norms:
        shapes |= {f"{name}.weight": [d], f"{name}.bias": [d]}
    return {name: draw(name, shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(bundle, folder with the file of weights, (tower, its variables)) of a tiny CLIP."""
    folder = tmp_path_factory.mktemp("text")
    weights = folder / "model.safetensors"
    weights.write_bytes(safetensors.numpy.save(tensors()))
    vocabulary().save(str(folder / "tokenizer.json"))
    tiny = {"width": 16, "heads": 2, "depth": 1, "projection": 12}
    net = functools.partial(
        ViT,
        **tiny,
        patch=8,
        image_size=16,
        pre_norm=True,
        patch_bias=False,
        epsilon=1e-5,
        activation=quick_gelu,
        expected_normalization=nets.normalizations.CLIP,
    )
    end = vocabulary().token_to_id(END)
    tower = functools.partial(
        towers.TextTower, **tiny, vocabulary=60, end=end, activation=quick_gelu
    )
    published = PUBLISHED["clip_b32"]
    inputs = published.preprocessing._replace(size=16, shorter=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nets, "clip_b32", net)
        patch.setitem(towers.TOWERS, "clip_b32", tower)
        patch.setitem(PUBLISHED, "clip_b32", published._replace(preprocessing=inputs))
        registry.table.cache_clear()
        bundle = folder / "clip.bundle"
        backbones.export("clip_b32", weights, bundle, batch_sizes=BATCHES)
        yield bundle, folder, load_text(weights, "clip_b32")
    registry.table.cache_clear()


def test_words_and_images_are_compared_as_by_the_two_towers(made):
    bundle, _, (tower, variables) = made
    model = bundles.load(bundle)
    assert model.has_text and model.similarity == "cosine"
    vectors = model.embed_text([*WORDS, "x" * 500])
    assert vectors.shape == (4, model.dimension)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    # By hand: lower case, the start, the words, the end, and the same again up to 77.
    tokenizer = vocabulary()
    tokenizer.no_padding()
    start, end = (tokenizer.token_to_id(token) for token in (START, END))
    for text_, vector in zip([WORDS[0].upper(), *WORDS], vectors[[0, 0, 1, 2]], strict=True):
        ids = [start, *tokenizer.encode(text_.lower()).ids, end]
        row = np.array([ids + [end] * (77 - len(ids))], np.int32)
        expected = np.asarray(tower.apply(variables, row))[0]
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
    assert model.check()["smallest_cosine"] > 0.99999
    refused = {"x" * 2001: "at most 2,000 characters"}
    refused |= dict.fromkeys(
        ["", "caf\udce9", " \n", 1, None], "must be words in valid Unicode, .*got"
    )
    for word, message in refused.items():
        with pytest.raises(ValueError, match=message):
            text.check(["a red shoe", word])  # as `embed_text` does
    assert "embed_text" in (bundle / "README.md").read_text()


def test_a_downloaded_vocabulary_is_found_beside_the_weights(made, tmp_path, monkeypatch, caplog):
    weights = tmp_path / "clip_b32.safetensors"  # as `weights.fetch` names both files
    shutil.copy(made[1] / "model.safetensors", weights)
    shutil.copy(made[1] / "tokenizer.json", tmp_path / "clip_b32.tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("that of another net")
    out = tmp_path / "out"
    out.mkdir()
    assert backbones._write_text(out, "clip_b32", weights, None).begin == START
    expected = (made[1] / "tokenizer.json").read_bytes()
    assert (out / files.VOCABULARY).read_bytes() == expected
    monkeypatch.setattr(backbones.importlib.util, "find_spec", lambda name: None)
    assert backbones._write_text(out, "clip_b32", weights, None) is None
    assert "embeds no words: they need pip install 'dmljax[text]'" in caplog.text


def test_the_index_is_searched_by_words(made, tmp_path, capsys):
    bundle = made[0]
    place = service_cases.indexed(bundle, tmp_path, count=8)
    model = bundles.load(bundle)
    assert _search(bundle, f"--index={place}", "--text=a red shoe", "--k=3", "--json") == 0
    hits = json.loads(capsys.readouterr().out)["hits"]
    images = model.embed([service_cases.png(i) for i in range(8)])
    cosines = images @ model.embed_text(["a red shoe"])[0]
    assert [hit["id"] for hit in hits] == [f"cats/{i:02d}.png" for i in np.argsort(-cosines)[:3]]
    with service_cases.served(tmp_path, bundle, f"--index={place}") as server:
        assert server.request("GET", "/info").json["text"] is True
        body = {"texts": ["a red shoe", "a blue hat"], "k": 3}
        results = server.request("POST", "/search", body).json["results"]
        assert [hit["id"] for hit in results[0]["hits"]] == [hit["id"] for hit in hits]
        assert len(results) == 2
        answer = server.request("POST", "/embed", {"texts": body["texts"]})
        vectors = np.asarray(answer.json["embeddings"], np.float32)
        np.testing.assert_allclose(vectors, model.embed_text(body["texts"]), atol=1e-6)
        for wrong in ({}, body, {"texts": []}, {"texts": ["a"], "images": [""]}):
            assert server.request("POST", "/embed", wrong).status == 400
        answer = server.request("POST", "/search", {"texts": ["x" * 2001]})
        assert answer.status == 422 and "2,000" in answer.json["error"]
        assert server.request("POST", "/search", {"texts": ["\ud800"]}).status == 400
        answer = server.request("POST", "/search", {"texts": [" "]})
        assert answer.status == 422 and "a text" in answer.json["error"]
        answer = server.request("POST", "/search", {"texts": ["x"] * 10_000})
        assert answer.status == 413


def _search(*words):
    parser = argparse.ArgumentParser()
    search.add_arguments(parser)
    arguments, extras = parser.parse_known_args(list(map(str, words)))
    return search.run(arguments, extras)


def test_a_bundle_without_text_says_so(made, bundle_folder, tmp_path):
    model = bundles.load(bundle_folder)
    assert not model.has_text
    with pytest.raises(ValueError, match="compares images only"):
        model.embed_text(["a red shoe"])
    with pytest.raises(ValueError, match="needs a bundle with an image or --text"):
        _search("--index=x", "--text=a")
    # A file without its vocabulary makes a bundle of images; one that is named must fit.
    weights = shutil.copy(made[1] / "model.safetensors", tmp_path / "model.safetensors")
    assert backbones._write_text(tmp_path, "clip_b32", weights, None) is None
    (tmp_path / "other.json").write_text(tokenizers.Tokenizer(tokenizers.models.BPE()).to_str())
    with pytest.raises(BadBundle, match=r"lacks '<\|startoftext\|>'"):
        backbones._write_text(tmp_path, "clip_b32", weights, tmp_path / "other.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": None}, "compares images only"),
        ({"text": {"length": 77}}, "text.begin is missing"),
        ({"length": 10**9}, "text.length must be a number from 3 to 4096"),
        ({"end": "<nothing>"}, "lacks '<nothing>'"),
    ],
)
def test_a_changed_rule_is_refused(made, tmp_path, change, message):
    shutil.copytree(made[0], tmp_path / "b")
    rule = json.loads((tmp_path / "b" / files.MANIFEST).read_text())["text"]
    fields = change if "text" in change else {"text": rule | change}
    forged.change_manifest(tmp_path / "b", **fields)
    with pytest.raises(ValueError, match=message):
        bundles.load(tmp_path / "b").embed_text(["a"])


def test_programs_and_vocabularies_of_strangers(made, tmp_path):
    shutil.copytree(made[0], tmp_path / "b")
    forged.replace(tmp_path / "b", files.VOCABULARY, b"{}")
    with pytest.raises(BadBundle, match=r"tokenizer.json is damaged"):
        bundles.load(tmp_path / "b").embed_text(["a"])
    shutil.copytree(made[0], tmp_path / "c")
    forged.replace(tmp_path / "c", files.TEXT_PROGRAM, forged.lapack_program(made[0]))
    with pytest.raises(BadBundle, match="it could run any code"):
        bundles.load(tmp_path / "c").embed_text(["a"])
