"""What engines' own pages say: load by data-parallel rank, settings, version, where the events are.

vLLM 0.10-0.33: `/metrics`, `/version`, `/v1/models`, `/kv_event_sources` (since 0.31), `/server_info` (in development
mode). SGLang 0.5.9-0.5.23: `/server_info`, `/v1/loads`. Whatever a page does not say, or says in a way that makes no
sense, is not known: numbers are bounded, and nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from predictor.drafts import DraftCounts
from predictor.engines.vllm import LAST
from predictor.prompt import MAX_BLOCK_SIZE

# More than any engine has; what is beyond is no number to reckon with.
_MOST_REQUESTS, _MOST_TOKENS, _MOST_RANKS = 1_000_000, 1_000_000_000, 1024
_MOST_CONSERVATIVE = 1000.0
_MOST_EVER = 1 << 60  # of a counter
_MOST_DRAFTED = 256  # tokens at once
_NO_DRAFTER: tuple[DraftCounts | None, bool] = (None, False)
_PREFILLED_AT = 9  # total_prefill_uncached_tokens, in a LoadStat
_LINE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|prompt_tokens_total|generation_tokens_total|cache_config_info"
    rb"|engine_sleep_state|spec_decode_num_draft_tokens_total|spec_decode_num_accepted_tokens_total)"
    rb"(?:\{([^\n]*)\})? (\S+)",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(\w+)="((?:[^"\\]|\\.)*)"')
_PORT = re.compile(r":(\d{1,5})$")
_RELEASE = re.compile(r"v?(\d{1,6})\.(\d{1,6})")
# vLLM's `async_scheduling` is on from here on where nothing is against it, and off before.
_ASYNC_BY_DEFAULT = (0, 14)
_DRAFT_SLOTS_SINCE = (0, 28)


@dataclass(frozen=True, slots=True)
class RankState:
    """One data-parallel rank as of now; None where it is not said."""

    in_progress: int | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    tokens_done: float | None = None  # a counter: it falls back when the engine is another
    drafts: DraftCounts | None = None  # of speculative decoding; None where the engine drafts nothing
    odd_drafts: bool = False  # what it says of that cannot be
    awake: bool = True


@dataclass(frozen=True, slots=True)
class Events:
    """Where a rank's events are, as ZMQ addresses to connect to."""

    endpoint: str
    replay: str | None


@dataclass(frozen=True, slots=True)
class About:
    """What changes only with another engine. `settings` has the names of predictor's Settings."""

    version: str | None = None
    life: str | None = None  # what no other incarnation has
    ranks: int | None = None
    settings: Mapping[str, int | float | str] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    events: Mapping[int, Events] = field(default_factory=dict)
    loads: Mapping[int, str] = field(default_factory=dict)  # where each rank publishes its load, likewise
    usual: Mapping[str, bool] = field(default_factory=dict)  # settings of its version, where nobody says otherwise
    not_followed: tuple[str, ...] = ()  # its settings by which it schedules otherwise than its queue is replayed


def read_vllm_metrics(text: bytes) -> dict[int, RankState]:
    """Prometheus text, by rank; empty where it is not vLLM's."""
    values: dict[int, dict[str, float | None]] = {}
    configs: dict[int, dict[bytes, bytes]] = {}
    asleep: set[int] = set()
    for name, raw_labels, value in _LINE.findall(text):
        labels = dict(_LABEL.findall(raw_labels))
        rank = _whole(labels.get(b"engine", b"0"), _MOST_RANKS)
        if rank is None:
            continue
        if name == b"cache_config_info":
            configs[rank] = labels
        elif name == b"engine_sleep_state":
            if labels.get(b"sleep_state") == b"awake" and _number(value, 1) == 0:
                asleep.add(rank)
        else:
            most = _MOST_REQUESTS if name.startswith(b"num") else float("1e18")
            number = _number(value, most)
            known = values.setdefault(rank, {})
            before = known.get(name.decode(), 0.0)
            # Several models' series of one rank are added up; a part of the sum would look like less than there is.
            known[name.decode()] = None if number is None or before is None else before + number
    drafts = {rank: _drafts(known) for rank, known in values.items()}
    return {
        rank: RankState(
            in_progress=_sum(values.get(rank, {}), "num_requests_running", "num_requests_waiting"),
            block_size=_count(configs.get(rank, {}).get(b"block_size"), MAX_BLOCK_SIZE),
            num_gpu_blocks=_count(configs.get(rank, {}).get(b"num_gpu_blocks"), _MOST_TOKENS),
            tokens_done=_total(values.get(rank, {}), "prompt_tokens_total", "generation_tokens_total"),
            drafts=drafts.get(rank, _NO_DRAFTER)[0],
            odd_drafts=drafts.get(rank, _NO_DRAFTER)[1],
            awake=rank not in asleep,
        )
        for rank in sorted({*values, *configs})
    }


