"""The config file: YAML, checked as a whole, every fault named with its file, line and key."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import msgspec.inspect
import yaml

from predictor.admission import BOUND_MAX_S, BOUND_MIN_S, TTFT_BOUND_MAX_S, TTFT_BOUND_MIN_S
from predictor.engines import reuse, tensorrt_llm
from predictor.engines.vllm import Settings
from predictor.kv_events import Tier
from predictor.pool_cache import CacheSpec

_DEFAULTS = Settings()
# vLLM's OpenAI server, by device: tokens a step, sequences. The first row since 0.28; A100 counts as "gpu".
_BATCH_DEFAULTS = {
    "gpu-160gib": (16384, 1024),
    "gpu-70gib": (_DEFAULTS.max_num_batched_tokens, _DEFAULTS.max_num_seqs),
    "gpu": (2048, 256),
    "cpu": (2048, 128),
}
# What counts requests, tokens, blocks or MB: no machine has more, and queues of such a length can be made.
_Positive = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
_YEAR_S = 366 * 86400.0
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=_YEAR_S)]
_SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=_YEAR_S)]
_Weight = Annotated[float, msgspec.Meta(ge=0, le=1000)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_PORT = r"([0-9]{1,4}|[1-5][0-9]{4}|6([0-4][0-9]{3}|5([0-4][0-9]{2}|5([0-2][0-9]|3[0-5]))))"
_HostPort = Annotated[str, msgspec.Meta(pattern=rf"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):{_PORT}\Z")]
_Zmq = Annotated[str, msgspec.Meta(pattern=rf"^(tcp://[^\s*]+:{_PORT}|ipc://[^\s*]+)\Z")]
# Envoy copies a worker's name into headers of answers as it is, line breaks and all.
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


_S = TypeVar("_S", bound=_Section)


class Listen(_Section, frozen=True):
    grpc: _HostPort = "0.0.0.0:9002"
    admin: _HostPort = "127.0.0.1:9464"


class Tokenization(_Section, frozen=True):
    """`deadline_s` must stay well below Envoy's `message_timeout`. From `large_bytes` on a body gets half of
    `gateway.max_message_timeout_s` instead, if that is more."""

    threads: _Positive = 2
    max_pending: _Positive = 64
    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 8192
    deadline_s: _Seconds = 0.3
    large_bytes: _Positive = 512 << 10


class Tickets(_Section, frozen=True):
    max_age_s: _Seconds = 3600.0


class Shutdown(_Section, frozen=True):
    notice_s: _SecondsOrZero = 2.0
    grace_s: _SecondsOrZero = 20.0


class ProbeSettings(_Section, frozen=True):
    """`interval_s` 0 turns probing off."""

    interval_s: _SecondsOrZero = 5.0


class Gateway(_Section, frozen=True):
    """`ask_for_body`: where Envoy is configured to send no bodies, ask for them (it must have allow_mode_override).
    `original_dst`: name the chosen endpoint alone in `x-headway-endpoint`. `max_message_timeout_s`: what Envoy's filter
    has under that name; 0: it has none, and is asked for no more time.
    `trust_request_start`: something before us sets `x-request-start`, and lets no client do so."""

    ask_for_body: bool = False
    original_dst: bool = False
    max_message_timeout_s: _SecondsOrZero = 0.0
    trust_request_start: bool = False


class Recording(_Section, frozen=True):
    """`folder` None: nothing is recorded. With `tokens` recordings hold the callers' texts, as token ids."""

    folder: str | None = None
    tokens: bool = False
    compress: bool = True
    max_mb: _Positive = 1024


class Learned(_Section, frozen=True):
    """`folder` None: what was learned ends with the process."""

    folder: str | None = None
    every_s: _Seconds = 60.0


class Learning(_Section, frozen=True):
    min_samples: _Positive = 8
    min_intervals: _Positive = 30
    min_length_ratio: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 4.0
    default_tokens_per_s: _Seconds = 2000.0
    default_step_s: _Seconds = 0.01
    share: _Share = 0.1


class Retry(_Section, frozen=True):
    cap_s: _Seconds = 60.0
    jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2


class GuardConfig(_Section, frozen=True):
    """`false_alarms` null: admission never steps down by itself."""

    false_alarms: _Share | None = 0.3
    margin: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    window: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 50
    least: _Positive = 20


