"""The simulated engine against the real one it stands in for: same requests, same answers in all that we read."""

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from enginesim.process import EngineProcess
from enginesim.words import text, vocabulary
from extproc.engine_pages import merged, read_vllm_metrics
from tests.engine.harness import MODEL, TOPIC, RealEngine, http_request
from tests.engine.mirror import CHAT, COMPLETIONS, Witness, replay
from tests.engine.test_tokens import CONVERSATIONS, HELLO, TOOLS

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(600)]

_SAMPLE = re.compile(r"^(vllm:\w+)(?:\{(.*)\})? \S+$")
_LABEL = re.compile(r'(\w+)="')
# What a real engine shows beside what the simulator does is its own affair; what we read must be in both.
_READ_BY_THE_PROBE = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:cache_config_info"}


@pytest.fixture(scope="module")
def simulated(engine: RealEngine) -> Iterator[EngineProcess]:
    """The real engine's twin."""
    flags = engine.settings.simulator_flags()
    with EngineProcess("--model", MODEL, "--kv-events-topic", TOPIC, *flags) as running:
        yield running


async def test_both_publish_the_same_events(engine: RealEngine, simulated: EngineProcess) -> None:
    ids = list(vocabulary().values())
    shared = ids[:320]
    requests: list[dict[str, Any]] = [
        {"prompt": ids[1000:1020], "max_tokens": 1},  # too short for a block
        {"prompt": [*shared, *ids[400:440]], "max_tokens": 1},
        {"prompt": [*shared, *ids[500:600]], "max_tokens": 1},  # shares ten blocks
        {"prompt": [*shared, *ids[500:600]], "max_tokens": 1},  # all cached
        {"prompt": shared, "max_tokens": 1},  # the last block is computed again
        {"prompt": ids[600:700] * 50, "max_tokens": 1},  # several chunks
        {"prompt": shared, "max_tokens": 1, "cache_salt": "tenant"},
        {"prompt": ids[700:760], "max_tokens": 70, "ignore_eos": True},  # blocks that decoding fills
        {"prompt": [*shared, *ids[800:900]], "max_tokens": 1, "prompt_logprobs": None},
    ]
    heard = []
    for side in (engine, simulated):
        url = side.url
        # Neither must know these prompts from another test.
        assert http_request(f"{url}/reset_prefix_cache", {})[0] == 200
        async with Witness(side.kv_events_endpoint) as witness:
            usages: list[dict[str, Any]] = []
            for request in requests:
                status, answer = http_request(f"{url}{COMPLETIONS}", {"model": MODEL, "temperature": 0, **request})
                assert status == 200, answer
                usages.append({key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")})
                usages[-1] |= _known(answer["usage"]["prompt_tokens_details"])
            heard.append((usages, _shapes(witness)))
    (real_usages, real_events), (sim_usages, sim_events) = heard
    assert sim_usages == real_usages
    assert sim_events == real_events


async def test_both_frame_their_messages_and_replays_alike(engine: RealEngine, simulated: EngineProcess) -> None:
    frames = []
    for side in (engine, simulated):
        async with Witness(side.kv_events_endpoint) as witness:
            prompt = text(100, seed=77)
            assert (
                http_request(f"{side.url}{COMPLETIONS}", {"model": MODEL, "prompt": prompt, "max_tokens": 1})[0] == 200
            )
            kept = await replay(side.kv_replay_endpoint)
        live = witness.frames[-1]
        assert kept[-1][-3:] == live, "a replay brings what was published, byte for byte"
        batch = msgspec.msgpack.decode(live[-1])
        frames.append((len(kept[-1]), kept[-1][0], live[0], len(live[1]), [type(part) for part in batch], batch[2]))
    assert frames[0] == frames[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_both_stream_in_the_same_order(
    engine: RealEngine, simulated: EngineProcess, path: str, include_usage: bool
) -> None:
    told = []
    for port in (engine.port, simulated.port):
        prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
        options = {"stream": True, "stream_options": {"include_usage": include_usage}, "max_tokens": 3}
        kind, lines = _stream(port, path, {"model": MODEL, "ignore_eos": True, **prompt, **options})
        told.append((kind, [_outline(line) for line in lines]))
    assert told[1] == told[0]


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("unknown model", CHAT, {"model": "other", "messages": [{"role": "user", "content": "Hi"}]}),
        ("no json", CHAT, b"{nope"),
        ("cut json", CHAT, b'{"model": "sim", "messages": ['),
        ("no object", CHAT, b"[1]"),
        ("no messages", CHAT, {"model": MODEL}),
        ("an empty conversation", CHAT, {"model": MODEL, "messages": []}),
        ("a number that is none", CHAT, {"model": MODEL, "messages": [], "max_tokens": "x"}),
        ("unknown token", COMPLETIONS, {"model": MODEL, "prompt": [999_999]}),
        ("empty text", COMPLETIONS, {"model": MODEL, "prompt": ""}),
        ("messages of the wrong type", CHAT, {"model": MODEL, "messages": "Hi"}),
        ("empty prompt", COMPLETIONS, {"model": MODEL, "prompt": []}),
        ("too long", COMPLETIONS, {"model": MODEL, "prompt": [9] * 40_000, "max_tokens": 1}),
        ("too long, streamed", COMPLETIONS, {"model": MODEL, "prompt": [9] * 40_000, "max_tokens": 1, "stream": True}),
        ("too much output", COMPLETIONS, {"model": MODEL, "prompt": "Hi", "max_tokens": 40_000}),
        ("negative output", COMPLETIONS, {"model": MODEL, "prompt": "Hi", "max_tokens": -1}),
        ("no output", CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}),
        (
            "usage of no stream",
            CHAT,
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Hi"}],
                "stream_options": {"include_usage": True},
            },
        ),
        ("empty salt", COMPLETIONS, {"model": MODEL, "prompt": "Hi", "cache_salt": ""}),
        ("no such path", "/v1/nothing", {}),
    ],
)
async def test_both_refuse_alike(
    engine: RealEngine, simulated: EngineProcess, name: str, path: str, body: object
) -> None:
    real, sim = (_refusal(*http_request(f"{side.url}{path}", body)) for side in (engine, simulated))
    assert sim == real, name


