"""A recording run again: the predictor sees what it would have seen, and is graded by what really came.

It predicts for the worker that was really chosen. Nothing is drawn by chance that is not seeded: the same recording
gives the same report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np

from predictor.accuracy import Outcome
from predictor.clairvoyance import Coming, Costs, Seer
from predictor.engines.vllm import Drafting, Settings
from predictor.feed_state import Trust
from predictor.fleet import Fleet, PoolPolicy, Ticket, Usage, Wish, WorkerSpec
from predictor.kv_events import Arrival, FeedCursor
from predictor.prefill_cost import LearningPolicy
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Namespace, Prompt
from predictor.recording import (
    BadRecording,
    DraftingRecord,
    EndRecord,
    FirstTokenRecord,
    Header,
    KvRecord,
    Record,
    RefusedRecord,
    RequestRecord,
    WorkerRecord,
    batch_of,
    decode_hashes,
    decode_tokens,
    stand_in_tokens,
)

_SETTINGS = {one.name: one for one in fields(Settings)}
_AT_LEAST_ONE = frozenset({"block_size", "num_gpu_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len"})
_ANY_NUMBER = frozenset({"default_priority_value", "priority_scheduling_preemption_threshold"})
_MOST = 1e12
_LEARNING = {one.name: one for one in fields(LearningPolicy)}


class BadOverride(ValueError):
    """A `--what-if` that cannot be; the message names it and says what is allowed."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Settings other than those recorded: of every worker, of some by name, and how the pools learn."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    of_worker: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    learning: LearningPolicy = field(default_factory=LearningPolicy)
    default_output_tokens: int = 256


def read_what_if(overrides: Iterable[str]) -> WhatIf:
    """`KEY=VALUE` for engine settings, `WORKER:KEY=VALUE` for those of one worker, `learning.KEY=VALUE`, or
    `default_output_tokens=VALUE`. Values are JSON. Raises BadOverride."""
    settings: dict[str, Any] = {}
    of_worker: dict[str, dict[str, Any]] = {}
    learning: dict[str, Any] = {}
    outputs: Any = PoolPolicy("").default_output_tokens
    for override in overrides:
        name, separator, text = override.partition("=")
        try:
            value = msgspec.json.decode(text.encode())
        except msgspec.DecodeError:
            value = text
        worker, colon, key = name.rpartition(":")
        if not separator or not key:
            raise BadOverride(f"{override!r}: expected KEY=VALUE")
        if colon:
            _known(override, key, _SETTINGS)
            of_worker.setdefault(worker, {})[key] = value
        elif key.startswith("learning."):
            _known(override, key.removeprefix("learning."), _LEARNING)
            learning[key.removeprefix("learning.")] = value
        elif key == "default_output_tokens":
            outputs = value
        else:
            _known(override, key, _SETTINGS)
            settings[key] = value
    try:
        for values in (settings, *of_worker.values()):
            msgspec.convert(values, Settings)
            _check_ranges(values)
        policy = msgspec.convert(learning, LearningPolicy)
        outputs = msgspec.convert(outputs, int)
    except msgspec.ValidationError as fault:
        raise BadOverride(f"--what-if: {fault}") from fault
    return WhatIf(settings, of_worker, policy, outputs)


def _check_ranges(values: Mapping[str, Any]) -> None:
    """Raises BadOverride for what no engine can run with."""
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        least = 1 if key in _AT_LEAST_ONE else 0
        if not least <= value <= _MOST and key not in _ANY_NUMBER:
            raise BadOverride(f"--what-if: {key}={value}: expected a number from {least} to {_MOST:g}")


def _known(override: str, key: str, known: Mapping[str, object]) -> None:
    if key not in known:
        raise BadOverride(f"{override!r}: unknown key {key!r}; known are {', '.join(sorted(known))}")


@dataclass(slots=True)
class _Worker:
    record: WorkerRecord
    endpoint: str
    settings: Settings
    feed: FeedCursor = field(default_factory=FeedCursor)