class Admission(_Section, frozen=True):
    """null turns a rule off."""

    mode: Literal["enforce", "shadow", "off"] = "enforce"
    max_queue_wait_s: Annotated[float, msgspec.Meta(ge=BOUND_MIN_S, le=BOUND_MAX_S)] | None = None
    max_ttft_s: Annotated[float, msgspec.Meta(ge=TTFT_BOUND_MIN_S, le=TTFT_BOUND_MAX_S)] | None = None
    overload_wait_s: _Seconds | None = 300.0
    overload_kv_demand: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = 4.0
    risk: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.15
    on_reject: Literal["retry", "fail"] = "retry"
    remove_bound_field: bool = False
    hold_s: _SecondsOrZero = 0.0
    hold_requests: _Positive = 256
    hold_mb: _Positive = 64
    guard: GuardConfig = GuardConfig()


class Others(_Section, frozen=True):
    """What a second of others' time is worth, by preference."""

    latency: _Weight = 0.0
    balanced: _Weight = 1.0
    cache: _Weight = 4.0


class Routing(_Section, frozen=True):
    prefer: Literal["latency", "balanced", "cache"] = "balanced"
    others: Others = Others()
    session_hint: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    refusal_s: _SecondsOrZero = 30.0


class Fairness(_Section, frozen=True):
    enabled: bool = False
    wait_s: _SecondsOrZero = 2.0
    half_life_s: _Seconds = 60.0


_MOST_PRIORITY = 1 << 60


_Family = Literal["vllm", "sglang", "tensorrt_llm"]
_VLLMS_OWN = ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "draft_slots")
_SGLANGS_PRIORITIES = (
    "schedule_low_priority_values_first", "default_priority_value", "priority_scheduling_preemption_threshold",
    "disable_priority_preemption",
)  # fmt: skip
_SGLANGS_OWN = (
    "schedule_conservativeness", "enable_mixed_chunk", "prefill_decode_interval", "prefill_decode_interval_min_bs",
    "max_prefill_tokens", *_SGLANGS_PRIORITIES,
)  # fmt: skip
# What an engine of this family does not have, or is followed without; `device` is about vLLM's defaults, which SGLang
# has too until its page is read.
_NOT_OF: dict[_Family, tuple[str, ...]] = {
    "vllm": _SGLANGS_OWN,
    "sglang": _VLLMS_OWN,
    "tensorrt_llm": (*_VLLMS_OWN, *_SGLANGS_OWN, "scheduling_policy", "device"),
}


def without_others(settings: Settings) -> Settings:
    """The same for an engine whose page says of which family it is, whatever was said of it before: what it does not
    have is at its default, so that it has no effect anywhere."""
    others: dict[str, Any] = {key: getattr(_DEFAULTS, key) for key in _NOT_OF[settings.family] if key != "device"}
    return replace(settings, **others)