def _drafts(values: Mapping[str, float | None]) -> tuple[DraftCounts | None, bool]:
    """What was drafted, and whether something is said of that which cannot be."""
    if not any(name.startswith("spec_decode") for name in values):
        return _NO_DRAFTER
    generated = values.get("generation_tokens_total")
    drafted = values.get("spec_decode_num_draft_tokens_total")
    accepted = values.get("spec_decode_num_accepted_tokens_total")
    if generated is None or drafted is None or accepted is None or not accepted <= min(drafted, generated):
        return None, True
    if drafted > _MOST_DRAFTED * generated:
        return None, True
    return DraftCounts(generated, drafted, accepted), False


def merged(states: Iterable[RankState]) -> RankState:
    """All ranks of an engine as one, for who does not tell them apart."""
    every = list(states)
    if not every:
        return RankState()
    loads = [state.in_progress for state in every if state.in_progress is not None]
    # A part of the sum would look like less load than there is.
    in_progress = sum(loads) if len(loads) == len(every) else None
    drafts = [state.drafts for state in every if state.drafts is not None]
    return replace(
        every[0],
        in_progress=in_progress,
        tokens_done=None,
        drafts=_added(drafts) if len(drafts) == len(every) else None,
        odd_drafts=any(state.odd_drafts for state in every) or 0 < len(drafts) < len(every),
        awake=all(state.awake for state in every),
    )


def _added(counts: list[DraftCounts]) -> DraftCounts:
    return DraftCounts(
        sum(one.generated for one in counts), sum(one.drafted for one in counts), sum(one.accepted for one in counts)
    )


def read_sglang_loads(text: bytes) -> dict[int, RankState]:
    """`/v1/loads`."""
    page = _object(text)
    loads = page.get("loads")
    ranks: dict[int, RankState] = {}
    for number, load in enumerate(loads if isinstance(loads, list) else []):
        if not isinstance(load, dict):
            continue
        rank = load.get("dp_rank", number)
        running = _int(load.get("num_running_reqs"), _MOST_REQUESTS, least=0)
        waiting = _int(load.get("num_waiting_reqs"), _MOST_REQUESTS, least=0)
        if isinstance(rank, int) and 0 <= rank < _MOST_RANKS:
            done = load.get("total_prefill_uncached_tokens")
            ranks[rank] = RankState(
                in_progress=None if running is None or waiting is None else running + waiting,
                tokens_done=float(done) if isinstance(done, int) and 0 <= done < 1 << 60 else None,
            )
    return ranks


def read_sglang_load(payload: bytes) -> RankState | None:
    """What SGLang publishes of a rank's load: `["LoadStat", running, waiting, ...]`, ever longer by version.

    None where it is something else.
    """
    try:
        told = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(told, list) or len(told) < 3 or told[0] != "LoadStat":
        return None
    running, waiting = (_int(one, _MOST_REQUESTS, least=0) for one in told[1:3])
    if running is None or waiting is None:
        return None
    done = _int(told[_PREFILLED_AT], _MOST_EVER, least=0) if len(told) > _PREFILLED_AT else None
    return RankState(in_progress=running + waiting, tokens_done=None if done is None else float(done))


def read_sglang_info(text: bytes, host: str) -> About | None:
    """`/server_info`; None where it is not SGLang's. `host` takes the place of a wildcard."""
    page = _object(text)
    if "max_total_num_tokens" not in page and "internal_states" not in page:
        return None
    ranks = _int(page.get("dp_size"), _MOST_RANKS) or 1
    page_size = _int(page.get("page_size"), MAX_BLOCK_SIZE) or 1
    tokens = _int(page.get("max_total_num_tokens"), _MOST_TOKENS)
    states = page.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    size = _int(_mapping(page.get("kv_events")).get("block_size"), MAX_BLOCK_SIZE) or page_size
    overlap = page.get("disable_overlap_schedule")
    told: dict[str, int | float | str | None] = {
        "family": "sglang",
        "async_scheduling": not overlap if isinstance(overlap, bool) else None,
        "max_prefill_tokens": _int(page.get("max_prefill_tokens"), _MOST_TOKENS),
        "schedule_conservativeness": _positive(page.get("schedule_conservativeness"), _MOST_CONSERVATIVE),
        "enable_mixed_chunk": mixed if isinstance(mixed := page.get("enable_mixed_chunk"), bool) else None,
        "prefill_decode_interval": _int(page.get("prefill_decode_interval"), _MOST_REQUESTS, least=0),
        "prefill_decode_interval_min_bs": _int(page.get("prefill_decode_interval_min_bs"), _MOST_REQUESTS, least=0),
        "block_size": size,
        "num_gpu_blocks": None if tokens is None else tokens // size,
        **_sglang_chunks(page, tokens),
        **_sglang_order(page),
        "max_num_seqs": _int(state.get("effective_max_running_requests_per_dp"), _MOST_REQUESTS)
        or _int(page.get("max_running_requests"), _MOST_REQUESTS),
    }
    return About(
        version=_text(page.get("version")),
        life=None if page.get("startup_time") is None else str(page["startup_time"]),
        ranks=ranks,
        settings={name: value for name, value in told.items() if value is not None},
        models=tuple(filter(None, [_text(page.get("served_model_name"))])),
        events=_sglang_events(_mapping(page.get("kv_events")), ranks, host),
        loads=_sglang_loads(_mapping(page.get("kv_events")), ranks, host),
        not_followed=tuple(_sglang_not_followed(page)),
    )