@dataclass(slots=True)
class _Asked:
    """A request that was predicted, until it has ended."""

    ticket: Ticket
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Foresight:
    """True costs, and what each worker will be sent."""

    costs: Costs
    coming: Mapping[str, Sequence[Coming]]


def foresee(
    records: Iterable[Record], costs: Costs, rng: np.random.Generator, what_if: WhatIf | None = None
) -> Foresight:
    """Reads a whole recording ahead of its backtest; of its prompts only the lengths and block hashes are kept."""
    overrides = what_if or WhatIf()
    hasher = BlockHasher(rng)
    sizes: dict[str, int] = {}
    asked: dict[str, tuple[str, Coming]] = {}
    ends: dict[str, EndRecord] = {}
    for record in records:
        if isinstance(record, WorkerRecord):
            told = {**record.settings, **overrides.settings, **overrides.of_worker.get(record.worker, {})}
            size = told.get("block_size")
            sizes[record.worker] = size if isinstance(size, int) and size > 0 else Settings().block_size
        elif isinstance(record, RequestRecord):
            hashes = _hashes(record, hasher, sizes.get(record.worker, Settings().block_size))
            asked[record.id] = (
                record.worker,
                Coming(record.id, record.t, _length(record), 0, _NO_END, record.priority, hashes),
            )
        elif isinstance(record, EndRecord):
            ends[record.id] = record
    coming: dict[str, list[Coming]] = {}
    for request_id, (worker, one) in asked.items():
        # Who never ended, or was given up, goes on.
        if (end := ends.get(request_id)) is not None:
            output = _NO_END if end.output_tokens is None else max(1, end.output_tokens)
            cached = min(end.cached_tokens or 0, one.prompt_tokens - 1)
            one = replace(one, cached_tokens=cached, output_tokens=output)
        coming.setdefault(worker, []).append(one)
    return Foresight(costs, {worker: sorted(them, key=lambda one: one.at_s) for worker, them in coming.items()})


_NO_END = 1 << 30


