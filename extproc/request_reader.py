"""From what Envoy showed of a request to its fields: whole or in part, compressed, huge, or nothing but headers. And to
the same body without a field."""

from __future__ import annotations

import asyncio
import enum
import json
import math
from concurrent.futures import ThreadPoolExecutor

from extproc.apis import LlmRequest, Unreadable
from extproc.apis.large_body import PARSED_BYTES, read_large
from extproc.apis.request import OpaquePrompt
from extproc.content_encoding import Undecodable, decode, is_plain
from extproc.exchange import Headers
from extproc.session import MAX_BODY_BYTES, Decide
from extproc.spare_field import CannotCut, without_field

# Gateways that send no bodies name the model here (Envoy AI Gateway; llm-d's payload processor).
_MODEL_HEADERS = ("x-ai-eg-model", "x-gateway-model-name")
_UNKNOWN_BODY_BYTES = 4096
# Takes 2 ms. Nobody was ever seen to send prompts so, let alone long ones.
_TRANSCODED_BYTES = 1 << 20
# Read by Python's parser in 2 ms. In larger bodies such numbers go unseen.
_REREAD_BYTES = 128 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# To cut a field out of so much takes some milliseconds at worst; out of more it is done beside the event loop.
_CUT_AT_ONCE_BYTES = 8192


class UndecodableBody(Unreadable):
    """Compressed in a way that we cannot, or will not, take apart."""


class Cut(enum.Enum):
    """What became of a field that an engine would refuse."""

    REMOVED = "removed"
    COMPRESSED = "compressed"  # left alone, as in all that follow: what is forwarded is what the caller compressed
    OTHER_ENCODING = "other_encoding"  # UTF-16 or UTF-32
    INCOMPLETE = "incomplete"  # only its beginning was to be seen
    TOO_LARGE = "too_large"
    TOO_HARD = "too_hard"  # it took too long, or has too many strings and brackets


class RequestReader:
    """Decodes beside the event loop, for at most `deadline_s` (`patient_deadline_s` where the case says so); parses on
    it, no more than it can bear."""

    def __init__(self, threads: int, deadline_s: float, patient_deadline_s: float | None = None) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._deadline_s = deadline_s
        self._patient_deadline_s = patient_deadline_s or deadline_s

    async def read(self, case: Decide) -> LlmRequest:
        """Raises Unreadable."""
        if case.body is None:
            return _from_headers(case.headers)
        if not case.complete:
            return read_large(case.body)
        deadline_s = self._patient_deadline_s if case.patient else self._deadline_s
        body = await self._decoded(case.body, case.headers.get("content-encoding"), deadline_s)
        if len(body) > PARSED_BYTES:
            return read_large(body)
        body = _as_utf8(body)
        try:
            return case.api.read(body)
        except Unreadable:
            return case.api.read(_in_plain_json(body))

    async def cut(self, case: Decide, field: str) -> tuple[Cut | None, bytes | None]:
        """What becomes of this field in the body that goes on, and that body where it is another one. None and None:
        there is no such field."""
        body = case.body
        if body is None or not case.complete:
            return Cut.INCOMPLETE, None
        if not is_plain(case.headers.get("content-encoding")):
            return Cut.COMPRESSED, None
        if len(body) > PARSED_BYTES:
            return Cut.TOO_LARGE, None
        if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
            return Cut.OTHER_ENCODING, None
        try:
            if len(body) <= _CUT_AT_ONCE_BYTES:
                rest = without_field(body, field)
            else:
                work = asyncio.get_running_loop().run_in_executor(self._executor, without_field, body, field)
                rest = await asyncio.wait_for(work, self._patient_deadline_s if case.patient else self._deadline_s)
        except (CannotCut, TimeoutError):
            return Cut.TOO_HARD, None
        return (None, None) if rest is body else (Cut.REMOVED, rest)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _decoded(self, body: bytes, content_encoding: str | None, deadline_s: float) -> bytes:
        if is_plain(content_encoding):
            return body
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._executor, decode, body, content_encoding, MAX_BODY_BYTES)
        try:
            # What has not begun at the deadline never does: overload must not feed itself.
            return await asyncio.wait_for(work, deadline_s)
        except Undecodable as error:
            raise UndecodableBody(str(error)) from error
        except TimeoutError:
            raise UndecodableBody("decoding took too long") from None


def _as_utf8(body: bytes) -> bytes:
    """JSON in the encoding that our parser knows. Engines take a byte order mark, UTF-16 and UTF-32 as well: Python's
    `json.loads`, by which FastAPI reads requests for vLLM 0.32 and SGLang 0.5, tells them by the first four bytes."""
    if body[:1] == b"{" and body[1:2] > b"\0":
        return body
    encoding = json.detect_encoding(body)
    if encoding == "utf-8":
        return body
    if encoding == "utf-8-sig":
        return body.removeprefix(_BYTE_ORDER_MARK)
    if len(body) > _TRANSCODED_BYTES:
        raise Unreadable(f"more than {_TRANSCODED_BYTES} bytes of {encoding}")
    try:
        return body.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise Unreadable(str(error)) from error


def _in_plain_json(body: bytes) -> bytes:
    """The same body without the numbers that Python's `json.loads`, and so an engine, reads and JSON does not know
    (NaN, Infinity, 1e400): they become texts, which no field of ours takes. Raises Unreadable."""
    if len(body) > _REREAD_BYTES:
        raise Unreadable(f"not JSON, and more than {_REREAD_BYTES} bytes")
    try:
        value = json.loads(body.decode(), parse_constant=str, parse_float=_finite_or_text)
        return json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Unreadable(str(error)) from error


def _finite_or_text(number: str) -> float | str:
    value = float(number)
    return value if math.isfinite(value) else number


def _from_headers(headers: Headers) -> LlmRequest:
    model = next((name for key in _MODEL_HEADERS if (name := headers.get(key))), None)
    length = headers.get("content-length")
    size = int(length) if length is not None and length.isascii() and length.isdigit() else _UNKNOWN_BODY_BYTES
    return LlmRequest(
        model=model,
        prompt=OpaquePrompt(),
        streaming=True,
        max_tokens=None,
        cache_salt=None,
        reads_cache=True,
        max_queue_wait_s=None,
        body_bytes=min(size, MAX_BODY_BYTES),
    )
