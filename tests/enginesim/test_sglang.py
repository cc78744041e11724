"""The SGLang personality: its scheduling rule in virtual time, and its protocol over real sockets."""

import json
import time
import urllib.request
from typing import Any

import msgspec
import pytest
import zmq

from enginesim.kv_events import AllBlocksCleared, PagesRemoved, PagesStored
from enginesim.process import EngineProcess
from enginesim.radix_tree import RadixTree
from enginesim.request import Request
from enginesim.settings import CostSettings, SglangSettings
from enginesim.sglang_scheduler import SglangScheduler
from enginesim.step_time import StepTime
from enginesim.virtual_engine import Step, VirtualEngine, first_tokens_s

COST = CostSettings(step_ms=1.0, prefill_us_per_token=10.0, prefill_ns_per_token2=0.0, decode_ms=0.0)


def engine_of(**settings: Any) -> VirtualEngine:
    defaults = {"block_size": 4, "num_gpu_blocks": 251, "max_num_batched_tokens": 100, "decode_log_interval": 1}
    return VirtualEngine(SglangScheduler(SglangSettings(**{**defaults, **settings}), lambda request: 7), StepTime(COST))


def request(number: int, tokens: list[int], output: int = 1, engine: VirtualEngine | None = None) -> Request:
    size = engine.scheduler.settings.block_size if engine else 4
    made = Request(number, list(tokens), output, size)
    made.lookahead = engine.scheduler.lookahead if engine else 0
    made.hash_more()
    return made


def tree_of(engine: VirtualEngine) -> RadixTree:
    tree: object = engine.scheduler.pool
    assert isinstance(tree, RadixTree)
    return tree


def stored(steps: list[Step]) -> list[PagesStored]:
    return [event for step in steps for event in step.events if isinstance(event, PagesStored)]


def test_the_first_thing_said_is_that_everything_is_cleared() -> None:
    engine = engine_of()
    assert engine.scheduler.idle_events() == [AllBlocksCleared()]
    assert engine.scheduler.idle_events() == []


def test_decoding_stands_still_while_prompts_are_prefilled() -> None:
    engine = engine_of()
    steps = engine.run([(0.0, request(1, list(range(8)), output=10)), (0.0015, request(2, list(range(100, 350))))])
    kinds = ["decode" if step.batch.chunks[0].is_decode else "prefill" for step in steps[:6]]
    assert kinds == ["prefill", "decode", "prefill", "prefill", "prefill", "decode"]


def test_a_small_prompt_behind_a_giant_shares_its_last_chunk() -> None:
    engine = engine_of()
    steps = engine.run([(0.0, request(1, list(range(250)))), (0.0001, request(2, list(range(1000, 1010))))])
    firsts = first_tokens_s(steps)
    assert firsts[1] == firsts[2]
    assert [[chunk.tokens for chunk in step.batch.chunks] for step in steps] == [[100], [100], [50, 10]]


def test_of_what_is_left_of_a_chunk_only_whole_pages_are_taken() -> None:
    engine = engine_of()
    steps = engine.run([(0.0, request(1, list(range(90)))), (0.0, request(2, list(range(1000, 1200))))])
    # 90 tokens are 92 in pages of 4.
    assert [chunk.tokens for chunk in steps[0].batch.chunks] == [90, 8]


def test_equal_prompts_of_one_batch_share_nothing_and_later_ones_all_but_the_last_page() -> None:
    engine = engine_of()
    twins = [request(number, list(range(40))) for number in (1, 2)]
    engine.run([(0.0, twin) for twin in twins])
    later = request(3, list(range(40)))
    steps = engine.run([(engine.now_s, later)])
    assert [one.cached_tokens for one in (*twins, later)] == [0, 0, 36]
    assert stored(steps) == []
    assert engine.scheduler.pool.cached_blocks == 10


