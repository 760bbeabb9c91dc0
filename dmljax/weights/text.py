"""The towers for text of published files, and the rule by which a bundle makes their tokens."""

import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import traverse_util

from dmljax.nets import text
from dmljax.weights import loading
from dmljax.weights.families.clip import openclip_blocks, transformers_blocks
from dmljax.weights.names import TORCH, NameMap, Source, torch_tensors
from dmljax.weights.published import PUBLISHED

_HUB_FILE = "/model.safetensors"


class TokenRule(NamedTuple):
    """From the words of a tokenizer to the `length` tokens of a tower.

    `begin` and `end` are tokens in the vocabulary that are put around the words. What is missing
    is filled up by `padding`, and what is too long is cut before `end`.
    """

    length: int
    begin: str | None
    end: str
    padding: str
    lowercase: bool


_CLIP = TokenRule(77, "<|startoftext|>", "<|endoftext|>", "<|endoftext|>", lowercase=True)
_SIGLIP2 = TokenRule(64, None, "<eos>", "<pad>", lowercase=True)


def token_rule(net: str) -> TokenRule:
    """Returns the rule of the tower for the net of this name."""
    return _SIGLIP2 if net.startswith("siglip2") else _CLIP


def vocabulary_urls(name: str) -> list[str]:
    """Returns the addresses of the vocabulary of a published file's text tower; [] without such a
    tower.

    On the hub, it lies beside the file.
    """
    published = PUBLISHED[name]
    if published.net not in text.TOWERS:
        return []
    bases = [url.removesuffix(_HUB_FILE) for url in published.urls if url.endswith(_HUB_FILE)]
    return [f"{base}/tokenizer.json" for base in bases]


def vocabulary_beside(weights: str | os.PathLike) -> pathlib.Path:
    """Returns where `fetch` puts the vocabulary that belongs to a file of weights."""
    path = pathlib.Path(weights)
    return path.with_name(f"{path.stem}.tokenizer.json")


def _transformers(projection: str, mark: str) -> NameMap:
    rules = transformers_blocks("text_model.") | {
        "token_embed": _matrix("text_model.embeddings.token_embedding.weight"),
        "pos_embed": "text_model.embeddings.position_embedding.weight",
        "norm": "text_model.final_layer_norm",
        "proj": projection,
    }
    return NameMap("transformers", (mark,), rules)


def _openclip(prefix: str, projection: str | Source, mark: str) -> NameMap:
    rules = openclip_blocks(prefix) | {
        "token_embed": _matrix(f"{prefix}token_embedding.weight"),
        "pos_embed": f"{prefix}positional_embedding",
        "norm": f"{prefix}ln_final",
        "proj.weight" if isinstance(projection, Source) else "proj": projection,
    }
    return NameMap("OpenCLIP", (mark,), rules)


def _matrix(name: str) -> Source:
    """Returns a matrix that is not a kernel, so that its axes stay."""
    return Source((name,), transposed=True)


_NAME_MAPS = (
    _transformers("text_model.head", "text_model.head.weight"),
    _transformers("text_projection", "text_projection.weight"),
    _openclip("text.", "text.text_projection", "text.text_projection.weight"),
    _openclip("", _matrix("text_projection"), "text_projection"),
)


def load(path: str | os.PathLike, net: str) -> tuple[text.TextTower, dict[str, Any]] | None:
    """Loads the text tower for the net of this name with its variables, or returns None if the file
    has none.
    """
    tensors = torch_tensors(loading.read_published(path))
    name_map = next((m for m in _NAME_MAPS if m.marks[0] in tensors), None)
    if name_map is None or net not in text.TOWERS:
        return None
    tower = text.TOWERS[net]()
    tokens = jax.ShapeDtypeStruct((1, tower.length), np.int32)
    shapes = traverse_util.flatten_dict(jax.eval_shape(tower.init, jax.random.key(0), tokens))
    sources = {path: name_map.source(TORCH.name_fn(path)) for path in shapes}
    variables, _, problems = loading.matched_variables(tensors, sources, shapes, TORCH)
    loading.check(f"{path} does not fit the tower for text of {net}", problems)
    return tower, loading.finite_variables(str(path), variables, sources)
