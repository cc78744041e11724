"""What we credit as cached is what a real engine reuses, token for token, through evictions, resets and restarts."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginesim.words import text, vocabulary
from tests.engine.harness import EngineSettings, RealEngine, StepCost
from tests.engine.mirror import CHAT, COMPLETIONS, Exchange, Mirror, Witness, held_blocks, replay

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(600)]

BLOCK = 32
# 160 blocks for tokens: three long prompts push each other out.
SMALL = EngineSettings(
    block_size=BLOCK,
    num_gpu_blocks=161,
    max_num_batched_tokens=512,
    max_model_len=4096,
    cost=StepCost(step_ms=2.0, prefill_us_per_token=5.0, prefill_ns_per_token2=0.0, decode_ms=0.1),
)


@pytest.fixture(scope="module")
def small_engine(log_folder: Path) -> Iterator[RealEngine]:
    """Tests share it in any order, so each begins by joining late."""
    with RealEngine(log_folder, SMALL) as running:
        yield running


async def test_every_request_alone_reuses_exactly_what_was_credited(small_engine: RealEngine) -> None:
    async with Witness(small_engine.kv_events_endpoint) as witness, Mirror(small_engine, SMALL) as mirror:
        exchanges = [await mirror.send_alone(path, **body) for path, body in _traffic(random.Random(7))]

        wrong = [str(exchange) for exchange in exchanges if not exchange.credited_rightly()]
        assert not wrong, "\n".join(wrong)
        # The traffic was worth the test: hits of many lengths, and blocks that had to go.
        assert len({exchange.cached_tokens for exchange in exchanges}) > 10
        assert witness.tags()["BlockRemoved"] > 3 * SMALL.num_gpu_blocks
        assert mirror.worker["feed_trusted"]


async def test_the_index_holds_just_the_blocks_that_the_engine_holds(small_engine: RealEngine) -> None:
    async with Mirror(small_engine, SMALL) as mirror:
        for path, body in _traffic(random.Random(11))[:25]:
            await mirror.send_alone(path, **body)

        frames = await replay(small_engine.kv_replay_endpoint)
        assert mirror.worker["cached_blocks"] == held_blocks([msgspec.msgpack.decode(f[-1]) for f in frames]) > 100
        assert not mirror.fleet.skipped_events()


async def test_a_salt_hides_a_prompt_from_other_salts(small_engine: RealEngine) -> None:
    prompt = text(300, seed=21)
    async with Mirror(small_engine, SMALL) as mirror:
        salts: list[dict[str, str]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}]
        exchanges = [await mirror.send_alone(COMPLETIONS, prompt=prompt, max_tokens=1, **salt) for salt in salts]
        assert [exchange.cached_tokens for exchange in exchanges] == [0, 0, 0, 288, 288]
        assert all(exchange.credited_rightly() for exchange in exchanges)


async def test_a_reset_empties_the_view_with_the_engines_next_step(small_engine: RealEngine) -> None:
    prompt = text(500, seed=31)
    async with Mirror(small_engine, SMALL) as mirror:
        await mirror.send_alone(COMPLETIONS, prompt=prompt, max_tokens=1)
        assert small_engine.request("/reset_prefix_cache", body={})[0] == 200
        await mirror.settled()
        # The engine says so with its next step only.
        assert mirror.worker["cached_blocks"] > 0
        await mirror.send_alone(COMPLETIONS, prompt=text(5, seed=32), max_tokens=1)
        assert mirror.worker["cached_blocks"] == 0

        for cached in (0, 480):
            exchange = await mirror.send_alone(COMPLETIONS, prompt=prompt, max_tokens=1)
            assert (exchange.cached_tokens, exchange.forecast.cached_tokens) == (cached, cached)


async def test_who_joins_late_learns_by_replay_what_is_cached(small_engine: RealEngine) -> None:
    prompt = text(700, seed=41)
    async with Mirror(small_engine, SMALL) as early:
        await early.send_alone(COMPLETIONS, prompt=prompt, max_tokens=40)
        blocks = early.worker["cached_blocks"]
    async with Mirror(small_engine, SMALL) as late:
        assert late.worker["feed_trusted"]
        assert late.worker["cached_blocks"] == blocks
        exchange = await late.send_alone(COMPLETIONS, prompt=prompt, max_tokens=1)
        assert exchange.cached_tokens == 672
        assert exchange.credited_rightly()


async def test_an_engine_that_comes_back_is_known_to_be_empty(small_engine: RealEngine) -> None:
    prompt = text(600, seed=51)
    async with Mirror(small_engine, SMALL) as mirror:
        await _some_batches(mirror)
        await mirror.send_alone(COMPLETIONS, prompt=prompt, max_tokens=1)
        small_engine.restart()

        # Nothing says that it is another process, until that one has something to say.
        await mirror.send_alone(COMPLETIONS, prompt=text(100, seed=52), max_tokens=1)
        assert mirror.count("kv_feed_faults", kind="restart") == 1
        exchanges = [await mirror.send_alone(COMPLETIONS, prompt=prompt, max_tokens=1) for _ in range(2)]
        assert [exchange.cached_tokens for exchange in exchanges] == [0, 576]
        assert all(exchange.credited_rightly() for exchange in exchanges), _table(exchanges)
        assert mirror.worker["feed_trusted"]


async def _some_batches(mirror: Mirror) -> None:
    for seed in range(3):
        await mirror.send_alone(COMPLETIONS, prompt=text(64, seed=seed), max_tokens=1)


def _traffic(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Prompts of every kind of length: fresh, repeated, sharing a beginning, cut at and beside the ends of blocks."""
    system = text(10 * BLOCK, seed=rng.randrange(1000))
    document = text(1400, seed=rng.randrange(1000))
    ids = tuple(vocabulary().values())
    requests: list[tuple[str, dict[str, Any]]] = []

    def chat(*turns: str) -> None:
        roles = ("user", "assistant")
        turn_messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        messages = [{"role": "system", "content": system}, *turn_messages]
        requests.append((CHAT, {"messages": messages, "max_tokens": rng.choice((1, 5, 40))}))

    def complete(prompt: str | list[int]) -> None:
        requests.append((COMPLETIONS, {"prompt": prompt, "max_tokens": rng.choice((1, 3, 70))}))

    for _ in range(6):
        question = text(rng.randrange(3, 200), seed=rng.randrange(1000))
        chat(question)
        chat(question, text(50, seed=rng.randrange(1000)), text(20, seed=rng.randrange(1000)))
        # Ends at, before and after the end of a block; the second time wholly cached.
        exact = rng.choices(ids, k=rng.randrange(1, 30) * BLOCK)
        complete(exact)
        complete(exact)
        complete(exact[:-1])
        complete([*exact, exact[0]])
        complete(document + text(rng.randrange(0, 900), seed=rng.randrange(1000)))
        complete(text(rng.randrange(900, 3900), seed=rng.randrange(1000)))
        complete(rng.choices(ids, k=rng.randrange(1, BLOCK)))
    return requests


def _table(exchanges: list[Exchange]) -> str:
    return "\n".join(map(str, exchanges))