def test_with_pairs_for_keys_a_page_reaches_one_token_further() -> None:
    engine = engine_of(eagle=True)
    first = request(1, list(range(41)), engine=engine)
    steps = engine.run([(0.0, first)])
    (event,) = stored(steps)
    assert event.token_ids[:2] == [[0, 1], [1, 2]]
    assert len(event.token_ids) == 40 == 4 * len(event.block_hashes)
    again = [request(2, list(range(41)), engine=engine), request(3, list(range(42)), engine=engine)]
    for one in again:
        engine.run([(engine.now_s, one)])
    assert [one.cached_tokens for one in again] == [36, 40]


def test_a_request_waits_while_the_room_that_others_reserve_is_too_little() -> None:
    engine = engine_of()  # 1000 tokens
    long, other = request(1, list(range(100)), output=800), request(2, list(range(1000, 1350)), output=10)
    steps = engine.run([(0.0, long), (0.002, other)])
    firsts = first_tokens_s(steps)
    assert firsts[2] > 0.03
    # Turned away once, it is not tried again before somebody has left, however little is reserved by then.
    ends = {output.request.id: step.end_s for step in steps for output in step.outputs if output.finish_reason}
    assert ends[1] < firsts[2] < ends[1] + 0.02


def test_whole_leaves_go_first_and_are_told_in_one_event() -> None:
    engine = engine_of(num_gpu_blocks=31)  # 120 tokens
    removed: list[PagesRemoved] = []
    for number in range(4):
        steps = engine.run([(engine.now_s, request(number, list(range(100 * number, 100 * number + 40))))])
        removed += [event for step in steps for event in step.events if isinstance(event, PagesRemoved)]
    assert tree_of(engine).cached_blocks * 4 + tree_of(engine).free_tokens == 120
    assert removed
    # Of the three prompts that fit, the last one's pages are still there, and the first one's went as a whole.
    assert len(removed[0].block_hashes) == 10
    assert tree_of(engine).used_blocks == 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_at_the_end_the_events_tell_what_the_tree_holds(page_size: int) -> None:
    chunk = 100 // page_size * page_size
    engine = engine_of(
        block_size=page_size, num_gpu_blocks=800 // page_size + 1, max_num_batched_tokens=chunk, decode_log_interval=7
    )
    arrivals = []
    for number in range(60):
        tokens = [*range(number % 3 * 50, number % 3 * 50 + 60), *range(1000 * number, 1000 * number + number * 5)]
        arrivals.append((0.003 * number, request(number, tokens, output=1 + number % 20, engine=engine)))
    held: set[int] = set()
    for step in engine.run(arrivals):
        for event in step.events:
            match event:
                case PagesStored():
                    assert not held & set(event.block_hashes)
                    held |= set(event.block_hashes)
                case PagesRemoved():
                    assert held >= set(event.block_hashes)
                    held -= set(event.block_hashes)
    assert held == tree_of(engine).page_hashes()
    assert engine.scheduler.pool.used_blocks == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"decode_log_interval": 0}, "decode_log_interval must be at least 1"),
        ({"schedule_conservativeness": 0.0}, "schedule_conservativeness must be above 0"),
        ({"block_size": 64, "max_num_batched_tokens": 32}, "chunked_prefill_size must be whole pages of 64, not 32"),
        ({"block_size": 16, "max_num_batched_tokens": 100}, "chunked_prefill_size must be whole pages of 16, not 100"),
    ],
)
def test_settings_that_make_no_engine_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SglangSettings(**settings)


FLAGS = ("--family", "sglang", "--page-size", "16", "--max-total-tokens", "8192", "--decode-log-interval", "1",
         "--step-ms", "1", "--prefill-us-per-token", "1", "--decode-ms", "0.1")  # fmt: skip


