"""vLLM's own scheduler and KV cache manager in virtual time, and what somebody outside can see of them.

    python cache_trace.py OPTIONS.json > RECORDS

Nothing is computed: a step yields random tokens. Everything that decides what is cached is vLLM's: `Scheduler`,
`KVCacheManager`, block hashes, eviction, preemption, and the batches of KV events, encoded as its publisher encodes
them. Records are msgpack arrays, each behind its length in four bytes, in the order of events:

    ["asked", id, token ids (u32), salt, adapter, reads cache]   a request came
    ["admitted", id, cached, tokens, before]   first scheduled: what was reused of so many tokens; and what would have
                                               been, had it been looked up when the step began
    ["looked_up", id]                          of what is to be loaded first: it is settled now, and admitted later
    ["resumed", id, cached, tokens]            the same after a preemption
    ["batch", payload]                         published at the end of a step
    ["first", id] ["ended", id]
    ["holds", [hashes]]                        what the device's cache holds now, as the wire names it
    ["done", {...}]                            counts
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import itertools
import json
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workload import Ask, Shape, Workload

_HOLDS_EVERY = 2000  # steps


class Records:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._out = sys.stdout.buffer

    def write(self, *record: object) -> None:
        raw = self._encoder.encode(record)
        self._out.write(struct.pack("<I", len(raw)) + raw)

    # As EventPublisher.

    def publish(self, batch: Any) -> None:
        batch.data_parallel_rank = 0
        self.write("batch", self._encoder.encode(batch))

    def shutdown(self) -> None: ...


class Speculation:
    """What the scheduler asks of a speculative config, with no draft tokens: only the cache's rule is of interest."""

    num_speculative_tokens_per_batch_size = None
    num_speculative_tokens = 0

    def use_eagle(self) -> bool:
        return True

    def use_eagle_block_drop(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False


def groups_of(names: list[str], block_size: int, eagle: bool) -> list[KVCacheGroupSpec]:
    made = []
    for place, name in enumerate(names):
        attention = {"block_size": block_size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
        match name.partition(":"):
            case ["full", _, _]:
                spec: Any = FullAttentionSpec(**attention)
            case ["window", _, tokens]:
                spec = SlidingWindowSpec(**attention, sliding_window=int(tokens))
            case ["mamba", _, _]:
                spec = MambaSpec(
                    block_size=block_size,
                    shapes=((64, block_size),),
                    dtypes=(torch.bfloat16,),
                    mamba_cache_mode="align",
                )
            case _:
                raise SystemExit(f"groups: {name!r} is none of full, window:TOKENS, mamba")
        made.append(KVCacheGroupSpec([f"layer{place}"], spec, is_eagle_group=eagle and place == 0))
    return made


class Engine:
    def __init__(self, options: dict[str, Any], records: Records) -> None:
        block_size: int = options["block_size"]
        self.records = records
        config = vllm_config(options)
        eagle = bool(options.get("eagle"))
        if eagle:
            config.speculative_config = Speculation()
        groups = groups_of(options.get("groups", ["full"]), block_size, eagle)
        cache = KVCacheConfig(num_blocks=options["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
        if "retention" in options:
            cache.prefix_cache_retention_interval = options["retention"]
        config.cache_config.num_gpu_blocks = options["num_blocks"]
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=block_size)
        config.speculative_config = None
        self.connector = self.scheduler.connector
        self._transfers: list[Any] = []  # of the step before: they are through by the end of this one
        if self.connector is not None:
            self._tell_lookups()
        self.scheduler.kv_event_publisher = records
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_size, hash_fn)
        self.asks: dict[str, Ask] = {}
        self.requests: dict[str, Request] = {}
        self.waiting_admission: set[str] = set()
        self.counts = {"steps": 0, "preemptions": 0, "resumed": 0}

    def add(self, ask: Ask) -> None:
        parameters = SamplingParams(
            max_tokens=ask.output_tokens, ignore_eos=True, skip_reading_prefix_cache=not ask.reads_cache
        )
        adapter = None if ask.adapter is None else LoRARequest(ask.adapter, int(ask.adapter[-1]) + 1, f"/{ask.adapter}")
        request = Request(
            ask.id,
            ask.tokens,
            parameters,
            None,
            lora_request=adapter,
            cache_salt=ask.salt,
            block_hasher=self._hasher,
            arrival_time=float(len(self.asks)),
        )
        self.asks[ask.id], self.requests[ask.id] = ask, request
        self.records.write("asked", ask.id, array("I", ask.tokens).tobytes(), ask.salt, ask.adapter, ask.reads_cache)
        self.scheduler.add_request(request)

    def step(self, workload: Workload) -> list[tuple[Ask, list[int]]]:
        """One step; the requests that ended with it, and their outputs."""
        self.counts["steps"] += 1
        queued = itertools.chain(self.scheduler.deferred_waiting, self.scheduler.waiting)
        before = {request.request_id: self._hit(request) for request in itertools.islice(queued, 32)}
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            name, tokens = new.req_id, self.requests[new.req_id].num_tokens
            self.records.write("admitted", name, new.num_computed_tokens, tokens, before.get(name, -1))
        running = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
            if request_id in running.resumed_req_ids:
                self.counts["resumed"] += 1
                self.records.write("resumed", request_id, computed, self.requests[request_id].num_tokens)
        self.counts["preemptions"] += len(scheduled.preempted_req_ids or ())
        ids = list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = self.requests[request_id]
            whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([workload.rng.randrange(100_000)] if whole else [])
        output = ModelRunnerOutput(ids, {name: place for place, name in enumerate(ids)}, sampled)
        if self.connector is not None:
            output.kv_connector_output = self._transferred(scheduled.kv_connector_metadata)
        self.scheduler.update_from_output(scheduled, output)
        ended = []
        for request_id, tokens in zip(ids, sampled, strict=True):
            request = self.requests[request_id]
            if tokens and request.num_output_tokens == 1:
                self.records.write("first", request_id)
            if request.is_finished():
                self.records.write("ended", request_id)
                del self.requests[request_id]
                ended.append((self.asks.pop(request_id), list(request.output_token_ids)))
        if self.counts["steps"] % _HOLDS_EVERY == 0:
            self.tell_what_it_holds()
        return ended

    def _tell_lookups(self) -> None:
        ask = self.connector.get_num_new_matched_tokens

        def told(request: Request, computed: int) -> Any:
            more, loads = ask(request, computed)
            if more and loads:
                self.records.write("looked_up", request.request_id)
            return more, loads

        self.connector.get_num_new_matched_tokens = told

    def _transferred(self, metadata: Any) -> KVConnectorOutput:
        """What the worker side says when the copies of the step before are through. Nothing is copied."""
        done, self._transfers = self._transfers, [metadata.load_jobs, metadata.store_jobs]
        jobs = {job: 1 for kind in done for job in kind}
        received = {job.req_id for job in done[0].values()} if done else set()
        return KVConnectorOutput(
            finished_recving=received or None, kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=jobs)
        )

    def _hit(self, request: Request) -> int:
        hit: int = self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]
        return hit

    def tell_what_it_holds(self) -> None:
        table = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        held = {maybe_convert_block_hash(key[:-4]) for key in table if int.from_bytes(key[-4:], "big") == 0}
        self.records.write("holds", sorted(held))


