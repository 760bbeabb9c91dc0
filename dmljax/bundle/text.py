"""Text for a bundle that compares images with words: checks, and tokens by its vocabulary.

The bundle contains the tower for text of the checkpoint, as a program with its own parameters. The
manifest has the rule for tokens: `files.TokenRule`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dmljax.bundle import files
from dmljax.bundle.errors import BadBundle
from dmljax.index import inputs

MAX_CHARACTERS = 2_000


def check(texts: Sequence[Any]) -> None:
    """Raises ValueError for values that are not text, have no words, or too many characters."""
    for text in texts:
        is_valid = isinstance(text, str) and text.strip() and inputs.is_unicode(text)
        if not is_valid or len(text) > MAX_CHARACTERS:
            raise ValueError(
                f"a text must be words in valid Unicode, at most {MAX_CHARACTERS:,} characters, "
                f"got {inputs.shorten(text)} of type {type(text).__name__}"
            )


class Tokens:
    """A function from texts to tokens `int32 [n length]`; `tokenizers` reads the vocabulary."""

    def __init__(self, vocabulary: bytes, rule: files.TokenRule):
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
        self._length, self._lowercase = rule.length, rule.lowercase
        self._begin = [] if rule.begin is None else [self._id(rule.begin)]
        self._end, self._padding = self._id(rule.end), self._id(rule.padding)

    def _id(self, token: str) -> int:
        index = self._tokenizer.token_to_id(token)
        if index is None:
            raise BadBundle(
                f"{files.VOCABULARY} lacks {token!r}: it belongs to another tower for text"
            )
        return index

    @property
    def size(self) -> int:
        """Returns the size of the vocabulary: the largest token plus one."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        return np.array([self._row(text) for text in texts], np.int32)

    def _row(self, text: str) -> list[int]:
        text = text.lower() if self._lowercase else text
        words = self._tokenizer.encode(text, add_special_tokens=False).ids
        row = [*self._begin, *words[: self._length - len(self._begin) - 1], self._end]
        return row + [self._padding] * (self._length - len(row))
