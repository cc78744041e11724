"""LMCache's own in-process cache engine, driven as vLLM's connector drives it, without a GPU: what it tells and knows.

Runs in vLLM's environment with LMCache on the path. Takes options as JSON, writes length-prefixed msgpack records:
`["store", prompt, hit tokens before, payload]` for each prompt, then `["done"]`. Nothing is copied: the connector to a
GPU does nothing, but keys, host memory, lookups and events are LMCache's.
"""

# mypy: disable-error-code="import-not-found"

import json
import os
import random
import struct
import sys
import time
from typing import Any

import msgspec
import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata
from vllm.distributed.kv_events import BlockStored, KVEventBatch

HEADS, HEAD_SIZE = 1, 8


def _nothing(self: object, *arguments: object, **named: object) -> None:
    return None


_Nowhere: Any = type(
    "_Nowhere",
    (GPUConnectorInterface,),
    dict.fromkeys(GPUConnectorInterface.__abstractmethods__, _nothing)
    | {"get_shape": lambda self, tokens: torch.Size((1, 2, tokens, HEADS, HEAD_SIZE))},
)


def engine_of(chunk_tokens: int, host_gib: float) -> LMCacheEngine:
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=chunk_tokens, local_cpu=True, max_local_cpu_size=host_gib, enable_kv_events=True
    )
    metadata = LMCacheMetadata(
        model_name="model",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float16,
        kv_shape=(1, 2, chunk_tokens, HEADS, HEAD_SIZE),
        chunk_size=chunk_tokens,
        role="worker",
    )
    engine = LMCacheEngineBuilder.get_or_create(
        "trace", config, metadata, _Nowhere(), lambda tensor, source: None, lambda told, source: told
    )
    engine.post_init()
    return engine


def prompts(rng: random.Random, conversations: int, turns: int) -> list[list[int]]:
    """Turns of conversations that take turns, each of which begins with one of a few system prompts."""
    systems = [[rng.randrange(30_000) for _ in range(rng.randrange(100, 900))] for _ in range(4)]
    histories = [list(rng.choice(systems)) for _ in range(conversations)]
    asked = []
    for _ in range(turns):
        for history in histories:
            history += [rng.randrange(30_000) for _ in range(rng.randrange(20, 600))]
            asked.append(list(history))
    return asked


def payload_of(engine: LMCacheEngine) -> bytes:
    """What vLLM publishes of it: LMCacheConnectorV1.get_kv_connector_kv_cache_events, then the publisher's encoding."""
    events: list[Any] = [
        BlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=event.block_size,
            lora_id=event.lora_id,
            medium=event.medium,
            lora_name=event.lora_name,
        )
        for event in engine.get_kv_events()
    ]
    return msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0))


def tell(*record: object) -> None:
    packed = msgspec.msgpack.encode(record)
    sys.stdout.buffer.write(struct.pack("<I", len(packed)) + packed)


def main() -> None:
    options = json.loads(sys.argv[1])
    chunk_tokens = options["chunk_tokens"]
    engine = engine_of(chunk_tokens, options["host_gib"])
    for prompt in prompts(random.Random(options["seed"]), options["conversations"], options["turns"]):
        hit = engine.lookup(prompt)
        mask = torch.ones(len(prompt), dtype=torch.bool)
        mask[:hit] = False
        engine.store(prompt, mask=mask)
        tell("store", prompt, hit, payload_of(engine))
    tell("done")
    sys.stdout.buffer.flush()
    os._exit(0)  # its threads would keep the process for another minute


if __name__ == "__main__":
    main()
