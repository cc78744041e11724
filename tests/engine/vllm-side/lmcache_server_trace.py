"""What LMCache's multiprocess server tells of its memory, on its way to vLLM's stream, without a GPU or a socket.

Runs in vLLM's environment with LMCache on the path. Takes options as JSON, writes the records of lmcache_trace.py, and
`["batch", payload]` of a step without a prompt.

LMCache's are the server's event log (`KVEventModule`), the worker's side of the subscription, its connector to vLLM,
and chunk hashes. Ours is what the memory does: it holds so many chunks, evicts those that were used least recently, and
now and then comes back as another incarnation, empty.
"""

# mypy: disable-error-code="import-not-found"

import json
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBus
from lmcache.v1.multiprocess.modules.kv_events import KVEventModule
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache_trace import prompts, tell
from vllm.distributed.kv_events import KVEventBatch

MODEL, _LOG_SIZE, _AT_ONCE = "model", 1 << 16, 256


class Server:
    """The server's memory and its event log."""

    def __init__(self, chunk_tokens: int, chunks: int) -> None:
        self.chunk_tokens, self.chunks = chunk_tokens, chunks
        self.hasher = TokenHasher(chunk_tokens)
        self.held: dict[bytes, None] = {}  # the least recently used first
        self.bus = EventBus()
        self.log = KVEventModule(SimpleNamespace(event_bus=self.bus), _LOG_SIZE)

    def lookup(self, prompt: list[int]) -> int:
        hit = 0
        for name in self.hasher.compute_chunk_hashes(prompt):
            if name not in self.held:
                break
            self.held[name] = self.held.pop(name)
            hit += self.chunk_tokens
        return hit

    def store(self, prompt: list[int], hit: int) -> None:
        names, first, size = self.hasher.compute_chunk_hashes(prompt), hit // self.chunk_tokens, self.chunk_tokens
        new = names[first:]
        if not new:
            return
        self._publish(
            EventType.MP_TOKENS,
            chunk_hashes=new,
            token_chunks=[prompt[at * size : (at + 1) * size] for at in range(first, len(names))],
            parent_hashes=[names[at - 1] if at else None for at in range(first, len(names))],
        )
        for name in new:
            self.held.pop(name, None)
            self.held[name] = None
        self._publish(EventType.L1_WRITE_FINISHED, keys=[self._key(name) for name in new])
        gone = list(self.held)[: max(0, len(self.held) - self.chunks)]
        for name in gone:
            del self.held[name]
        if gone:
            self._publish(EventType.L1_KEYS_EVICTED, keys=[self._key(name) for name in gone])

    def _publish(self, kind: Any, **metadata: object) -> None:
        self.bus.publish(Event(event_type=kind, metadata=metadata))
        self.bus._drain_all()

    @staticmethod
    def _key(name: bytes) -> ObjectKey:
        return ObjectKey(chunk_hash=name, model_name=MODEL, kv_rank=0)


class Worker:
    """LMCache's side in an engine's worker: subscribed, without a socket to the server."""

    def __init__(self, chunk_tokens: int) -> None:
        counter = SimpleNamespace(inc=lambda *_: None, set=lambda *_: None)
        self.adapter = object.__new__(LMCacheMPWorkerAdapter)
        self.adapter.__dict__.update(
            lmcache_tokens_per_chunk=chunk_tokens,
            _kv_event_lock=threading.RLock(),
            _kv_events=[],
            _kv_events_generated=counter,
            _kv_events_buffered=counter,
            _kv_event_batches=counter,
            _kv_event_resyncs=defaultdict(lambda: counter),
            _kv_event_incarnation=None,
            _announced_kv_hashes=set(),
        )
        self.connector = object.__new__(LMCacheMPConnector)
        self.connector.__dict__.update(
            _enable_kv_events=True, worker_adapter=SimpleNamespace(get_kv_events=self._drained)
        )
        self.cursor = 0

    def listen(self, log: KVEventModule) -> None:
        while True:
            batch = log.read_kv_events(MODEL, self.cursor, _AT_ONCE)
            self.cursor = batch.next_cursor
            self.adapter._apply_kv_event_batch(batch)
            if len(batch.events) < _AT_ONCE:
                return

    def payload(self) -> bytes:
        """What vLLM publishes of it."""
        told = self.connector.get_kv_connector_kv_cache_events()
        events = [] if told is None else list(told.get_all_events())
        return msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=0))

    def _drained(self) -> list[Any]:
        events: list[Any] = self.adapter._kv_events
        self.adapter._kv_events = []
        return events


def main() -> None:
    options = json.loads(sys.argv[1])
    chunk_tokens, restarts_every = options["chunk_tokens"], options["restarts_every"]
    server, worker = Server(chunk_tokens, options["chunks"]), Worker(chunk_tokens)
    counts: Counter[str] = Counter()
    asked = prompts(random.Random(options["seed"]), options["conversations"], options["turns"])
    for number, prompt in enumerate(asked, 1):
        hit = server.lookup(prompt)
        server.store(prompt, hit)
        worker.listen(server.log)
        tell("store", prompt, hit, worker.payload())
        counts["asked"] += 1
        if number % restarts_every == 0:
            server = Server(chunk_tokens, options["chunks"])
            worker.cursor = 0  # it subscribes anew
            worker.listen(server.log)
            tell("batch", worker.payload())  # of the engine's next step
            counts["restarts"] += 1
    tell("done", counts)
    sys.stdout.buffer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