def _sglang_chunks(page: Mapping[str, object], tokens: int | None) -> dict[str, int | None]:
    """Where prompts are not cut, a batch may be as long as all that the cache holds."""
    chunk = page.get("chunked_prefill_size")
    if not isinstance(chunk, int) or isinstance(chunk, bool):
        return {}
    if chunk > 0:
        return {"max_num_batched_tokens": _int(chunk, _MOST_TOKENS), "enable_chunked_prefill": True}
    return {"max_num_batched_tokens": tokens, "enable_chunked_prefill": False}


def _sglang_order(page: Mapping[str, object]) -> dict[str, int | str | None]:
    """Whom it lets in first."""
    policy = page.get("schedule_policy")
    if page.get("enable_priority_scheduling") is not True:
        return {"scheduling_policy": "fcfs"}
    if policy not in ("fcfs", None):
        return {}
    low_first = page.get("schedule_low_priority_values_first") is True
    default = _int(page.get("default_priority_value"), _MOST_EVER, least=-_MOST_EVER)
    threshold = "priority_scheduling_preemption_threshold"
    return {
        "scheduling_policy": "priority",
        "schedule_low_priority_values_first": low_first,
        # Whoever has none is the last: what was told of an engine before this one must not stand.
        "default_priority_value": default if default is not None else LAST if low_first else -LAST,
        threshold: _int(page.get(threshold), _MOST_EVER, least=0),
        "disable_priority_preemption": page.get("disable_priority_preemption") is True,
    }


def _sglang_not_followed(page: Mapping[str, object]) -> Iterator[str]:
    policy, retraction = page.get("schedule_policy"), page.get("retraction_policy")
    if _text(policy) is not None and policy != "fcfs":
        yield f"schedule_policy={policy}"
        if page.get("enable_priority_scheduling") is True:
            yield "enable_priority_scheduling"
    if retraction == "priority":
        yield f"retraction_policy={retraction}"
    for key in ("enable_dp_attention", "enable_prefill_delayer"):
        if page.get(key) is True:
            yield key


def _sglang_loads(page: Mapping[str, object], ranks: int, host: str) -> dict[int, str]:
    base = page.get("load_endpoint_port_base")
    if not isinstance(base, int) or not 0 < base <= 65535 - ranks:
        return {}
    return {rank: f"tcp://{_sglang_host(page, host)}:{base + rank}" for rank in range(ranks)}


def _sglang_host(page: Mapping[str, object], host: str) -> str:
    named = _text(page.get("endpoint_host"))
    return host if named is None or named in ("*", "0.0.0.0", "::", "[::]") else named


def _sglang_events(page: Mapping[str, object], ranks: int, host: str) -> dict[int, Events]:
    base, replay_base = page.get("endpoint_port_base"), page.get("replay_endpoint_port_base")
    where = _sglang_host(page, host)
    if not isinstance(base, int) or not 0 < base <= 65535 - ranks:
        return {}
    return {
        rank: Events(
            f"tcp://{where}:{base + rank}",
            f"tcp://{where}:{replay_base + rank}" if isinstance(replay_base, int) and replay_base > 0 else None,
        )
        for rank in range(ranks)
    }


