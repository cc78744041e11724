"""Engines in virtual time, run as processes of their own environments, and what an outside observer makes of them.

The observer is the product's own decoder, block hashes, cache index and reuse rule. It is told what the outside can
know, in the order in which it can know it, and is judged by what the engine then reuses.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np

from predictor.cache_index import CacheIndex, TierCaps
from predictor.engines.reuse import ReuseRule
from predictor.kv_events import Stored, Tier, decode_batch
from predictor.last_use import LastUse
from predictor.prefixes_ahead import PrefixesAhead
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Namespace, as_tokens
from tests.engine.harness import HERE, EngineFault, engine_home, sglang_home
from tests.engine.workload import Shape

WORKER = "engine"
_WRONG_KEPT = 20


@dataclass(frozen=True, slots=True)
class VirtualVllm:
    """vLLM's scheduler and cache manager, named as its flags. `groups` are "full", "window:TOKENS" or "mamba"."""

    shape: Shape
    block_size: int = 16
    num_blocks: int = 600
    max_model_len: int = 8192
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    eagle: bool = False
    groups: tuple[str, ...] = ("full",)
    cpu_blocks: int = 0  # of vLLM's own offloading connector; 0: none
    self_describing: bool = True  # whether it tells what is in the blocks that it offloads

    def records(self) -> Iterator[list[Any]]:
        home = engine_home()
        options = {**asdict(self), "model": str(home / "model")}
        command = [str(home / "venv" / "bin" / "python"), "-W", "ignore", str(HERE / "vllm-side" / "cache_trace.py")]
        # The same from run to run: the offloading connector walks through sets.
        environment = {"PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        return _records([*command, json.dumps(options)], environment)


@dataclass(frozen=True, slots=True)
class VirtualSglang:
    """SGLang's radix cache and allocators, named as its flags."""

    shape: Shape
    page_size: int = 1
    max_total_num_tokens: int = 9600
    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    decode_log_interval: int = 1  # decode steps between two batches of events; SGLang's default is 40
    eagle: bool = False
    host_ratio: float = 0.0  # of its hierarchical cache: the host's size in sizes of the device; 0: none
    write_policy: str = "write_through"  # when something is copied to the host

    def records(self) -> Iterator[list[Any]]:
        home = sglang_home()
        side = HERE / "sglang-side"
        command = [str(home / "venv" / "bin" / "python"), "-W", "ignore", str(side / "cache_trace.py")]
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return _records([*command, json.dumps(asdict(self))], environment)


@dataclass(frozen=True, slots=True)
class InProcessLmcache:
    """LMCache's own cache engine with chunks in host memory, asked and told prompt by prompt."""

    chunk_tokens: int = 256
    host_gib: float = 0.25
    conversations: int = 40
    turns: int = 8
    seed: int = 20261130

    def records(self) -> Iterator[list[Any]]:
        return _lmcache_records("lmcache_trace.py", asdict(self))


@dataclass(frozen=True, slots=True)
class LmcacheServer:
    """The event log of LMCache's multiprocess server, and its way to vLLM's stream; a memory of so many chunks."""

    chunk_tokens: int = 256
    chunks: int = 100
    restarts_every: int = 97  # prompts
    conversations: int = 40
    turns: int = 8
    seed: int = 20261130

    def records(self) -> Iterator[list[Any]]:
        return _lmcache_records("lmcache_server_trace.py", asdict(self))


def _lmcache_records(script: str, options: dict[str, Any]) -> Iterator[list[Any]]:
    home = engine_home()
    command = [str(home / "venv" / "bin" / "python"), "-W", "ignore", str(HERE / "vllm-side" / script)]
    environment = {
        "PYTHONPATH": str(home / "lmcache"), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1",
        "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    return _records([*command, json.dumps(options)], environment)


def _records(command: list[str], environment: dict[str, str]) -> Iterator[list[Any]]:
    """What a process tells. EngineFault with the end of its standard error if it ends otherwise than by saying so."""
    decoder = msgspec.msgpack.Decoder(list[Any])
    done = False
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            while head := process.stdout.read(4):
                record = decoder.decode(process.stdout.read(struct.unpack("<I", head)[0]))
                done = record[0] == "done"
                yield record
            if not done:
                raise EngineFault(process.stderr.read().decode(errors="replace")[-3000:])
        finally:
            process.kill()


@dataclass(slots=True)
class _Asked:
    tokens: int
    hashes: BlockHashes
    reads_cache: bool
    to_prefill: int = 0  # tokens, by what it was credited with


@dataclass(slots=True)
class Verdict:
    """What came of a trace. Counts of requests."""

    asked: int = 0
    admitted: int = 0
    right: int = 0
    over: int = 0
    under: int = 0
    taken_in_the_step: int = 0
    right_at_arrival: int = 0  # by what it is credited with when it comes
    over_at_arrival: int = 0  # by more than one block
    right_as_it_stood: int = 0  # by what was cached when it came, and what those ahead were to compute
    over_as_it_stood: int = 0
    resumed: int = 0
    loaded: int = 0  # from the host
    batches: int = 0
    holds_checked: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def right_share(self) -> float:
        return self.right / self.admitted

    def __str__(self) -> str:
        reused = self.cached_tokens / max(1, self.prompt_tokens)
        return (
            f"{self.admitted} requests, {self.right} right at admission ({self.right_share:.3%}), {self.over} over "
            f"({self.taken_in_the_step} of them taken in the very step), {self.under} under; "
            f"{self.right_at_arrival / max(1, self.admitted):.2%} right at arrival "
            f"({self.over_at_arrival / max(1, self.admitted):.2%} over by more than a block), "
            f"{self.right_as_it_stood / max(1, self.admitted):.2%} by what was cached then "
            f"({self.over_as_it_stood / max(1, self.admitted):.2%}); {reused:.0%} reused, "
            f"{self.loaded} loaded, {self.batches} batches, {self.holds_checked} comparisons of contents, "
            f"{self.counts}, skipped {dict(self.skipped)}\n" + "\n".join(self.wrong)
        )


class Observer:
    """Follows one engine."""

    def __init__(self, family: HashFamily, capacity: TierCaps, rule: ReuseRule) -> None:
        self.family, self.rule = family, rule
        self.block_size = family.block_size
        self.hasher = BlockHasher(np.random.default_rng(1))
        self.index = CacheIndex(self.hasher, family)
        self.last_use = LastUse()
        self.index.add(WORKER, capacity, on_removed=self.last_use.evicted)
        self.ahead = PrefixesAhead()
        self.booked = PrefixesAhead()  # and those that wait
        self.verdict = Verdict()
        self._asked: dict[str, _Asked] = {}
        self._at_arrival: dict[str, tuple[int, int]] = {}  # as it stood, and what would be left of it
        self._at_lookup: dict[str, int] = {}

    def follow(self, records: Iterator[list[Any]]) -> Verdict:
        for kind, *fields in records:
            match kind:
                case "asked":
                    self._came(*fields)
                case "looked_up":
                    self._looked_up(*fields)
                case "loaded":
                    self.verdict.loaded += 1
                case "admitted":
                    self._admitted(*fields)
                case "first":
                    self._asked[fields[0]].to_prefill = 0
                case "resumed":
                    self.verdict.resumed += 1
                case "batch":
                    self._batch(*fields)
                case "ended":
                    self._ended(*fields)
                case "holds":
                    self._holds(*fields)
                case "holds_tokens":
                    self._holds(range(fields[0] // self.block_size))
                    for on_host in fields[1:]:
                        assert self.index.blocks(WORKER, Tier.HOST) == on_host // self.block_size
                case "done":
                    self._done(*fields)
        return self.verdict

    def credit(self, asked: _Asked, tokens: int) -> int:
        if not asked.reads_cache:
            return 0
        run = self.index.match(asked.hashes)[WORKER].blocks
        run_tokens = self.ahead.run(asked.hashes, run) * self.block_size
        return self.rule.reusable_tokens(run_tokens, self.block_size, tokens)

    def _came(self, name: str, raw: bytes, salt: str | None, adapter: str | None, reads_cache: bool) -> None:
        tokens = as_tokens(np.frombuffer(raw, np.uint32))
        hashes = self.hasher.prompt_hashes(tokens, self.family, Namespace(adapter, salt))
        asked = self._asked[name] = _Asked(len(tokens), hashes, reads_cache)
        self._at_arrival[name] = self._credit_at_arrival(asked)
        asked.to_prefill = len(tokens) - self._at_arrival[name][1]
        self.booked.add(name, hashes)
        self.verdict.asked += 1

    def _credit_at_arrival(self, asked: _Asked) -> tuple[int, int]:
        """As `PoolCache` does it."""
        if not asked.reads_cache:
            return 0, 0
        run = self.index.match(asked.hashes)[WORKER].blocks
        if self.rule.shares_in_flight:
            run = self.booked.run(asked.hashes, run)
        ahead = sum(one.to_prefill for one in self._asked.values() if one is not asked)
        left = self.last_use.left_of(asked.hashes, run, ahead // self.block_size)
        if left < run:
            left = min(run, self.booked.run(asked.hashes, left))
        stood, foreseen = [
            self.rule.reusable_tokens(blocks * self.block_size, self.block_size, asked.tokens) for blocks in (run, left)
        ]
        return stood, foreseen

    def _looked_up(self, name: str) -> None:
        """What is to be loaded from another tier is settled before it is loaded, and so before the admission."""
        asked = self._asked[name]
        self._at_lookup[name] = self.credit(asked, asked.tokens)
        self.verdict.loaded += 1

    def _admitted(self, name: str, cached: int, tokens: int, before: int) -> None:
        verdict, asked = self.verdict, self._asked[name]
        known = self._at_lookup.pop(name, None)
        credited = self.credit(asked, tokens) if known is None else known
        # From here on its own blocks are there for those behind it, computed or not.
        if self.rule.shares_in_flight:
            self.ahead.add(name, asked.hashes)
        verdict.admitted += 1
        verdict.prompt_tokens += tokens
        verdict.cached_tokens += cached
        verdict.right += credited == cached
        verdict.over += credited > cached
        verdict.under += credited < cached
        # Right when the step began, and taken in its course by those who were served first.
        taken = cached < credited == before
        verdict.taken_in_the_step += taken
        stood, foreseen = self._at_arrival.pop(name)
        verdict.right_as_it_stood += stood == cached
        verdict.over_as_it_stood += stood > cached + self.block_size
        verdict.right_at_arrival += foreseen == cached
        verdict.over_at_arrival += foreseen > cached + self.block_size
        if credited != cached and not taken and len(verdict.wrong) < _WRONG_KEPT:
            verdict.wrong.append(f"{name}: {credited} credited, {cached} cached of {tokens}, {before} before the step")

    def _batch(self, payload: bytes) -> None:
        batch = decode_batch(payload)
        for event in batch.events:
            self.index.apply(WORKER, event)
            if isinstance(event, Stored) and event.tier is Tier.DEVICE:
                self.last_use.stored(len(event.hashes))
        self.verdict.skipped.update(batch.skipped)
        self.verdict.batches += 1

    def _ended(self, name: str) -> None:
        self.ahead.remove(name)
        self.booked.remove(name)
        self.last_use.used(self._asked.pop(name).hashes)

    def _holds(self, hashes: Sequence[int]) -> None:
        """The engine's own table: the view must be its equal at the end of a step."""
        assert self.index.blocks(WORKER) == len(hashes), (self.index.blocks(WORKER), len(hashes))
        self.verdict.holds_checked += 1

    def _done(self, counts: dict[str, int]) -> None:
        self.verdict.counts = counts
        self.verdict.skipped.update(self.index.skipped)
