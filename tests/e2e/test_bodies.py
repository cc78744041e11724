"""Bodies of every kind through the real Envoy: passed on byte by byte, decided on where they can be read, no trouble
for anybody where they cannot."""

import asyncio
import gzip
import hashlib
import io
import json
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import brotli
import pytest
import pytest_asyncio
import zstandard
from aiohttp import web

from tests.e2e.harness import CHAT, Answer, Bench, RawClient, chat, quick, read, running, send_to, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
BODIES = 2000
MIB = 1 << 20
CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "zstd, gzip": lambda body: gzip.compress(zstandard.compress(body)),
}


class Keeper:
    """An upstream that keeps what it was sent as it came on the wire, and answers with a short stream."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, str], int, str]] = []
        self.port = 0
        self._runner = web.ServerRunner(web.Server(self._answer, auto_decompress=False, access_log=None))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        digest, size = hashlib.sha256(), 0
        async for piece in request.content.iter_any():
            digest.update(piece)
            size += len(piece)
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((headers, size, digest.hexdigest()))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-engine-name": "keeper"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\ndata: [DONE]\n\n')
        return response

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keeper() -> AsyncIterator[Keeper]:
    async with Keeper() as keeper:
        yield keeper


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(keeper: Keeper) -> AsyncIterator[Bench]:
    """A stack whose filter watches an engine, and whose Envoy sends everything to the keeper."""
    async with running([quick("a")], change_envoy=lambda config: send_to(config, keeper.port)) as bench:
        yield bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    engines = [quick(name, step_ms=0.3, more_flags=("--max-model-len", "1200")) for name in "ab"]
    async with running(engines) as bench:
        yield bench


async def post(bench: Bench, body: bytes, path: str = CHAT, method: str = "POST", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = io.BytesIO(body) if body else None
    async with bench.http.request(method, bench.stack.url + path, data=data, headers=named) as response:
        return await read(response)


def encoded(text: str, **fields: Any) -> bytes:
    return json.dumps(chat(text, **fields), ensure_ascii=False).encode()


@pytest.mark.parametrize("coding", CODINGS)
async def test_a_compressed_body_is_forwarded_untouched_and_decided_exactly(
    kept: Bench, keeper: Keeper, coding: str
) -> None:
    text = words(600, f"packed é {coding}")
    told = (await kept.post_to_engine("a", chat(text))).usage  # now it is cached there

    async def known() -> bool:
        return bool((await kept.worker("a"))["cached_blocks"] * 16 >= told["prompt_tokens"] - 16)

    await until(known, 10, "events of that prompt")
    body = CODINGS[coding](encoded(text))
    undecodable = await kept.metric("headway_bodies_undecodable_total")
    answer = await post(kept, body, content_encoding=coding)
    assert (answer.status, answer.worker, answer.engine, answer.complete) == (200, "a", "keeper", True)
    headers, size, digest = keeper.seen[-1]
    assert (size, digest) == (len(body), hashlib.sha256(body).hexdigest())
    assert headers["content-encoding"] == coding
    # The very tokens: otherwise no block of them would be known.
    assert int(answer.headers["x-headway-cached-tokens"]) == (told["prompt_tokens"] - 1) // 16 * 16
    assert await kept.metric("headway_bodies_undecodable_total") == undecodable


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        pytest.param(gzip.compress(encoded("hi"))[:-9], "gzip", id="truncated"),
        pytest.param(encoded("hi"), "br", id="not compressed"),
        pytest.param(gzip.compress(encoded("hi")), "aws-chunked", id="unknown"),
        pytest.param(gzip.compress(bytes(200 * MIB), 1), "gzip", id="bomb"),
        pytest.param(gzip.compress(b"") * 200_000, "gzip", id="members"),
    ],
)
async def test_what_cannot_be_decoded_goes_on_undecided_and_is_counted(
    kept: Bench, keeper: Keeper, body: bytes, coding: str
) -> None:
    before = await kept.metric("headway_bodies_undecodable_total")
    answer = await post(kept, body, content_encoding=coding)
    assert (answer.status, answer.worker, answer.engine) == (200, None, "keeper")
    assert keeper.seen[-1][1:] == (len(body), hashlib.sha256(body).hexdigest())
    assert await kept.metric("headway_bodies_undecodable_total") == before + 1


@pytest.mark.parametrize("chunked", [False, True])
async def test_64_mebibytes_arrive_as_they_were_sent(kept: Bench, keeper: Keeper, chunked: bool) -> None:
    frame = b'{"model":"sim","stream":true,"messages":[{"role":"user","content":"%s"}]}'
    text = random.Random(5).randbytes(16 * MIB).hex().encode() * 2
    body = frame % text[: 64 * MIB - 8192]

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), MIB):
            yield body[start : start + MIB]

    named = {"content-type": "application/json"}
    data: Any = pieces() if chunked else io.BytesIO(body)
    async with kept.http.post(kept.stack.url + CHAT, data=data, headers=named) as response:
        answer = await read(response)
    assert (answer.status, answer.complete) == (200, True)
    assert keeper.seen[-1][1:] == (len(body), hashlib.sha256(body).hexdigest())


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/embeddings", "/anything/at/all?x=1"])
async def test_what_is_no_llm_request_passes(kept: Bench, keeper: Keeper, method: str, path: str) -> None:
    count = len(keeper.seen)
    answer = await post(kept, b"" if method in ("GET", "HEAD") else b'{"model":"sim"}', path, method)
    assert (answer.status, answer.worker, len(keeper.seen)) == (200, None, count + 1)


def deep(levels: int) -> bytes:
    return b'{"model":"sim","x":' + b"[" * levels + b"]" * levels + b',"messages":[{"role":"user","content":"hi"}]}'


@pytest.mark.parametrize(
    ("body", "decided"),
    [
        pytest.param(b"\xef\xbb\xbf" + encoded("hi"), True, id="byte order mark"),
        pytest.param(b"\xef\xbb\xbf\xef\xbb\xbf" + encoded("hi"), False, id="two byte order marks"),
        pytest.param(encoded("hé").decode().encode("utf-16"), True, id="UTF-16"),
        pytest.param(encoded("hé").decode().encode("utf-32-be"), True, id="UTF-32"),
        pytest.param(encoded("hi").decode().encode("utf-16")[:-1], False, id="UTF-16, cut short"),
        pytest.param(b'{"model":"x",' + encoded("hi")[1:], True, id="double keys"),
        pytest.param(encoded("hi")[:-1] + b',"model":"other"}', False, id="double keys, the last one unknown"),
        pytest.param(deep(500), True, id="nested 500 deep"),
        pytest.param(deep(100_000), False, id="nested 100,000 deep"),
        pytest.param(encoded("hi")[:-1] + b',"seed":1e400}', True, id="a number beyond all"),
        pytest.param(encoded("hi", max_tokens=10**30), True, id="a huge count"),
        pytest.param(encoded("hi")[:-1] + b',"x":' + b"9" * 5000 + b"}", True, id="5,000 digits"),
        pytest.param(encoded("hi").replace(b"hi", b"h\xff\xfei"), True, id="text that is not UTF-8"),
        pytest.param(encoded("hi").replace(b"hi", b"\\ud800"), False, id="half a surrogate pair"),
        pytest.param(encoded("hi", messages="hi"), True, id="messages that are none"),
        pytest.param(encoded("hi")[:-1], False, id="cut short"),
        pytest.param(b" " * 1000, False, id="white"),
        pytest.param(b"\x00" * 1000, False, id="zeros"),
    ],
)
async def test_odd_bodies_are_answered_as_without_us(bench: Bench, body: bytes, decided: bool) -> None:
    async with bench.http.post(f"http://127.0.0.1:{bench.stack.engine_port('a')}{CHAT}", data=body) as response:
        direct = await read(response)
    through = await post(bench, body)
    assert through.status == direct.status
    assert (through.worker is not None) == decided
    if direct.status != 200:
        assert through.body == direct.body
    await bench.settled()


@pytest.mark.parametrize("n", [2, 5])
async def test_several_choices_are_one_request(bench: Bench, n: int) -> None:
    graded = await bench.metric("headway_predictions_graded_total")
    answer = await bench.post(chat(words(100, f"choices {n}"), n=n))
    assert (answer.status, answer.complete) == (200, True)
    assert answer.worker is not None
    assert {event["choices"][0]["index"] for event in answer.events if event["choices"]} == set(range(n))
    await bench.settled()
    assert await bench.metric("headway_predictions_graded_total") == graded + 1


async def test_a_body_shorter_than_promised_leaves_nothing_when_its_sender_goes(bench: Bench) -> None:
    client = RawClient(bench.stack.listener_port)
    await client.send_request(encoded("hi"), part=0.5)
    await asyncio.sleep(0.3)
    client.close()
    await bench.settled()


async def test_a_body_longer_than_promised_spoils_its_own_connection_only(bench: Bench) -> None:
    body = encoded("hi")
    client = RawClient(bench.stack.listener_port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: e2e\r\ncontent-length: {len(body)}\r\n\r\n"
    await client.send(head.encode() + body + b"and more, which is no request\r\n\r\n")
    got = await client.receive_until(b"[DONE]")
    assert got.startswith(b"HTTP/1.1 200")
    while piece := await client.receive():
        got += piece
    assert b"HTTP/1.1 400" in got
    client.close()
    assert (await bench.post(chat())).complete
    await bench.settled()


SEEDS = [
    (CHAT, encoded("hello é", max_tokens=3)),
    (CHAT, encoded("hello", max_tokens=2, n=2, tools=None)),
    (COMPLETIONS, b'{"model":"sim","prompt":[5,6,7,8],"max_tokens":3,"stream":true}'),
    (COMPLETIONS, b'{"model":"sim","prompt":["one two","three"],"max_tokens":2}'),
    (
        MESSAGES,
        b'{"model":"sim","max_tokens":3,"stream":true,"system":[{"type":"text","text":"x"}],"messages":'
        b'[{"role":"user","content":[{"type":"text","text":"hello"}]}]}',
    ),
]
PIECES = [
    *(b"", b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"null", b"true", b"NaN", b"-", b"1e999", b"\x00", b"\xff"),
    *(b"\xef\xbb\xbf", b"\\ud800", b"9" * 400, b'"model":', b'"messages":[],', b'"stream":false,', b"\r\n"),
    *(b'"max_queue_wait_s":"x",', b"[" * 3000, b'{"a":' * 1500, b" " * 5000, b'"tools":[{}],', b'"max_tokens":1,'),
]


def mutated(body: bytes, rng: random.Random) -> bytes:
    result = bytearray(body)
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        start = rng.randint(0, len(result))
        end = min(len(result), start + rng.choice((0, 1, 3, 20)))
        result[start:end] = rng.choice((rng.choice(PIECES), rng.randbytes(end - start), result[start:end] * 3))
    return bytes(result)


def filter_memory_mib(bench: Bench) -> float:
    assert bench.stack.filter is not None
    status = Path(f"/proc/{bench.stack.filter.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def watch(bench: Bench, delays_s: list[float]) -> None:
    """Asks the filter's event loop for a sign of life again and again."""
    while True:
        started_s = time.perf_counter()
        async with bench.http.get(f"{bench.stack.admin_url}/healthz") as response:
            await response.read()
        delays_s.append(time.perf_counter() - started_s)
        await asyncio.sleep(0.005)