def read_vllm_about(
    version: bytes | None, models: bytes | None, sources: bytes | None, info: bytes | None, host: str
) -> About:
    """`/version`, `/v1/models`, `/kv_event_sources` and `/server_info?config_format=json`; None where there is none."""
    cards = _object(models).get("data")
    known = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
    config = _mapping(_object(info).get("vllm_config"))
    scheduler = _mapping(config.get("scheduler_config"))
    cache = _mapping(config.get("cache_config"))
    lengths = [length for card in known if (length := _int(card.get("max_model_len"), _MOST_TOKENS))]
    told = {
        "max_num_batched_tokens": _int(scheduler.get("max_num_scheduled_tokens"), _MOST_TOKENS)
        or _int(scheduler.get("max_num_batched_tokens"), _MOST_TOKENS),
        "max_num_seqs": _int(scheduler.get("max_num_seqs"), _MOST_REQUESTS),
        "long_prefill_token_threshold": _int(scheduler.get("long_prefill_token_threshold"), _MOST_TOKENS, least=0),
        "long_prefill_token_threshold_adaptive": _bool(scheduler.get("long_prefill_token_threshold_adaptive")),
        "scheduling_policy": _policy(scheduler.get("policy")),
        "async_scheduling": _bool(scheduler.get("async_scheduling")),
        "enable_chunked_prefill": _bool(scheduler.get("enable_chunked_prefill")),
        "draft_slots": _draft_slots(_mapping(config.get("speculative_config")), version),
        "block_size": _int(cache.get("block_size"), MAX_BLOCK_SIZE),
        "num_gpu_blocks": _int(cache.get("num_gpu_blocks"), _MOST_TOKENS),
        "max_model_len": min(lengths) if lengths else None,
    }
    events: dict[int, Events] = {}
    for rank, source in _object(sources).items():
        where = _mapping(source)
        endpoint = _reachable(_text(where.get("endpoint")), host)
        if endpoint is not None and str(rank).isdecimal() and int(rank) < _MOST_RANKS:
            events[int(rank)] = Events(endpoint, _reachable(_text(where.get("replay_endpoint")), host))
    release = _text(_object(version).get("version"))
    return About(
        version=release,
        usual={"async_scheduling": False} if _is_before(release, _ASYNC_BY_DEFAULT) else {},
        ranks=len(events) or None,
        settings={name: value for name, value in told.items() if value is not None},
        models=tuple(sorted(name for card in known if (name := _text(card.get("id"))))),
        events=events,
    )


def _draft_slots(config: Mapping[str, object], version: bytes | None) -> int | None:
    """vLLM's `max_num_new_slots_for_drafting` (config/speculative.py, 0.32.0), which it charges since 0.28."""
    drafted = _int(config.get("num_speculative_tokens"), _MOST_DRAFTED)
    if drafted is None or _is_before(_text(_object(version).get("version")), _DRAFT_SLOTS_SINCE):
        return None
    method, parallel = _text(config.get("method")), config.get("parallel_drafting") is True
    if method == "dflash" or (method == "draft_model" and parallel):
        return drafted
    if parallel or method == "dspark":
        return drafted - 1
    return 1 if method == "draft_model" else 0


def _is_before(version: str | None, other: tuple[int, int]) -> bool:
    found = _RELEASE.match(version or "")
    return found is not None and (int(found[1]), int(found[2])) < other


def _reachable(endpoint: str | None, host: str) -> str | None:
    """An address that engines bind, as one to connect to."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None
    port = _PORT.search(endpoint)
    if port is None or not 0 < int(port[1]) <= 65535:
        return None
    named = endpoint.removeprefix("tcp://")[: -len(port[0])]
    return f"tcp://{host if named in ('*', '0.0.0.0', '::', '[::]') else named}:{port[1]}"


def _object(text: bytes | None) -> Mapping[str, object]:
    if text is None:
        return {}
    try:
        return _mapping(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= 256 else None


def _int(value: object, most: int, least: int = 1) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None


def _positive(value: object, most: float) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value <= most else None


def _bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _policy(value: object) -> str | None:
    return value if isinstance(value, str) and value in ("fcfs", "priority") else None


def _number(value: bytes, most: float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number <= most else None


def _whole(value: bytes, most: int) -> int | None:
    return int(value) if len(value) <= 6 and value.isdigit() and int(value) < most else None


def _count(value: bytes | None, most: int) -> int | None:
    if value is None or len(value) > 18 or not value.isdigit():
        return None
    return int(value) if 0 < int(value) <= most else None


def _sum(values: Mapping[str, float | None], *names: str) -> int | None:
    total = _total(values, *names)
    return None if total is None else round(total)


def _total(values: Mapping[str, float | None], *names: str) -> float | None:
    """Of those that are there; None where one of them makes no sense, or none is there."""
    there = [values[name] for name in names if name in values]
    known = [value for value in there if value is not None]
    return sum(known) if known and len(known) == len(there) else None
