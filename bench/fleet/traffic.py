"""What clients ask: the requests of a real trace over and over, each time with prompts of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from bench.fleet.plan import PoolPlan
from bench.goodput.traffic import open_trace
from predictor.prompt import Tokens

# The trace that comes with the tests; see the README beside it.
TRACE = Path(__file__).parents[2] / "tests" / "engine" / "trace_files" / "mooncake_conversation_head.jsonl.gz"
_TRACE_BLOCK = 512
_VOCABULARY = 100_000
_MIXER = np.uint64(0x9E3779B97F4A7C15)
_LONGEST_PROMPT = 300_000
_MAX_TOKENS = (1024, 2048, 4096)
_BOUNDED_EVERY, _GIVE_UP_SHARE, _PATIENCE_S = 3, 0.02, 20.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as a client sends it."""

    tokens: Tokens
    output_tokens: int  # after which the model ends by itself; nobody knows before
    max_tokens: int | None
    bound_s: float | None
    gives_up_after_s: float | None


@dataclass(frozen=True, slots=True)
class _Line:
    tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class Trace:
    """A pool's requests by number. Those of one round share prefixes as the trace's do; between rounds the prefix that
    all share is the only one."""

    def __init__(self, pool: PoolPlan, lines: Sequence[_Line], seed: int, number: int) -> None:
        self._pool = pool
        self._lines = lines
        self._seed, self._number = [seed, 2, number], number
        self._block_tokens = round(_TRACE_BLOCK * pool.prompt_scale)
        self._block = lru_cache(maxsize=256)(self._new_block)

    def ask(self, number: int) -> Ask:
        cycle, at = divmod(number, len(self._lines))
        line, pool = self._lines[at], self._pool
        rng = np.random.default_rng([*self._seed, number])
        length = max(16, min(_LONGEST_PROMPT, round(line.tokens * pool.prompt_scale)))
        blocks = line.blocks[: -(-length // self._block_tokens)]
        tokens = np.concatenate([self._block(cycle if name else 0, name) for name in blocks])[:length]
        output = max(1, round(line.output_tokens * pool.output_scale))
        told = int(rng.choice(_MAX_TOKENS)) if rng.random() < 0.5 else None
        return Ask(
            tokens=tokens,
            output_tokens=output,
            max_tokens=told,
            bound_s=pool.bound_s if number % _BOUNDED_EVERY == 0 else None,
            gives_up_after_s=float(rng.exponential(_PATIENCE_S)) if rng.random() < _GIVE_UP_SHARE else None,
        )

    def _new_block(self, cycle: int, name: int) -> Tokens:
        """Tokens that no other block has: their numbers, mixed."""
        first = (((self._number << 20) + cycle << 20) + name) * self._block_tokens
        mixed = (np.arange(first, first + self._block_tokens, dtype=np.uint64) * _MIXER) >> np.uint64(24)
        return (mixed % np.uint64(_VOCABULARY) + np.uint64(1)).astype(np.uint32)


def read_trace(path: Path) -> list[_Line]:
    """Lines of a Mooncake trace (github.com/kvcache-ai/Mooncake, FAST25-release/traces)."""
    lines = []
    with open_trace(path) as file:
        for text in file:
            told = json.loads(text)
            lines.append(_Line(told["input_length"], told["output_length"], tuple(told["hash_ids"])))
    return lines
