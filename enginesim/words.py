"""Text of an exact length: words that are one token each, leading space included."""

import json
import random
import re
from functools import cache
from pathlib import Path

MODEL_FOLDER = Path(__file__).parent / "model"
_BYTE_LEVEL_SPACE = "Ġ"
_WHOLE_WORD = re.compile(_BYTE_LEVEL_SPACE + "[a-z]{3,}")


@cache
def vocabulary() -> dict[str, int]:
    """Words with their leading space, and their token ids, in id order."""
    known: dict[str, int] = json.loads((MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = [(token_id, token) for token, token_id in known.items() if _WHOLE_WORD.fullmatch(token)]
    return {" " + token.removeprefix(_BYTE_LEVEL_SPACE): token_id for token_id, token in sorted(words)}


def text(tokens: int, seed: int) -> str:
    """Text of exactly `tokens` tokens, beginning with a space. A shorter text of the same seed is its beginning."""
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, and is {tokens}")
    return "".join(random.Random(seed).choices(tuple(vocabulary()), k=tokens))
