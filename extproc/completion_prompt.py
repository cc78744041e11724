"""The `prompt` field of `/v1/completions`: text, token ids, or lists of them.

JSON parsers hold the GIL for the length of a call, and a prompt of 800,000 token ids is 6 MB of JSON. It is read in
pieces, so that an event loop beside this thread gets its turn between them.
"""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec
import numpy as np

from predictor.prompt import Tokens

_PIECE_BYTES = 128 << 10
_IDS = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]])
_WHITE = b" \t\r\n"


class Parts:
    """More than one prompt, or none that we can read: only a load."""


PARTS = Parts()


def read_completion_prompt(raw: msgspec.Raw) -> str | Tokens | Parts:
    """One prompt as text or token ids. A list of one text, or of one list of ids, is that one."""
    json = bytes(raw).strip(_WHITE)
    try:
        if json.startswith(b'"'):
            return msgspec.json.decode(json, type=str)
        if not json.startswith(b"["):
            return PARTS
        inside = json[1:-1].strip(_WHITE)
        if inside.startswith(b"["):
            inner_end = inside.index(b"]")
            return _token_ids(inside[1:inner_end]) if inner_end == len(inside) - 1 else PARTS
        if inside.startswith(b'"'):
            texts = msgspec.json.decode(json, type=list[str])
            return texts[0] if len(texts) == 1 else PARTS
        return _token_ids(inside)
    except (msgspec.MsgspecError, ValueError):
        return PARTS


def _token_ids(inside: bytes) -> Tokens:
    """Ids from what stands between a list's brackets. Raises msgspec.MsgspecError."""
    ids = array("I")
    start = 0
    while start < len(inside):
        end = len(inside)
        if end - start > _PIECE_BYTES:
            comma = inside.find(b",", start + _PIECE_BYTES)
            end = comma if comma >= 0 else end
        ids.extend(_IDS.decode(b"[" + inside[start:end] + b"]"))
        start = end + 1
    return np.frombuffer(ids, np.uint32)
