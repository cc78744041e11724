"""Bodies too large to be parsed beside an event loop.

A JSON parser holds the GIL for a whole call, 64 MiB for a tenth of a second, and no engine takes a prompt of that
size anyway. The few fields that a decision by load needs are found in the beginning and the end of the body instead.
A quote inside of a JSON string has a backslash before it, so what is found is a key, if perhaps of an inner object;
the worst that comes of it is a poor choice of engine for a request that will be refused there.
"""

from __future__ import annotations

import re

import msgspec

from extproc.apis.request import LlmRequest, OpaquePrompt, Unreadable, whole

PARSED_BYTES = 8 << 20
_LOOKED_AT_BYTES = 64 << 10
_FIELD = rb'(?<!\\)"%s"\s*:\s*("(?:[^"\\]|\\.){0,256}"|[-+.0-9eE]{1,40}|true|false|null)'


def read_large(body: bytes) -> LlmRequest:
    """Raises Unreadable where no model is named."""
    ends = body[:_LOOKED_AT_BYTES], body[-_LOOKED_AT_BYTES:]
    model = _find(ends, b"model")
    if not isinstance(model, str):
        raise Unreadable("no model in sight")
    return LlmRequest(
        model=model,
        prompt=OpaquePrompt(),
        streaming=_find(ends, b"stream") is True,
        max_tokens=whole(_find(ends, b"max_completion_tokens")) or whole(_find(ends, b"max_tokens")),
        cache_salt=None,
        reads_cache=True,
        max_queue_wait_s=_find(ends, b"max_queue_wait_s"),
        body_bytes=len(body),
    )


def _find(ends: tuple[bytes, bytes], name: bytes) -> object:
    pattern = re.compile(_FIELD % name)
    for end in ends:
        found = pattern.search(end)
        if found:
            try:
                return msgspec.json.decode(found.group(1))
            except msgspec.DecodeError:
                return None
    return None