class EngineSettings(_Section, frozen=True):
    """What an engine runs with. `device` gives vLLM's defaults for what is not said (0.32's `get_batch_defaults`, and
    `async_scheduling`, which is its default but on CPUs)."""

    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = _DEFAULTS.block_size
    num_gpu_blocks: _Positive | None = None
    max_num_batched_tokens: _Positive | None = None
    max_num_seqs: _Positive | None = None
    long_prefill_token_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    long_prefill_token_threshold_adaptive: bool = False
    draft_slots: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool | None = None
    max_model_len: _Positive | None = None
    async_scheduling: bool | None = None
    schedule_conservativeness: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    enable_mixed_chunk: bool = False
    prefill_decode_interval: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    prefill_decode_interval_min_bs: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    max_prefill_tokens: _Positive = _DEFAULTS.max_prefill_tokens
    schedule_low_priority_values_first: bool = False
    default_priority_value: Annotated[int, msgspec.Meta(ge=-_MOST_PRIORITY, le=_MOST_PRIORITY)] | None = None
    priority_scheduling_preemption_threshold: Annotated[int, msgspec.Meta(ge=0, le=_MOST_PRIORITY)] = 10
    disable_priority_preemption: bool = False
    device: Literal["gpu-160gib", "gpu-70gib", "gpu", "cpu"] = "gpu-70gib"

    def for_engine(self, family: _Family = "vllm") -> Settings:
        """SGLang and TensorRT-LLM overlap their steps by default as well; SGLang's own page tells if it does not. What
        such an engine does not have is left at its default, so that it has no effect anywhere."""
        tokens, seqs = _BATCH_DEFAULTS[self.device]
        told = msgspec.structs.asdict(self)
        for key in ("device", *_NOT_OF[family]):
            told.pop(key, None)
        told["max_num_batched_tokens"] = self.max_num_batched_tokens or tokens
        told["max_num_seqs"] = self.max_num_seqs or seqs
        if self.async_scheduling is None:
            told["async_scheduling"] = family != "vllm" or self.device != "cpu"
        if family == "tensorrt_llm":
            told["max_num_batched_tokens"] = self.max_num_batched_tokens or tensorrt_llm.MAX_NUM_TOKENS
            told["max_num_seqs"] = self.max_num_seqs or tensorrt_llm.MAX_BATCH_SIZE
        if self.enable_chunked_prefill is None:
            told["enable_chunked_prefill"] = family != "tensorrt_llm"
        return Settings(**told, family=family)

    @property
    def left_open(self) -> frozenset[str]:
        """What an engine's version may say otherwise."""
        return frozenset() if self.async_scheduling is not None else frozenset({"async_scheduling"})


class CacheConfig(_Section, frozen=True):
    """What an engine does not tell of its cache. `rule` is the engine family whose rules of reuse
    and of scheduling hold."""

    rule: _Family = "vllm"
    speculative: bool = False
    cache_hit_alignment: Annotated[int, msgspec.Meta(ge=0)] = 0
    host_blocks: _Positive | None = None
    storage_blocks: _Positive | None = None
    host_us_per_token: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 10.0
    storage_us_per_token: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 60.0
    host_store: _Name | None = None
    storage_store: _Name | None = None

    def for_engine(self) -> CacheSpec:
        stores = {Tier.HOST: self.host_store, Tier.STORAGE: self.storage_store}
        return CacheSpec(
            rule=reuse.sglang() if self.rule == "sglang" else reuse.vllm(self.speculative, self.cache_hit_alignment),
            host_blocks=self.host_blocks,
            storage_blocks=self.storage_blocks,
            host_s_per_token=self.host_us_per_token * 1e-6,
            storage_s_per_token=self.storage_us_per_token * 1e-6,
            stores={tier: name for tier, name in stores.items() if name is not None},
        )


class WorkerConfig(_Section, frozen=True):
    name: _Name
    endpoint: _HostPort
    cluster: _Name | None = None
    kv_events: _Zmq | None = None
    kv_replay: _Zmq | None = None
    data_parallel_ranks: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    adapters: list[_Name] = []
    drain: bool = False
    settings: EngineSettings = EngineSettings()
    cache: CacheConfig = CacheConfig()


class PoolConfig(_Section, frozen=True):
    name: _Name
    models: list[_Name] = []
    tokenizer: str | None = None
    learning: Learning = Learning()
    admission: Admission = Admission()
    routing: Routing = Routing()
    fairness: Fairness = Fairness()
    retry_after: Retry = Retry()
    scores: bool = False
    workers: list[WorkerConfig] = []

    @property
    def model_names(self) -> list[str]:
        return self.models or [self.name]

    @property
    def adapter_names(self) -> frozenset[str]:
        """LoRA adapters that some worker has loaded; callers name them as models."""
        return frozenset(name for worker in self.workers for name in worker.adapters)


class Config(_Section, frozen=True):
    listen: Listen = Listen()
    tokenization: Tokenization = Tokenization()
    tickets: Tickets = Tickets()
    gateway: Gateway = Gateway()
    shutdown: Shutdown = Shutdown()
    probe: ProbeSettings = ProbeSettings()
    recording: Recording = Recording()
    learned: Learned = Learned()
    pools: list[PoolConfig] = []

    @property
    def large_deadline_s(self) -> float | None:
        """For the tokens of a large body; None: it gets no more time than others."""
        half_s = self.gateway.max_message_timeout_s / 2
        return half_s if half_s > self.tokenization.deadline_s else None