async def test_the_simulators_metrics_are_the_engines(engine: RealEngine, simulated: EngineProcess) -> None:
    pages = []
    for side in (engine, simulated):
        assert http_request(f"{side.url}{COMPLETIONS}", {"model": MODEL, "prompt": "Hi", "max_tokens": 1})[0] == 200
        pages.append(http_request(f"{side.url}/metrics")[1])
    real, sim = (_families(page) for page in pages)
    assert set(real) >= _READ_BY_THE_PROBE
    assert set(sim) >= _READ_BY_THE_PROBE
    for family, labels in sim.items():
        assert family in real, f"{family} is the simulator's invention"
        assert labels <= real[family], f"{family} has labels of the simulator's invention"
        assert labels == real[family] or family == "vllm:cache_config_info"
    states = [merged(read_vllm_metrics(page.encode()).values()) for page in pages]
    assert states[1] == states[0]
    assert states[0].num_gpu_blocks == engine.settings.num_gpu_blocks


async def test_both_tell_of_themselves_alike(engine: RealEngine, simulated: EngineProcess) -> None:
    for path in ("/v1/models", "/version", "/kv_event_sources", "/server_info?config_format=json"):
        real, sim = (http_request(f"{side.url}{path}") for side in (engine, simulated))
        assert sim[0] == real[0] == 200
        _subset(sim[1], real[1], path)


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_both_make_the_same_tokens_of_a_conversation(
    engine: RealEngine, simulated: EngineProcess, name: str
) -> None:
    body = {"model": MODEL, "messages": CONVERSATIONS[name]}
    real, sim = (http_request(f"{side.url}/tokenize", body)[1]["tokens"] for side in (engine, simulated))
    assert sim == real