def vllm_config(options: dict[str, Any]) -> VllmConfig:
    model = ModelConfig(
        model=options["model"], dtype="bfloat16", max_model_len=options["max_model_len"], skip_tokenizer_init=True
    )
    return VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=options["block_size"], enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_num_seqs=options["max_num_seqs"],
            max_model_len=options["max_model_len"],
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        kv_transfer_config=offloading(options),
    )


def offloading(options: dict[str, Any]) -> KVTransferConfig | None:
    blocks = options.get("cpu_blocks")
    if not blocks:
        return None
    # Of one layer with one head of 64, in two bytes: a multiple of a page of memory at 16 tokens and more.
    block_bytes = max(4096, options["block_size"] * 64 * 2 * 2)
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": blocks * block_bytes,
            "self_describing_kv_events": options["self_describing"],
        },
    )


def main() -> None:
    options = json.loads(sys.argv[1])
    records = Records()
    workload = Workload(Shape(**options["shape"]))
    engine = Engine(options, records)
    while not workload.exhausted or engine.requests:
        while not workload.exhausted and len(engine.requests) < workload.shape.at_once:
            engine.add(workload.next_ask())
            if workload.rng.random() < 0.3:
                break
        for ask, output in engine.step(workload):
            workload.answered(ask, output)
    engine.tell_what_it_holds()
    records.write("done", engine.counts)
    sys.stdout.buffer.flush()


main()