def _length(record: RequestRecord) -> int:
    if record.tokens is not None:
        return max(1, (len(record.tokens) // 4 * 3 - record.tokens.count("=", -2)) // 4)
    return max(1, record.prompt_tokens or 1)


def _hashes(record: RequestRecord, hasher: BlockHasher, size: int) -> BlockHashes:
    """Of its full blocks, as far as a recording tells them: alike where prompts are."""
    if record.tokens is not None:
        namespace = Namespace(lora_name=record.lora_name, cache_salt=record.cache_salt)
        return hasher.prompt_hashes(decode_tokens(record.tokens), HashFamily(size), namespace)
    if record.hashes is not None and record.block_size == size:
        return np.array(decode_hashes(record.hashes), np.uint64)
    return np.empty(0, np.uint64)


class Backtest:
    """Takes in records one by one; `rng` decides what is drawn, and with `foresight` it is told what is yet to come.

    `outcomes` are the predicted requests, in the order in which they came.
    """

    def __init__(
        self, rng: np.random.Generator, what_if: WhatIf | None = None, foresight: Foresight | None = None
    ) -> None:
        self._what_if = what_if or WhatIf()
        self._foresight = foresight
        self._seers: dict[str, Seer] = {}
        self._hasher = BlockHasher(rng)
        self._fleet = Fleet([], self._hasher, rng)
        self._pools: set[str] = set()
        self._workers: dict[str, _Worker] = {}
        self._asked: dict[str, _Asked] = {}
        self._order: list[str] = []
        self._done: dict[str, Outcome] = {}
        self._now_s = 0.0
        self._began_s: float | None = None
        # What a recording had that could not be used, by reason.
        self.left_out: dict[str, int] = {}

    @property
    def outcomes(self) -> list[Outcome]:
        return [self._done.get(id_) or self._asked[id_].outcome for id_ in self._order]

    @property
    def recorded_s(self) -> float:
        """From the first record to the last."""
        return self._now_s - (self._began_s or 0.0)

    def run(self, records: Iterable[Record]) -> None:
        """Raises BadRecording for records that contradict each other, and BadOverride for a worker that the recording
        does not have."""
        for record in records:
            self.take(record)
        for name in self._what_if.of_worker:
            if name not in self._workers:
                known = ", ".join(sorted(self._workers)) or "none"
                raise BadOverride(f"--what-if: unknown worker {name!r}; the recording has {known}")

    def take(self, record: Record) -> None:
        if not isinstance(record, Header):
            # Several sources write one recording; a line that is a little late is taken for the newest.
            if record.t < self._now_s:
                self._leave_out("out of order")
            self._now_s = max(self._now_s, record.t)
            self._began_s = self._now_s if self._began_s is None else self._began_s
        match record:
            case WorkerRecord():
                self._worker(record)
            case DraftingRecord():
                self._known(record.worker, "drafting")
                self._fleet.set_drafting(record.worker, Drafting(record.gain, record.drafted))
            case KvRecord():
                self._kv(record)
            case RequestRecord():
                self._request(record)
            case FirstTokenRecord():
                self._first_token(record)
            case EndRecord():
                self._end(record)
            case RefusedRecord():
                pass  # nobody was asked
            case Header():
                pass

    # Inside

    def _worker(self, record: WorkerRecord) -> None:
        known = self._workers.get(record.worker)
        settings = self._settings(record)
        if known is not None and _incarnation(known.record) == _incarnation(record):
            # Restarted, or other settings: what it held is gone, and with other settings what was learned of it.
            self._fleet.configure(record.worker, settings)
            self._fleet.clear(record.worker)
            known.record, known.settings, known.feed = record, settings, FeedCursor()
            return
        if known is not None:
            for ticket in self._fleet.leave(record.worker):
                self._settle(ticket.id)
        if record.pool not in self._pools:
            self._pools.add(record.pool)
            what_if = self._what_if
            self._fleet.add_pool(
                PoolPolicy(record.pool, learning=what_if.learning, default_output_tokens=what_if.default_output_tokens)
            )
        # Endpoints are in no recording; any that differ will do.
        endpoint = f"{record.pool}/{record.worker}"
        self._fleet.join(record.pool, WorkerSpec(record.worker, endpoint, settings))
        self._fleet.set_trust(record.worker, Trust.PARTIAL, 0.0)
        if self._foresight is not None:
            cost = self._foresight.costs.of(record.worker)
            self._fleet.know_cost(record.worker, cost)
            self._seers[record.worker] = Seer(self._foresight.coming.get(record.worker, ()), cost)
        self._workers[record.worker] = _Worker(record, endpoint, settings)

    def _settings(self, record: WorkerRecord) -> Settings:
        """Those recorded, overridden; what this program does not know of is left out."""
        known = {key: value for key, value in record.settings.items() if key in _SETTINGS and value is not None}
        known |= {**self._what_if.settings, **self._what_if.of_worker.get(record.worker, {})}
        try:
            return msgspec.convert(known, Settings)
        except msgspec.ValidationError as fault:
            raise BadRecording(f"settings of worker {record.worker!r}: {fault}") from fault

    def _kv(self, record: KvRecord) -> None:
        worker = self._known(record.worker, "kv")
        arrival = worker.feed.applied(record.seq)
        if arrival is not Arrival.NEXT:
            # Of a restarted engine nothing is left; of one with a hole in its events nobody knows what is.
            self._leave_out("kv gap" if arrival is Arrival.GAP else "kv restart")
            self._fleet.clear(record.worker)
            self._fleet.set_trust(record.worker, Trust.PARTIAL, 0.0)
        if record.seq == 0:
            self._fleet.set_trust(record.worker, Trust.LIVE, 1.0)
        self._fleet.apply(record.worker, batch_of(record, worker.settings.block_size), record.t)

    def _request(self, record: RequestRecord) -> None:
        self._known(record.worker, "request")
        if record.id in self._done or record.id in self._asked:
            raise BadRecording(f"request {record.id!r} comes twice")
        prompt = self._prompt(record)
        wish = Wish(
            ticket_id=record.id,
            received_at_s=self._now_s,
            waited_before_s=record.waited_s,
            streaming=record.streaming,
            max_tokens=record.max_tokens,
            priority=record.priority,
        )
        in_flight = self._fleet.in_flight_on(record.worker)
        ticket = self._fleet.place_on(record.worker, prompt, wish, self._now_s)
        priced = ticket.forecast
        ttft_s = priced.ttft_s
        if record.worker in self._seers:
            state = self._fleet.shadow_state(record.worker, self._now_s)
            first_s = self._seers[record.worker].first_token_s(record.id, state)
            if first_s is not None:
                ttft_s = priced.already_waited_s + first_s - self._now_s
        self._order.append(record.id)
        self._asked[record.id] = _Asked(
            ticket,
            Outcome.predicted(
                record.id,
                priced,
                ttft_s,
                in_flight,
                self._fleet.learned(record.worker),
                self._workers[record.worker].settings.block_size,
            ),
        )

    def _prompt(self, record: RequestRecord) -> Prompt:
        families = self._fleet.hash_families(record.pool)
        if record.tokens is not None:
            tokens = decode_tokens(record.tokens)
            namespace = Namespace(lora_name=record.lora_name, cache_salt=record.cache_salt)
            if not len(tokens):
                return Prompt.estimated(1)
            hashes = {family: self._hasher.prompt_hashes(tokens, family, namespace) for family in families}
            return Prompt(len(tokens), True, hashes)
        if record.hashes is not None and record.block_size is not None and record.prompt_tokens:
            stand_in = stand_in_tokens(decode_hashes(record.hashes), record.block_size)
            family = HashFamily(record.block_size)
            if family not in families:
                self._leave_out("hashes of another block size")
            hashes = {family: self._hasher.prompt_hashes(stand_in, family, Namespace())}
            return Prompt(record.prompt_tokens, True, hashes)
        return Prompt.estimated(record.prompt_tokens or 1)

    def _first_token(self, record: FirstTokenRecord) -> None:
        asked = self._asked.get(record.id)
        if asked is None:
            self._leave_out("first token of nobody")
            return
        served = None if record.worker is None else self._workers.get(record.worker)
        first = self._fleet.first_token(record.id, None if served is None else served.endpoint, self._now_s)
        if first is None:
            self._leave_out("first token twice")
        elif first.grade is not None:
            if asked.outcome.worker in self._seers:
                self._seers[asked.outcome.worker].came(record.id, self._now_s)
            asked.outcome = replace(asked.outcome, actual_ttft_s=first.grade.actual_s)

    def _end(self, record: EndRecord) -> None:
        asked = self._asked.get(record.id)
        if asked is None:
            self._leave_out("end of nobody")
            return
        usage = Usage(record.prompt_tokens, record.cached_tokens, record.output_tokens)
        if record.output_tokens is None and asked.outcome.worker in self._seers:
            self._seers[asked.outcome.worker].ended_early(record.id)
        self._fleet.finish(record.id, usage, self._now_s, retried=record.attempts > 1)
        asked.outcome = replace(asked.outcome, actual_cached_tokens=record.cached_tokens)
        self._settle(record.id)

    def _settle(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._done[request_id] = asked.outcome

    def _known(self, worker: str, what: str) -> _Worker:
        known = self._workers.get(worker)
        if known is None:
            raise BadRecording(f"a {what} record names worker {worker!r}, of which there is no worker record before it")
        return known

    def _leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def _incarnation(record: WorkerRecord) -> tuple[str, str, str | None]:
    return record.pool, record.engine, record.version


def result_lines(outcomes: Sequence[Outcome], summary: Mapping[str, object]) -> Iterator[bytes]:
    """What `--json` writes: one object a request, and the summary."""
    names = (
        "id", "worker", "predicted_ttft_s", "wait_s", "prefill_s", "cached_tokens", "low_s", "high_s", "actual_ttft_s",
        "actual_cached_tokens",
    )  # fmt: skip
    for outcome in outcomes:
        yield msgspec.json.encode({name: getattr(outcome, name) for name in names}) + b"\n"
    yield msgspec.json.encode({"summary": summary}) + b"\n"