@pytest.mark.parametrize("name", TOOLS)
async def test_both_write_tools_alike(engine: RealEngine, simulated: EngineProcess, name: str) -> None:
    body = {"model": MODEL, "messages": HELLO, "tools": TOOLS[name]}
    real, sim = (http_request(f"{side.url}/tokenize", body)[1]["tokens"] for side in (engine, simulated))
    assert sim == real


def _known(details: dict[str, Any]) -> dict[str, Any]:
    return {key: details[key] for key in ("cached_tokens", "created_cache_tokens") if details.get(key) is not None}


def _shapes(witness: Witness) -> list[list[dict[str, Any]]]:
    """Batches without what must differ: times, and hashes, which are named by their order of appearance."""
    names: dict[int, str] = {}

    def name(value: int | None) -> str | None:
        return None if value is None else names.setdefault(value, f"block {len(names)}")

    batches = []
    for _, events, rank in witness.batches:
        assert rank == 0
        shapes = []
        for event in events:
            shape = dict(event)
            if "block_hashes" in shape:
                shape["block_hashes"] = [name(value) for value in shape["block_hashes"]]
            if "parent_block_hash" in shape:
                shape["parent_block_hash"] = name(shape["parent_block_hash"])
            if "token_ids" in shape:
                # Generated tokens are each engine's own.
                generated = len(shape["token_ids"]) == shape["block_size"] and shape["parent_block_hash"] is not None
                shape["token_ids"] = len(shape["token_ids"]) if generated else shape["token_ids"]
            shapes.append(shape)
        batches.append(shapes)
    return batches


def _stream(port: int, path: str, body: dict[str, Any]) -> tuple[str | None, list[str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        return response.headers["content-type"], response.read().decode().split("\n")
    finally:
        connection.close()


def _outline(line: str) -> object:
    """What kind of line it is; of an event, what of it a client may rely on."""
    if not line.startswith("data: {"):
        return line
    event = json.loads(line[6:])
    choices = [
        {
            "index": choice["index"],
            "finish_reason": choice["finish_reason"],
            "role": choice.get("delta", {}).get("role"),
            "has": sorted(key for key in ("text", "delta") if key in choice),
            "delta": sorted(key for key, value in choice.get("delta", {}).items() if value is not None),
        }
        for choice in event["choices"]
    ]
    usage = event.get("usage")
    if usage is not None:
        usage = {key: value for key, value in usage.items() if value is not None}
        usage["prompt_tokens_details"] = sorted(_known(usage["prompt_tokens_details"]))
    return event["object"], event["model"], event["id"].split("-")[0], choices, usage


def _refusal(status: int, body: Any) -> tuple[object, ...]:
    """Status, kind and field; the words are each engine's own."""
    if not isinstance(body, dict) or "error" not in body:
        return status, sorted(body) if isinstance(body, dict) else body
    error = body["error"]
    return status, sorted(error), error["type"], error["param"], error["code"]


def _families(page: str) -> dict[str, frozenset[str]]:
    families = {}
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample:
            families[sample.group(1)] = frozenset(_LABEL.findall(sample.group(2) or ""))
    return families


def _subset(ours: Any, theirs: Any, place: str) -> None:
    """Every key that the simulator tells is told by the engine, with a value of the same kind."""
    if isinstance(ours, dict):
        assert isinstance(theirs, dict), place
        for key, value in ours.items():
            assert key in theirs, f"{place}.{key} is the simulator's invention"
            _subset(value, theirs[key], f"{place}.{key}")
    elif isinstance(ours, list):
        assert isinstance(theirs, list), place
        for mine, real in zip(ours, theirs, strict=True):
            _subset(mine, real, f"{place}[]")
    else:
        assert type(ours) is type(theirs), f"{place} is {ours!r} instead of {theirs!r}"