async def test_two_thousand_bodies_of_a_fuzzer(bench: Bench, record_property: Callable[[str, object], None]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    statuses: dict[int, int] = {}
    wrong: list[str] = []
    names = [*CODINGS, "identity", "what", "gzip,,br"]

    async def send(number: int) -> None:
        path, body = rng.choice(SEEDS)
        body = mutated(body, rng)
        headers = {}
        if rng.random() < 0.3:
            coding = rng.choice(names)
            packed = CODINGS.get(coding, bytes)(body)
            headers["content-encoding"] = coding
            body = mutated(packed, rng) if rng.random() < 0.5 else packed
        try:
            async with bench.http.post(
                bench.stack.url + path, data=body, headers=headers, timeout=aiohttp.ClientTimeout(total=30)
            ) as response:
                answer = await read(response)
        except (TimeoutError, aiohttp.ClientError) as error:
            wrong.append(f"{number}: {error!r} for {body[:200]!r}")
            return
        statuses[answer.status] = statuses.get(answer.status, 0) + 1
        if answer.status >= 500 and "x-engine-name" not in answer.headers:
            wrong.append(f"{number}: {answer.status} that no engine gave for {body[:200]!r}")

    # Warm, so that growth is growth.
    for number in range(100):
        await send(-number)
    await bench.settled()
    before_mib = filter_memory_mib(bench)
    numbers = iter(range(BODIES))
    delays_s: list[float] = []
    watching = asyncio.create_task(watch(bench, delays_s))

    async def client() -> None:
        for number in numbers:
            await send(number)

    await asyncio.gather(*(client() for _ in range(8)))
    watching.cancel()
    await bench.settled()
    grown_mib = filter_memory_mib(bench) - before_mib
    delays_s.sort()
    worst_ms = [round(delay_s * 1000, 1) for delay_s in (delays_s[len(delays_s) // 2], delays_s[-1])]
    record_property("fuzz", {"seed": seed, "statuses": statuses, "delays_ms": worst_ms, "grown_mib": grown_mib})
    print(f"seed {seed}: {statuses}, median and longest delay {worst_ms} ms, grown by {grown_mib:.1f} MiB")  # noqa: T201
    assert not wrong, (seed, wrong[:5])
    assert sum(statuses.values()) == BODIES + 100
    assert max(statuses) < 500
    assert statuses[200] > BODIES / 10
    assert statuses[400] > BODIES / 10
    assert await bench.metric("headway_bugs_total") == 0
    # The promise is 20 ms; half a dozen processes share two cores here.
    assert delays_s[-1] < 0.5, (seed, worst_ms)
    assert grown_mib < 64