def test_over_http_and_zmq_it_speaks_as_sglang_does() -> None:
    with EngineProcess(*FLAGS) as engine, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        info = _json(engine.url + "/server_info")
        assert info["kv_events"]["block_size"] == 16
        assert info["kv_events"]["endpoint_port_base"] == int(engine.kv_events_endpoint.rpartition(":")[2])
        assert (info["page_size"], info["chunked_prefill_size"], info["max_total_num_tokens"]) == (16, 8192, 8192)
        body = {"model": "sim", "prompt": list(range(100, 150)), "max_tokens": 4, "cache_salt": "a"}
        for cached in (0, 48):
            usage = _json(engine.url + "/v1/completions", body)["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        load = _json(engine.url + "/v1/loads")["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_total_num_tokens"]) == (0, 0, 8192)
        _json(engine.url + "/flush_cache", {}, plain=True)

        dealer.connect(engine.kv_replay_endpoint)
        events: list[dict[str, Any]] = []
        deadline_s = time.monotonic() + 10
        while len([event for event in events if event["type"] == "AllBlocksCleared"]) < 2:
            assert time.monotonic() < deadline_s, events
            events = _replayed(dealer)
        assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored", "AllBlocksCleared"]
        told = events[1]
        assert told["token_ids"] == list(range(100, 148))
        assert told["cache_salt"] == "a"
        assert "extra_keys" not in told
        assert all(-(1 << 63) <= page < 1 << 63 for page in told["block_hashes"])


def test_its_load_is_pushed_with_every_prefill_and_once_a_second_at_least() -> None:
    flags = (*FLAGS, "--load-publish-port", "0")
    with EngineProcess(*flags) as engine, zmq.Context() as context, context.socket(zmq.SUB) as socket:
        told = _json(engine.url + "/server_info")["kv_events"]
        assert told["load_topic"] == "load"
        socket.subscribe(b"load")
        socket.connect(f"tcp://127.0.0.1:{told['load_endpoint_port_base']}")
        first, stat = _load(socket)
        assert stat == ["LoadStat", 0, 0, 0, 8192, 0, 0, 0, 2048, 0, 0]
        body = {"model": "sim", "prompt": list(range(100, 150)), "max_tokens": 40}
        _json(engine.url + "/v1/completions", body)
        busy = [_load(socket) for _ in range(3)]
        assert [sequence for sequence, _ in busy] == [first + 1, first + 2, first + 3]
        # After its prefill, and after fifteen and thirty steps of its decoding, if no second was over in between.
        assert all(stat[1:3] == [1, 0] and stat[9] == 50 and stat[10] > 0 for _, stat in busy[:2]), busy
        while (stat := _load(socket)[1])[1] != 0:
            pass
        page = _json(engine.url + "/v1/loads")["loads"][0]
        assert (page["total_prefill_uncached_tokens"], page["num_used_tokens"]) == (stat[9], stat[3]) == (50, 0)


@pytest.mark.parametrize(
    "flags",
    [
        ("--family", "sglang", "--page-size", "64", "--chunked-prefill-size", "32"),
        ("--family", "vllm", "--load-publish-port", "0"),
    ],
)
def test_flags_that_do_not_go_together_end_it_with_a_word(flags: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError, match="status 1"):
        EngineProcess(*flags)


def _load(socket: zmq.Socket[bytes]) -> tuple[int, list[Any]]:
    assert socket.poll(5000), "nothing is pushed"
    topic, sequence, payload = socket.recv_multipart()
    assert topic == b"load"
    return int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)


def _replayed(dealer: zmq.Socket[bytes]) -> list[dict[str, Any]]:
    dealer.send_multipart([b"", bytes(8)])
    events: list[dict[str, Any]] = []
    while True:
        assert dealer.poll(5000), "no answer to a replay"
        frames = dealer.recv_multipart()
        if frames[-2] == b"\xff" * 8:
            return events
        events += msgspec.msgpack.decode(frames[-1])[1]


def _json(url: str, body: object = None, plain: bool = False) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        raw = response.read()
    return raw if plain else json.loads(raw)
