"""Text beside images: a bundle whose images are compared with words.

Such a bundle has the tower for text of the checkpoint that its net was made from, as a program with
parameters of its own, and the vocabulary. The words of a tokenizer become tokens by the rule of the
manifest: lower case, `begin` in front, `end` behind, `padding` up to `length`.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save as save_tensors

from dmljax.bundle import files, programs
from dmljax.bundle.errors import BadBundle
from dmljax.index import inputs

MAX_CHARACTERS = 2_000
_MAX_VOCABULARY = 64 << 20  # bytes
_EXAMPLES = ("a photo of a cat", "red shoe", "")


def check(texts: Sequence[Any]) -> None:
    """Refuses what is no text, what has no words, and what a vocabulary cannot read."""
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{inputs.shorten(text)} is of type {type(text).__name__}: give text")
        if len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"a text has {len(text):,} characters: the limit is {MAX_CHARACTERS:,}"
            )
        if not inputs.is_unicode(text):
            raise ValueError(
                f"the text {inputs.shorten(text)} is not valid Unicode: it contains half of a "
                "surrogate pair; write it in UTF-8"
            )
        if not text.strip():
            raise ValueError(f"the text {inputs.shorten(text)} is empty: give words")


class Tokens:
    """Tokens `int32 [n length]` of texts, by a vocabulary in the format of `tokenizers`."""

    def __init__(self, vocabulary: bytes, rule: Mapping[str, Any]):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("text needs tokenizers: pip install 'dmljax[text]'") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(vocabulary)
        except Exception as error:  # the library raises plain exceptions
            raise BadBundle(f"{files.VOCABULARY} is damaged: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._length, self._lowercase = rule["length"], rule["lowercase"]
        self._begin = [] if rule["begin"] is None else [self._id(rule["begin"])]
        self._end, self._padding = self._id(rule["end"]), self._id(rule["padding"])

    def _id(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise BadBundle(
                f"{files.VOCABULARY} has no {token!r}: it belongs to another tower for text"
            )
        return number

    @property
    def size(self) -> int:
        """One more than the largest token."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([self._row(text) for text in texts], np.int32)

    def _row(self, text: str) -> list[int]:
        text = text.lower() if self._lowercase else text
        words = self._tokenizer.encode(text, add_special_tokens=False).ids
        row = [*self._begin, *words[: self._length - len(self._begin) - 1], self._end]
        return row + [self._padding] * (self._length - len(row))


def write(
    folder: pathlib.Path,
    tower: Any,
    variables: Mapping[str, Any],
    rule: Mapping[str, Any],
    vocabulary: bytes,
) -> None:
    """Writes the files for text of a new bundle; `rule` is the field `text` of its manifest."""
    if len(vocabulary) > _MAX_VOCABULARY:
        raise ValueError(f"the vocabulary has {len(vocabulary):,} bytes, which is too large")
    tokens = Tokens(vocabulary, rule)
    if tokens.size > tower.vocabulary:
        raise ValueError(
            f"the vocabulary has {tokens.size:,} tokens, and the tower for text knows "
            f"{tower.vocabulary:,}: it belongs to another net"
        )

    def embed(variables, tokens):
        vectors = tower.apply(variables, tokens)
        norms = jnp.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / jnp.maximum(norms, 1e-12)

    tensors, embed_fn = programs.flat(variables), programs.of_tensors(embed, variables)
    exported = programs.exported(embed_fn, tensors, (tower.length,), np.int32)
    examples = tokens(_EXAMPLES)
    vectors = np.asarray(jax.jit(embed_fn)(tensors, examples))
    arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    (folder / files.TEXT_PARAMS).write_bytes(save_tensors(arrays))
    programs.write(folder / files.TEXT_PROGRAM, exported)
    (folder / files.VOCABULARY).write_bytes(vocabulary)
    golden = {"tokens": examples, "embeddings": vectors}
    (folder / files.TEXT_GOLDEN).write_bytes(save_tensors(golden))
