"""Batches of KV events as engines themselves encoded them, for tests that need no engine.

    python -m tests.engine.captures        after `make test-engine`: writes CAPTURES anew

From each engine's cache manager in virtual time: of every kind of event that it publishes a few small batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tests.engine.traces import InProcessLmcache, LmcacheServer, VirtualSglang, VirtualVllm
from tests.engine.workload import Shape

CAPTURES = Path(__file__).parents[1] / "predictor" / "kv_captures.msgpack"
_MOST_BYTES, _OF_A_KIND = 1500, 2


class _Recorded(Protocol):
    def records(self) -> Iterator[list[Any]]: ...


_SHAPE = Shape(requests=300, salted_share=0.3, adapter_share=0.3, system_tokens=40, turn_tokens=30)
_VLLM = VirtualVllm(_SHAPE, num_blocks=120)
_SGLANG = VirtualSglang(_SHAPE, page_size=16, max_total_num_tokens=1920)
_ENGINES: dict[str, _Recorded] = {
    "vllm 0.32": _VLLM,
    "vllm 0.32, sliding window": replace(_VLLM, groups=("full", "window:64"), num_blocks=240),
    "vllm 0.32, mamba": replace(_VLLM, groups=("full", "mamba"), num_blocks=240),
    "vllm 0.32, offloading": replace(_VLLM, cpu_blocks=200),
    "vllm 0.32, offloading by name": replace(_VLLM, cpu_blocks=200, self_describing=False),
    "sglang 0.5.23": _SGLANG,
    "sglang 0.5.23, page size 1": replace(_SGLANG, page_size=1, shape=replace(_SHAPE, most_tokens=120)),
    "sglang 0.5.23, eagle": replace(_SGLANG, eagle=True),
    "sglang 0.5.23, hierarchical cache": replace(_SGLANG, host_ratio=1.5),
    "lmcache 0.5.6 in vllm": InProcessLmcache(chunk_tokens=32, conversations=10, turns=4),
    "lmcache server 0.5.6": LmcacheServer(chunk_tokens=32, chunks=40, restarts_every=15, conversations=10, turns=4),
}


def _of(engine: _Recorded) -> list[bytes]:
    seen: dict[tuple[object, ...], int] = {}
    kept: list[bytes] = []
    for kind, *fields in engine.records():
        if kind not in ("batch", "store") or len(fields[-1]) > _MOST_BYTES:
            continue
        kinds = {_kind(event) for event in msgspec.msgpack.decode(fields[-1])[1]}
        if any(seen.get(one, 0) < _OF_A_KIND for one in kinds):
            kept.append(fields[-1])
            for one in kinds:
                seen[one] = seen.get(one, 0) + 1
    return kept


def _kind(event: dict[str, Any]) -> tuple[object, ...]:
    """Which fields it has, and those of its values that are words."""
    words = ("type", "medium", "kv_cache_spec_kind", "locality")
    return (
        *(event.get(word) for word in words),
        event.get("parent_block_hash") in (None, 0),
        *sorted(key for key, value in event.items() if value is not None),
    )


def main() -> None:
    captures = {name: _of(engine) for name, engine in _ENGINES.items()}
    CAPTURES.write_bytes(msgspec.msgpack.encode(captures))
    for name, payloads in captures.items():
        print(f"{name}: {len(payloads)} batches, {sum(map(len, payloads))} bytes")  # noqa: T201


if __name__ == "__main__":
    main()
