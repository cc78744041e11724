"""What a request that waits was to find cached, and will not, since the last who held it has gone."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.kv_events import Batch, Stored, Tier
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens

# One worker of 1,000 blocks, which one long prompt fills

BLOCK, BLOCKS = 16, 1001


class World:
    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.hasher = BlockHasher(rng)
        self.fleet = Fleet([PoolPolicy("m")], self.hasher, rng)
        settings = Settings(block_size=BLOCK, num_gpu_blocks=BLOCKS, max_num_batched_tokens=2048)
        self.fleet.join("m", WorkerSpec("w", "10.0.0.1:80", settings))
        self.fleet.know_cost("w", StepCost(0.0, 0.0, 0.005, 50e-6, 0.0, 50e-6))
        self.now_s, self.seq = 0.0, 0

    def prompt(self, tokens: list[int]) -> Prompt:
        family = HashFamily(BLOCK)
        hashes = self.hasher.prompt_hashes(as_tokens(tuple(tokens)), family, Namespace())
        return Prompt(len(tokens), True, {family: hashes})

    def place(self, name: str, tokens: list[int], max_tokens: int | None = None) -> Grant:
        wish = Wish(name, self.now_s, max_tokens=max_tokens)
        grant = self.fleet.place("m", self.prompt(tokens), wish, self.now_s)
        assert isinstance(grant, Grant)
        return grant

    def stored(self, tokens: list[int], cached_blocks: int = 0) -> None:
        """What an engine computes of a prompt that it found cached so far."""
        count = len(tokens) // BLOCK
        names = [tokens[end * BLOCK] for end in range(count)]
        parent = names[cached_blocks - 1] if cached_blocks else None
        computed = as_tokens(tuple(tokens[cached_blocks * BLOCK : count * BLOCK]))
        event = Stored(tuple(names[cached_blocks:]), parent, computed, BLOCK, Tier.DEVICE, None, None)
        self.fleet.apply("w", Batch(self.now_s, (event,), None), self.now_s)


def numbered(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("another", [False, True])
def test_who_waits_for_a_history_computes_it_after_all_when_the_last_who_held_it_has_gone(another: bool) -> None:
    world = World()
    history = numbered(0, 3200)
    for name in ("holder", *(["another"] if another else [])):
        world.place(name, history, max_tokens=2000)
        world.now_s += 0.2
        # The last block is computed again: of it comes the first token.
        world.stored(history, cached_blocks=199 if name == "another" else 0)
        world.fleet.first_token(name, None, world.now_s)
    for number in range(2):
        world.place(f"ahead {number}", numbered(100_000 * (number + 1), 9600))
    assert world.place("waits", [*history, *numbered(900_000, 160)]).ticket.forecast.cached_tokens == 3200
    before = world.place("then", numbered(800_000, 160)).ticket.forecast.tokens_ahead
    world.fleet.finish("holder", Usage(), world.now_s)
    after = world.place("later", numbered(700_000, 160)).ticket.forecast.tokens_ahead
    assert after - before - 160 == (0 if another else 3200)
