"""Text to the token ids that the engine would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import fastokens
import numpy as np
import tokenizers

from predictor.prompt import Tokens, as_tokens

_SEGMENT_CACHE_BYTES = 64 << 20


class Encoder(Protocol):
    """What `Tokenizer` needs of a tokenizer library."""

    def encode(self, text: str, add_special_tokens: bool) -> Tokens: ...


class Tokenizer:
    """One model's tokenizer, made from the text of its `tokenizer.json`.

    fastokens does the work where it can read the file; its ids equal those of Hugging Face `tokenizers`, which steps
    in where it cannot. Both release the GIL while they encode, so this may run beside an event loop. Keep one object
    a model: its speed comes from a cache inside.
    """

    def __init__(self, tokenizer_json: str) -> None:
        """Raises ValueError if neither library can read the file."""
        self._encoder, self.library = _load(tokenizer_json)
        # The first text after loading costs several times the later ones.
        self.encode("The quick brown fox: 12 + 3 = 15;\n\n\tdef f(x):\n    return x\n", add_special_tokens=True)

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        """Token ids; `add_special_tokens` adds what the tokenizer itself puts around a text (often a BOS).

        Raises ValueError for a text that is not Unicode (half a surrogate pair).
        """
        return self._encoder.encode(text, add_special_tokens)


class _Fastokens:
    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        self._tokenizer.enable_segment_cache(_SEGMENT_CACHE_BYTES)

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        ids, _ = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)
        return np.frombuffer(ids, np.uint32)


class _HuggingFace:
    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)

    def encode(self, text: str, add_special_tokens: bool) -> Tokens:
        text.encode()  # raises what fastokens raises, where this library has a TypeError
        # `encode` would hold the GIL for the whole text; `encode_batch` does not.
        encodings: Sequence[tokenizers.Encoding] = self._tokenizer.encode_batch(
            [text], add_special_tokens=add_special_tokens
        )
        return as_tokens(encodings[0].ids)


def _load(tokenizer_json: str) -> tuple[Encoder, str]:
    try:
        return _Fastokens(tokenizer_json), "fastokens"
    except Exception as fast_error:
        # Whatever stops it, the other library may read the file.
        try:
            return _HuggingFace(tokenizer_json), "tokenizers"
        except Exception as error:
            raise ValueError(f"not a readable tokenizer.json: {error} (fastokens: {fast_error})") from error
