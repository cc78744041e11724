"""The config file: YAML, checked as a whole, every fault named with its file, line and key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml

from predictor.engines.vllm import Settings

_DEFAULTS = Settings()
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_HostPort = Annotated[str, msgspec.Meta(pattern=r"^(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):[0-9]{1,5}$")]
_Zmq = Annotated[str, msgspec.Meta(pattern=r"^(tcp|ipc)://[^\s*]+$")]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Listen(_Section, frozen=True):
    grpc: _HostPort = "0.0.0.0:9002"
    admin: _HostPort = "127.0.0.1:9464"


class Tokenization(_Section, frozen=True):
    """`deadline_s` must stay well below Envoy's `message_timeout`."""

    threads: _Positive = 2
    max_pending: _Positive = 64
    deadline_s: _Seconds = 0.3


class Tickets(_Section, frozen=True):
    max_age_s: _Seconds = 3600.0


class Shutdown(_Section, frozen=True):
    notice_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 20.0


class ProbeSettings(_Section, frozen=True):
    """`interval_s` 0 turns probing off."""

    interval_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0


class Learning(_Section, frozen=True):
    min_samples: _Positive = 8
    min_length_ratio: Annotated[float, msgspec.Meta(ge=1)] = 4.0
    default_tokens_per_s: _Seconds = 2000.0
    default_step_s: _Seconds = 0.01
    share: _Share = 0.1


class Retry(_Section, frozen=True):
    cap_s: _Seconds = 60.0
    jitter: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2


class EngineSettings(_Section, frozen=True):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = _DEFAULTS.block_size
    num_gpu_blocks: _Positive | None = None
    max_num_batched_tokens: _Positive = _DEFAULTS.max_num_batched_tokens
    max_num_seqs: _Positive = _DEFAULTS.max_num_seqs
    long_prefill_token_threshold: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_model_len: _Positive | None = None

    def for_engine(self) -> Settings:
        return Settings(**msgspec.structs.asdict(self))


class WorkerConfig(_Section, frozen=True):
    name: _Name
    endpoint: _HostPort
    kv_events: _Zmq | None = None
    kv_replay: _Zmq | None = None
    settings: EngineSettings = EngineSettings()


class PoolConfig(_Section, frozen=True):
    name: _Name
    models: list[_Name] = []
    tokenizer: str | None = None
    learning: Learning = Learning()
    retry_after: Retry = Retry()
    workers: list[WorkerConfig] = []

    @property
    def model_names(self) -> list[str]:
        return self.models or [self.name]


class Config(_Section, frozen=True):
    listen: Listen = Listen()
    tokenization: Tokenization = Tokenization()
    tickets: Tickets = Tickets()
    shutdown: Shutdown = Shutdown()
    probe: ProbeSettings = ProbeSettings()
    pools: list[PoolConfig] = []


class BadConfig(ValueError):
    """Every fault that was found, one a line, each with its place."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


def load_config(path: Path) -> Config:
    """Reads and checks a config file. Raises BadConfig; relative tokenizer paths are taken from the file's folder."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig([f"{path}: cannot be read: {error}"]) from error
    config = parse_config(text, str(path))
    pools = []
    for pool in config.pools:
        folder = None if pool.tokenizer is None else str(path.parent / pool.tokenizer)
        pools.append(msgspec.structs.replace(pool, tokenizer=folder))
    return msgspec.structs.replace(config, pools=pools)


def parse_config(text: str, name: str) -> Config:
    """Raises BadConfig with every fault, as `name:line: key: what is wrong`."""
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise BadConfig([f"{name}:{line}: not YAML: {error.problem}"]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadConfig([f"{name}: not YAML: {error}"]) from error
    raw = {} if raw is None else raw

    def placed(path: str, problem: str) -> str:
        return f"{name}:{_line(tree, path)}: {path or 'the file'}: {problem}"

    faults = [placed(path, problem) for path, problem in _faults(raw)]
    if faults:
        raise BadConfig(faults)
    return msgspec.convert(raw, Config)


def _faults(raw: object) -> Iterator[tuple[str, str]]:
    """Checks section by section, since a conversion stops at its first fault."""
    if not isinstance(raw, dict):
        yield "", "expected keys and values"
        return
    lone = {key: value for key, value in raw.items() if key != "pools"}
    for key, value in lone.items():
        yield from _convert({key: value}, Config, "")
    pools = raw.get("pools", [])
    if not isinstance(pools, list):
        yield "pools", "expected a list"
        return
    for number, pool in enumerate(pools):
        place = f"pools[{number}]"
        if not isinstance(pool, dict):
            yield place, "expected keys and values"
            continue
        for key, value in pool.items():
            if key not in ("workers", "name"):
                yield from _convert({"name": "-", key: value}, PoolConfig, place)
        yield from _convert({key: value for key, value in pool.items() if key == "name"}, PoolConfig, place)
        workers = pool.get("workers", [])
        if not isinstance(workers, list):
            yield f"{place}.workers", "expected a list"
            continue
        for index, worker in enumerate(workers):
            yield from _convert(worker, WorkerConfig, f"{place}.workers[{index}]")
    yield from _doubles(pools)


def _convert(value: object, kind: type[_Section], place: str) -> Iterator[tuple[str, str]]:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        path = f"{place}{path.rstrip('`')}".lstrip(".")
        unknown = re.search(r"unknown field `(.*)`", problem)
        if unknown:
            known = ", ".join(sorted(_fields(kind, path.removeprefix(place))))
            yield f"{path}.{unknown.group(1)}".lstrip("."), f"unknown key; known here: {known}"
        else:
            yield path, _plain(problem)


def _fields(kind: Any, path: str) -> list[str]:  # noqa: ANN401 - a type annotation may be anything
    """The keys that are known at `path` inside `kind`."""
    for key in re.findall(r"\.?([A-Za-z_]+)", path):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.encode_name == key)
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _plain(problem: str) -> str:
    if "matching regex" in problem and "tcp|ipc" in problem:
        return "expected a ZMQ address to connect to, such as tcp://host:5557 (no *)"
    if "matching regex" in problem:
        return "expected host:port"
    return problem[:1].lower() + problem[1:]


def _doubles(pools: list[Any]) -> Iterator[tuple[str, str]]:
    """Names that must be unique: pools, models over all pools, workers over all pools."""
    seen: dict[tuple[str, object], str] = {}
    for number, pool in enumerate(pools):
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
        for kind, value, where in names:
            if not isinstance(value, str):
                continue
            if (kind, value) in seen:
                yield where, f"{kind} {value!r} is already named at {seen[kind, value]}"
            seen.setdefault((kind, value), where)


def _line(tree: yaml.Node | None, path: str) -> int:
    """The line of a key such as `pools[0].workers[1].endpoint`, or of the nearest one that is there."""
    line = 1
    node = tree
    for key, index in re.findall(r"([A-Za-z_][^.\[\]]*)|\[(\d+)\]", path):
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