class BadConfig(ValueError):
    """Every fault that was found, one a line, each with its place."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


class Draft:
    """What a config file says, with defaults in place of what cannot be read, and every fault that was found so far."""

    def __init__(self, name: str, tree: yaml.Node | None, config: Config) -> None:
        self.config = config
        self._name = name
        self._tree = tree
        self._faults: list[tuple[int, str]] = []

    def fault(self, key: str, problem: str, line: int | None = None) -> None:
        line = _line(self._tree, key) if line is None else line
        self._faults.append((line, f"{self._name}:{line}: {key or 'the file'}: {problem}"))

    @property
    def faults(self) -> list[str]:
        """In the order of the file."""
        return [fault for _, fault in sorted(self._faults, key=lambda found: found[0])]

    def without_faults(self) -> Config:
        """Raises BadConfig if there are any."""
        if self._faults:
            raise BadConfig(self.faults)
        return self.config


def load_config(path: Path) -> Config:
    """Reads and checks a config file. Raises BadConfig; relative paths are taken from the file's folder."""
    return load_draft(path).without_faults()


def load_draft(path: Path) -> Draft:
    """As `load_config`, for who has more to check. Raises BadConfig only for what is no YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig([f"{path}: cannot be read: {error}"]) from error
    draft = _parse(text, str(path))
    config = draft.config
    pools = []
    for pool in config.pools:
        folder = None if pool.tokenizer is None else str(path.parent / pool.tokenizer)
        pools.append(msgspec.structs.replace(pool, tokenizer=folder))
    recording = config.recording
    if recording.folder is not None:
        recording = msgspec.structs.replace(recording, folder=str(path.parent / recording.folder))
    learned = config.learned
    if learned.folder is not None:
        learned = msgspec.structs.replace(learned, folder=str(path.parent / learned.folder))
    draft.config = msgspec.structs.replace(config, pools=pools, recording=recording, learned=learned)
    return draft


def unusable_folder(folder: Path) -> str | None:
    """Why nothing can be written to a folder that is made when it is first needed; None if it can."""
    there = folder
    if "\0" in str(folder):
        return "a path has no character of code 0"
    while not os.path.exists(there) and there != there.parent:  # Path.exists raises what it cannot tell
        if os.path.lexists(there):
            return f"{there} leads nowhere"
        there = there.parent
    if not os.path.isdir(there):
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to"
    return None


def parse_config(text: str, name: str) -> Config:
    """Raises BadConfig with every fault, as `name:line: key: what is wrong`."""
    return _parse(text, name).without_faults()


def _parse(text: str, name: str) -> Draft:
    """Raises BadConfig for what is no YAML, of which nothing else can be told."""
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        halves = _without_halves(tree)
        raw = yaml.safe_load(text) if not halves else yaml.SafeLoader("").construct_document(tree)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadConfig([f"{name}:{line}: not YAML: {error.problem}"]) from error
    except Exception as error:
        # Its constructors raise whatever comes their way, such as an IndexError for `!!int ""`.
        raise BadConfig([f"{name}:1: not YAML: {error}"]) from error
    raw = {} if raw is None else raw
    _read_off_as_a_mode(raw)
    reading = _Reading()
    draft = Draft(name, tree, reading.section(raw, Config, ""))
    for key, value, line in halves:
        draft.fault(key, f"not a text: {value!r}", line)
    for key, line, first in _repeats(tree):
        draft.fault(key, f"given twice; the first is in line {first}", line)
        reading.bad.add(key)
    no_texts = {key for key, _, _ in halves}
    for key, problem in (*reading.faults, *_doubles(raw)):
        if key not in no_texts:
            draft.fault(key, problem)
    for key, problem, because_of in _contradictions(draft.config):
        # What a fault has left of a value says nothing about others.
        if not any(map(reading.in_doubt, (key, *because_of))):
            draft.fault(key, problem)
    return draft


def _without_halves(tree: yaml.Node | None) -> list[tuple[str, str, int]]:
    """Escapes can write half of a surrogate pair, which nothing can show or send: each is replaced, and named."""
    found = []
    for place, node in _nodes(tree):
        if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            found.append((place, node.value, node.start_mark.line + 1))
            node.value = _SURROGATE.sub("\ufffd", node.value)
    return found


def _read_off_as_a_mode(raw: object) -> None:
    """To YAML 1.1 a plain `off` is false."""
    pools = raw.get("pools") if isinstance(raw, dict) else None
    for pool in pools if isinstance(pools, list) else []:
        admission = pool.get("admission") if isinstance(pool, dict) else None
        if isinstance(admission, dict) and admission.get("mode") is False:
            admission["mode"] = "off"


def _repeats(node: yaml.Node | None) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping has more than once, of which YAML would silently take the last; with both lines."""
    for place, mapping in _nodes(node):
        if not isinstance(mapping, yaml.MappingNode):
            continue
        lines: dict[str, int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                yield _below(place, key.value), line, lines[key.value]
            lines.setdefault(key.value, line)


def _nodes(tree: yaml.Node | None) -> Iterator[tuple[str, yaml.Node]]:
    """All nodes of a tree, each once, with the key that they are under."""
    waiting, seen = [("", tree)], set()
    while waiting:
        place, node = waiting.pop()
        if node is None or id(node) in seen:  # an anchor may lead back to itself
            continue
        seen.add(id(node))
        yield place, node
        if isinstance(node, yaml.SequenceNode):
            waiting += [(f"{place}[{number}]", item) for number, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = key.value if isinstance(key, yaml.ScalarNode) else "?"
                waiting += [(place, key), (_below(place, name), value)]


def _below(place: str, key: object) -> str:
    return f"{place}.{key}".lstrip(".")


_NOTHING = object()


class _Reading:
    """Reads key by key, since a conversion stops at its first fault. What cannot be read is as if it were not given."""

    def __init__(self) -> None:
        self.faults: list[tuple[str, str]] = []
        self.bad: set[str] = set()
        self._given: set[str] = set()
        self._with_unknown: set[str] = set()

    def in_doubt(self, key: str) -> bool:
        """Whether the file may have meant another value: it, a part of it or what it is in is faulty, or what it is in
        has an unknown key that may be this one, misspelt."""
        parent = key.rpartition(".")[0]
        if key not in self._given and parent in self._with_unknown:
            return True
        return any(
            key == bad or key.startswith((f"{bad}.", f"{bad}[")) or bad.startswith((f"{key}.", f"{key}["))
            for bad in self.bad
        )

    def section(self, value: object, kind: type[_S], place: str) -> _S:
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        found: dict[str, Any] = {}
        if isinstance(value, dict):
            for key, item in value.items():
                here = _below(place, key)
                self._given.add(here)
                if key not in fields:
                    self._with_unknown.add(place)
                    self.faults.append((here, f"unknown key; known here: {', '.join(sorted(fields))}"))
                elif (read := self._field(item, fields[key].type, here)) is not _NOTHING:
                    found[key] = read
        else:
            self._fault(place, "expected keys and values")
        for name, field in fields.items():
            if field.required and name not in found:
                found[name] = ""
                if isinstance(value, dict) and name not in value:
                    self.faults.append((place, f"the key {name!r} is missing"))
        return kind(**found)

    def _field(self, value: object, kind: Any, place: str) -> object:  # noqa: ANN401 - any annotation
        if isinstance(kind, type) and issubclass(kind, _Section):
            return self.section(value, kind, place)
        inner = get_args(kind)[0] if get_origin(kind) is list else None
        if isinstance(inner, type) and issubclass(inner, _Section):
            if not isinstance(value, list):
                self._fault(place, "expected a list")
                return _NOTHING
            return [self.section(item, inner, f"{place}[{number}]") for number, item in enumerate(value)]
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            if get_origin(kind) is Literal:
                problem = f"expected one of {', '.join(get_args(kind))}"
            self._fault(f"{place}{path.rstrip('`')}", _plain(_with_both_ends(problem, kind) if not path else problem))
            return _NOTHING

    def _fault(self, place: str, problem: str) -> None:
        self.faults.append((place, problem))
        self.bad.add(place)


def _with_both_ends(problem: str, kind: Any) -> str:  # noqa: ANN401 - any annotation
    """A conversion says which end of a range was passed; who looks for a value wants to know both."""
    told = re.fullmatch(r"Expected (`\w+`)( of length)? [<>]=? \S+", problem)
    if told is None:
        return problem
    info = msgspec.inspect.type_info(kind)
    for one in info.types if isinstance(info, msgspec.inspect.UnionType) else (info,):
        match one:
            case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
                ends = {">=": one.ge, ">": one.gt, "<=": one.le, "<": one.lt}
            case msgspec.inspect.StrType():
                ends = {">=": one.min_length, "<=": one.max_length}
            case _:
                continue
        number = float if isinstance(one, msgspec.inspect.FloatType) else int
        both = " and ".join(f"{sign} {number(end)}" for sign, end in ends.items() if end is not None)
        return f"Expected {told[1]}{told[2] or ''} {both}"
    return problem


def _plain(problem: str) -> str:
    if "matching regex" in problem and "ipc://" in problem:
        return "expected a ZMQ address to connect to, such as tcp://host:5557 (no *)"
    if "matching regex" in problem and "x7f" in problem:
        return "expected a name without line breaks and other control characters"
    if "matching regex" in problem:
        return "expected host:port"
    return problem[:1].lower() + problem[1:]


def _doubles(raw: object) -> Iterator[tuple[str, str]]:
    """Names that must be unique: pools, models over all pools, workers over all pools."""
    pools = raw.get("pools") if isinstance(raw, dict) else None
    seen: dict[tuple[str, object], str] = {}
    adapters_of: dict[str, int] = {}
    for number, pool in enumerate(pools if isinstance(pools, list) else []):
        if not isinstance(pool, dict):
            continue
        place = f"pools[{number}]"
        names: list[tuple[str, object, str]] = [("pool", pool.get("name"), f"{place}.name")]
        models = pool.get("models") or [pool.get("name")]
        if isinstance(models, list):
            names += [("model", model, f"{place}.models") for model in models]
        workers = pool.get("workers")
        for index, worker in enumerate(workers if isinstance(workers, list) else []):
            if isinstance(worker, dict):
                names.append(("worker", worker.get("name"), f"{place}.workers[{index}].name"))
                adapters = worker.get("adapters")
                for adapter in adapters if isinstance(adapters, list) else []:
                    # Several workers of a pool may have it; to anybody else it would be ambiguous.
                    if not isinstance(adapter, str) or adapters_of.setdefault(adapter, number) == number:
                        continue
                    where = f"{place}.workers[{index}].adapters"
                    yield where, f"adapter {adapter!r} is already named in pools[{adapters_of.get(adapter)}]"
        for kind, value, where in names:
            if not isinstance(value, str):
                continue
            if (kind, value) in seen:
                yield where, f"{kind} {value!r} is already named at {seen[kind, value]}"
            seen.setdefault((kind, value), where)


def _contradictions(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Values that are good each for itself, and cannot work together: the key, what is wrong, and the other keys that
    it is wrong because of. Among them: requests that are held for longer than Envoy waits would go on without a
    decision."""
    granted_s = config.gateway.max_message_timeout_s
    longest_s = max(_LONGEST_HOLD_S, granted_s / 2)
    if _same_socket(config.listen):
        yield "listen.admin", "the same port as listen.grpc", ("listen.grpc",)
    for number, pool in enumerate(config.pools):
        place = f"pools[{number}]"
        guard = pool.admission.guard
        if guard.false_alarms is not None and guard.window < guard.least:
            yield (
                f"{place}.admission.guard.window",
                f"at least guard.least, which is {guard.least}: with fewer refusals the guard never judges",
                (f"{place}.admission.guard.least", f"{place}.admission.guard.false_alarms"),
            )
        for index, worker in enumerate(pool.workers):
            yield from _workers_contradictions(worker, f"{place}.workers[{index}]")
        if pool.admission.hold_s > longest_s:
            yield (
                f"{place}.admission.hold_s",
                f"at most {longest_s:g}: it must stay below Envoy's message_timeout. Where Envoy's filter has a "
                "max_message_timeout, say so in gateway.max_message_timeout_s: then up to half of that is allowed",
                ("gateway.max_message_timeout_s",),
            )


def _workers_contradictions(worker: WorkerConfig, place: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    settings = worker.settings.for_engine(worker.cache.rule)
    if settings.draft_slots >= settings.max_num_batched_tokens:
        room = settings.max_num_batched_tokens
        yield (
            f"{place}.settings.draft_slots",
            f"must be less than max_num_batched_tokens, {room}: a step has no room for anybody then",
            (f"{place}.settings.max_num_batched_tokens", f"{place}.settings.device", f"{place}.cache.rule"),
        )
    for key in ("kv_events", "kv_replay"):
        last = _last_port(getattr(worker, key), worker.data_parallel_ranks or 1)
        if last > 65535:
            yield (
                f"{place}.{key}",
                f"the last of {worker.data_parallel_ranks} ranks would have the port {last}",
                (f"{place}.data_parallel_ranks",),
            )


def _same_socket(listen: Listen) -> bool:
    """Port 0 is a free one; two loopback addresses are two sockets, every address and one of them are not."""
    (host, port), (other, other_port) = (address.rsplit(":", 1) for address in (listen.grpc, listen.admin))
    return int(port) == int(other_port) != 0 and (host == other or not {host, other}.isdisjoint(("0.0.0.0", "[::]")))


def _last_port(address: str | None, ranks: int) -> int:
    """0 where ranks are told apart by something else than ports."""
    last = None if address is None else port_of_rank(address, ranks - 1)
    return 0 if last is None or last.startswith("ipc://") else int(last.rpartition(":")[2])


def _line(tree: yaml.Node | None, path: str) -> int:
    """The line of a key such as `pools[0].workers[1].endpoint`, or of the nearest one that is there."""
    line = 1
    node = tree
    for index, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path):
        following = None
        if key and isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if name.value == key:
                    line, following = name.start_mark.line + 1, value
        elif index and isinstance(node, yaml.SequenceNode) and int(index) < len(node.value):
            following = node.value[int(index)]
            line = following.start_mark.line + 1
        if following is None:
            break
        node = following
    return line


def port_of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank, where `endpoint` is that of rank 0: engines count ports on."""
    if not rank:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}"


# Envoy's message_timeout in envoy/envoy.yaml is 1 s, of which tokenizing may take some.
_LATEST_DEADLINE_S, _LONGEST_HOLD_S = 0.6, 0.4


def notes(config: Config) -> Iterator[str]:
    """What is allowed, and will hardly be meant: each in words, with its place."""
    if config.tokenization.deadline_s > _LATEST_DEADLINE_S:
        yield "tokenization.deadline_s: must stay well below Envoy's message_timeout, or decisions come too late"
    if config.gateway.max_message_timeout_s and config.large_deadline_s is None:
        yield "gateway.max_message_timeout_s: not above twice tokenization.deadline_s: large bodies get no more time"
    yield from _shared_addresses(config)
    if not config.pools:
        yield "pools: there are none, so that every request is passed on"
    for pool in config.pools:
        place = f"pool {pool.name!r}"
        if not pool.workers:
            yield f"{place}: without workers its requests are answered with 503"
        elif all(worker.drain for worker in pool.workers):
            yield f"{place}: all of its workers drain, so that its requests are answered with 503"
        if pool.tokenizer is None:
            yield f"{place}: without a tokenizer prompts are estimated, and caches are not credited"
        for worker in pool.workers:
            if worker.kv_events is None:
                yield f"{place}, worker {worker.name!r}: without kv_events only engines that name them are followed"
            elif worker.kv_replay is None:
                yield f"{place}, worker {worker.name!r}: without kv_replay lost events cannot be made good"
            if not _is_address(worker.endpoint):
                yield f"{place}, worker {worker.name!r}: Envoy knows endpoints by address, not by name"
            for note in _unknown_space(worker, config.probe.interval_s > 0):
                yield f"{place}, worker {worker.name!r}, {note}"
    yield from _without_effect(config)


def _unknown_space(worker: WorkerConfig, asked: bool) -> Iterator[str]:
    """Of an engine that will tell nobody how much its cache holds, and what follows from that."""
    settings, is_tensorrt_llm = worker.settings, worker.cache.rule == "tensorrt_llm"
    if asked and not is_tensorrt_llm:
        return
    why = "it is not read from TensorRT-LLM" if is_tensorrt_llm else "probe.interval_s 0 asks no engine for it"
    if settings.num_gpu_blocks is None:
        yield (
            f"settings.num_gpu_blocks: not given, and {why}: every request is taken to find space at once, so that "
            "waits for it are not foreseen, and admission.overload_kv_demand refuses nobody"
        )
    elif is_tensorrt_llm and settings.max_model_len is None:
        yield (
            f"settings.max_model_len: not given, and {why}: requests without max_tokens are taken to need no space for "
            "their outputs, so that waits for it are predicted too short"
        )


def _without_effect(config: Config) -> Iterator[str]:
    """Keys with another value than their default that change nothing."""
    if config.large_deadline_s is None:
        for key in _changed(config.tokenization, "large_bytes"):
            yield f"tokenization.{key}: no effect without gateway.max_message_timeout_s: large bodies get no more time"
    if config.recording.folder is None:
        for key in _changed(config.recording, "tokens", "compress", "max_mb"):
            yield f"recording.{key}: no effect without recording.folder: nothing is recorded"
    if config.learned.folder is None:
        for key in _changed(config.learned, "every_s"):
            yield f"learned.{key}: no effect without learned.folder: nothing is kept"
    for pool in config.pools:
        place = f"pool {pool.name!r}"
        if pool.admission.hold_s == 0:
            for key in _changed(pool.admission, "hold_requests", "hold_mb"):
                yield f"{place}, admission.{key}: no effect without admission.hold_s: nobody is held"
        if pool.admission.guard.false_alarms is None:
            for key in _changed(pool.admission.guard, "margin", "window", "least"):
                yield f"{place}, admission.guard.{key}: no effect while false_alarms is null: the guard never judges"
        if not pool.fairness.enabled:
            for key in _changed(pool.fairness, "wait_s", "half_life_s"):
                yield f"{place}, fairness.{key}: no effect without fairness.enabled"
        for worker in pool.workers:
            for note in _workers_without_effect(worker):
                yield f"{place}, worker {worker.name!r}, {note}"


def _workers_without_effect(worker: WorkerConfig) -> Iterator[str]:
    settings, rule = worker.settings, worker.cache.rule
    if worker.kv_replay is not None and worker.kv_events is None:
        yield "kv_replay: no effect without kv_events"
    if rule == "sglang":
        for key in _changed(worker.cache, "speculative", "cache_hit_alignment"):
            yield f"cache.{key}: no effect with cache.rule sglang: SGLang's rule of reuse has no such thing"
    for key in _changed(settings, *settings.__struct_fields__):
        why = None
        if key in _NOT_OF[rule]:
            whose = "only SGLang has it" if key in _SGLANGS_OWN else "only vLLM has it, or is followed with it"
            why = f"with cache.rule {rule}: {whose}"
        elif key in _SGLANGS_PRIORITIES and settings.scheduling_policy != "priority":
            why = "unless scheduling_policy is priority"
        elif key == "priority_scheduling_preemption_threshold" and settings.disable_priority_preemption:
            why = "with disable_priority_preemption"
        elif key == "prefill_decode_interval_min_bs" and not settings.prefill_decode_interval:
            why = "without prefill_decode_interval"
        elif key == "long_prefill_token_threshold_adaptive" and not settings.long_prefill_token_threshold:
            why = "without long_prefill_token_threshold"
        if why is not None:
            yield f"settings.{key}: no effect {why}"


def _changed(section: _Section, *keys: str) -> Iterator[str]:
    """Those that were given another value than their default."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(section)}
    return (key for key in keys if getattr(section, key) != defaults[key])


def _shared_addresses(config: Config) -> Iterator[str]:
    """Endpoints and event addresses that several workers have, or one worker twice: each rank has ports of its own."""
    had: dict[str, str] = {}
    for pool in config.pools:
        for worker in pool.workers:
            place = f"pool {pool.name!r}, worker {worker.name!r}"
            for key in ("endpoint", "kv_events", "kv_replay"):
                address = getattr(worker, key)
                for rank in range(1 if address is None or key == "endpoint" else worker.data_parallel_ranks or 1):
                    mine = f"{place}, {key}" if not rank else f"{place}, {key} of rank {rank}"
                    if address is None:
                        continue
                    whose = had.setdefault(port_of_rank(address, rank), mine)
                    if whose != mine:
                        yield f"{mine}: {port_of_rank(address, rank)} is also that of {whose}"


def _is_address(endpoint: str) -> bool:
    try:
        ipaddress.ip_address(endpoint.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
