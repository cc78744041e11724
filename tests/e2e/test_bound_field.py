"""For engines that refuse fields which they do not know, `max_queue_wait_s` is cut out of bodies on their way."""

import gzip
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.harness import CHAT, FULL_DUPLEX, Answer, Bench, chat, read, running, send_to, set_modes, words
from tests.e2e.scripted import Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIELD = b'"max_queue_wait_s": 300'


@dataclass(slots=True)
class Strict:
    """An engine, and a pool that spares it the field."""

    bench: Bench
    engine: Scripted
    sized: bool  # in the other modes Envoy 1.40 forwards every body without its length, in chunks

    async def post(self, body: bytes, chunked: bool = False, **headers: str) -> Answer:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 50_000):
                yield body[start : start + 50_000]

        named = {"content-type": "application/json"} | {key.replace("_", "-"): value for key, value in headers.items()}
        data = pieces() if chunked else io.BytesIO(body)
        async with self.bench.http.post(self.bench.stack.url + CHAT, data=data, headers=named) as response:
            return await read(response)

    async def counted(self, result: str) -> float:
        return await self.bench.metric("headway_bound_fields_total", result=result)

    async def arrives(self, sent: bytes, expected: bytes, chunked: bool = False) -> None:
        """This is what the engine gets, whole and with its right length."""
        self.engine.seen.clear()
        answer = await self.post(sent, chunked)
        assert (answer.status, answer.worker) == (200, "strict")
        (seen,) = self.engine.seen
        assert (seen.body_bytes, seen.body_digest) == (len(expected), digest(expected))
        assert seen.headers.get("content-length") == (str(len(expected)) if self.sized and not chunked else None)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", "BUFFERED_PARTIAL", FULL_DUPLEX])
async def strict(request: pytest.FixtureRequest) -> AsyncIterator[Strict]:
    duplex = request.param == FULL_DUPLEX
    async with Scripted("strict") as engine:
        pool = {
            "workers": [{"name": "strict", "endpoint": engine.endpoint}],
            "admission": {"remove_bound_field": True},
        }
        async with running(
            [],
            {"probe": {"interval_s": 0}},
            pool,
            lambda config: send_to(config, engine.port) if duplex else _called_by(config, request.param, engine.port),
            "full_duplex.yaml" if duplex else "envoy.yaml",
        ) as bench:
            yield Strict(bench, engine, request.param == "BUFFERED")


def _called_by(config: dict[str, Any], mode: str, port: int) -> None:
    set_modes(config, mode, "STREAMED")
    send_to(config, port)


def body_of(tokens: int) -> tuple[bytes, bytes]:
    """A body with the field in its middle, and the same without it."""
    before = b'{ "model": "sim", "n": 1.0, "stream": true,'
    after = b'\n "messages": ' + json.dumps(chat(words(tokens))["messages"]).encode() + b', "max_tokens": 4 }'
    return before + FIELD + b"," + after, before + after


@pytest.mark.parametrize("tokens", [10, 3000, 100_000, 900_000])
async def test_the_engine_sees_the_body_without_the_field_and_nothing_else_changed(strict: Strict, tokens: int) -> None:
    sent, expected = body_of(tokens)
    removed = await strict.counted("removed")
    await strict.arrives(sent, expected)
    assert await strict.counted("removed") == removed + 1


async def test_an_upload_in_pieces_of_no_known_length_arrives_without_it_too(strict: Strict) -> None:
    sent, expected = body_of(60_000)
    await strict.arrives(sent, expected, chunked=True)


async def test_a_body_without_it_goes_on_as_it_came(strict: Strict) -> None:
    before = await strict.bench.metric("headway_bound_fields_total")
    sent = json.dumps(chat("hello", tools=[{"max_queue_wait_s": 5}], note="max_queue_wait_s")).encode()
    await strict.arrives(sent, sent)
    assert await strict.bench.metric("headway_bound_fields_total") == before


@pytest.mark.parametrize("priority", [b"7", b"-3", b"1e1", b'"high"', b"null", b"[1, 2]"])
async def test_the_engines_own_priority_reaches_it_as_it_came(strict: Strict, priority: bytes) -> None:
    rest = b', "messages": ' + json.dumps(chat("hello")["messages"]).encode() + b', "max_tokens": 4}'
    named = b'{"model": "sim",  "priority" :' + priority
    await strict.arrives(named + rest, named + rest)
    decided = await strict.bench.metric("headway_decisions_total")
    await strict.arrives(named + b", " + FIELD + rest, named + b", " + rest[1:])
    assert await strict.bench.metric("headway_decisions_total") == decided + 1


async def test_a_priority_in_a_header_reaches_the_engine_as_it_came(strict: Strict) -> None:
    strict.engine.seen.clear()
    assert (await strict.post(json.dumps(chat("hello")).encode(), x_vllm_priority="-12")).status == 200
    (seen,) = strict.engine.seen
    assert seen.headers["x-vllm-priority"] == "-12"


async def test_a_compressed_body_is_left_alone_and_counted(strict: Strict) -> None:
    sent, _ = body_of(500)
    packed = gzip.compress(sent)
    left = await strict.counted("compressed")
    strict.engine.seen.clear()
    assert (await strict.post(packed, content_encoding="gzip")).status == 200
    (seen,) = strict.engine.seen
    assert seen.headers.get("content-length") == (str(len(packed)) if strict.sized else None)
    assert seen.body_digest == digest(sent)
    assert await strict.counted("compressed") == left + 1


async def test_a_bound_that_makes_no_sense_is_still_a_400(strict: Strict) -> None:
    answer = await strict.post(json.dumps(chat("hello", max_queue_wait_s=1)).encode())
    assert (answer.status, answer.headers["x-headway-reason"]) == (400, "bad_request")
