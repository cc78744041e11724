"""Runs a workload through SGLang's own scheduler, radix cache and allocators in virtual time, and writes down what an
outside observer would have seen, and beside it what only the engine knows.

Nothing is computed: the worker answers every step with made-up tokens after the step's known cost. Run by the
interpreter that has SGLang, one run a process:  python virtual_engine.py OUT_FILE REQUEST_JSON

SGLang's are the loops (`event_loop_normal`, `event_loop_overlap`), admission, retraction, the cache and the recorder
of KV events. Ours are the model, where requests come from and outputs go to, and the clock. It stands still while the
scheduler thinks, and moves where a real one waits: for a step's result, or for a request.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import absent  # noqa: F401 - before SGLang
import msgspec
import numpy as np
import qwen3
import torch
from sglang.srt.disaggregation.kv_events import EventPublisherFactory
from sglang.srt.distributed import bootstrap
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.managers.tp_worker import BaseTpWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
workloads: Any = importlib.import_module("workloads")

END_TOKEN = workloads.VOCABULARY  # no prompt has it
MODEL = qwen3.MODEL | {"eos_token_id": END_TOKEN}

clock_s = 0.0


class Stalled(RuntimeError):
    """Nothing runs, nothing arrives any more, and requests are left."""


class VirtualWorker(BaseTpWorker):  # type: ignore[misc]
    """In the place of SGLang's worker and its model: the real pools, and steps that only take time."""

    def __init__(self, work: Any) -> None:
        settings = work.settings
        tokens, page = (settings.num_gpu_blocks - 1) * settings.block_size, settings.block_size
        # The pools' sizes matter, their contents are never read.
        no_cache = SimpleNamespace(post_capture_active=False, mem_usage=0.0, size=tokens)
        if page == 1:
            allocator: Any = TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", no_cache, False)
        else:
            allocator = PagedTokenToKVPoolAllocator(tokens, page, torch.bfloat16, "cpu", no_cache, False)
        self._model_runner = SimpleNamespace(
            attn_backend=SimpleNamespace(needs_cpu_seq_lens=True),
            canary_manager=None,
            device="cpu",
            forward_stream=torch.cpu.Stream(),
            graph_memory_usage={},
            graph_time_usage={},
            is_hybrid_swa=False,
            memory_pool_config=(),
            model=None,
            model_config=None,
            mtp_draft_device_pools=(),
            mtp_draft_mamba_pools=(),
            ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch),
            preloaded_weights_bytes=0,
            prefill_aware_swa=False,
            prewarm_sampling=lambda: None,
            req_to_token_pool=ReqToTokenPool(settings.max_num_seqs, settings.max_model_len + 8, "cpu", False),
            shared_read_done_event=None,
            token_to_kv_pool=no_cache,
            token_to_kv_pool_allocator=allocator,
            weight_load_mem_usage=0.0,
            weight_load_time=0.0,
        )
        self.model_runner_list: list[Any] = []
        self.work, self.tokens = work, tokens
        self.answers = [arrival.answer_tokens() for arrival in work.arrivals]
        self.free_at_s = 0.0
        self.steps: list[Any] = []
        self.rng = np.random.default_rng(77)
        self.noise = np.random.default_rng(78)

    @property
    def model_runner(self) -> Any:
        return self._model_runner

    def init_attention_backends(self) -> None: ...

    def init_cuda_graphs(self) -> None: ...

    def get_worker_info(self) -> tuple[Any, ...]:
        settings, pool = self.work.settings, self.model_runner.req_to_token_pool
        # The shorter of a context and the cache, and room for a token.
        longest = min(settings.max_model_len, self.tokens) - 1
        return (
            self.tokens,
            get_schedule().max_prefill_tokens,
            settings.max_num_seqs,
            None,
            longest,
            longest - 5,
            0,
            "cpu",
            self.model_runner.forward_stream,
            pool.size,
            pool.max_context_len,
            self.tokens,
        )

    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        costs = self.work.costs
        chunks, decoding = [], 0
        if batch.forward_mode.is_extend():
            spans = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
            chunks = [(int(request.rid), int(start), int(start + tokens)) for request, start, tokens in spans]
            ends = [end for _, _, end in chunks]
            # Those that decode beside the prompts (mixed chunks) come last.
            decoding = len(batch.decoding_reqs or ())
            chunks = chunks[: len(chunks) - decoding]
        else:
            decoding = len(batch.reqs)
            ends = batch.seq_lens.tolist()
        duration_s = costs.step_s + costs.per_decode_s * decoding
        duration_s += sum(costs.chunk_s(start, end) for _, start, end in chunks)
        if costs.noise:
            duration_s *= float(np.exp(costs.noise * self.noise.standard_normal()))
        starts_s = max(clock_s, self.free_at_s)
        self.free_at_s = starts_s + duration_s
        self.steps.append((starts_s, self.free_at_s, chunks, decoding))
        tokens = self.rng.integers(0, workloads.VOCABULARY, len(ends))
        for at, (request, end) in enumerate(zip(batch.reqs, ends, strict=True)):
            arrival = self.work.arrivals[int(request.rid)]
            said = end - arrival.prompt_tokens
            answer = self.answers[int(request.rid)]
            if self.work.max_tokens_told is not None and said >= arrival.output_tokens - 1:
                tokens[at] = END_TOKEN
            elif answer is not None and 0 <= said < len(answer):
                tokens[at] = answer[said]
        result = GenerationBatchResult(next_token_ids=torch.from_numpy(tokens))
        result.ends_s = self.free_at_s
        return result


class Recorder:
    """Takes what leaves the scheduler: KV events and outputs."""

    def __init__(self, requests: int) -> None:
        self.encoder = msgspec.msgpack.Encoder()
        self.records: list[tuple[str, float, Any]] = []
        self.cached: dict[int, int] = {}
        self.open = requests

    def publish(self, batch: Any) -> None:
        batch.ts, batch.attn_dp_rank = clock_s, 0
        self.records.append(("kv", clock_s, self.encoder.encode(batch)))

    def shutdown(self) -> None: ...

    def send_output(self, output: Any, request: Any = None) -> None:
        for rid, cached, reason in zip(output.rids, output.cached_tokens, output.finished_reasons, strict=True):
            number = int(rid)
            if reason is not None and reason["type"] == "abort":
                raise RuntimeError(f"request {number}: {reason}")
            if number not in self.cached:
                self.cached[number] = cached
                self.records.append(("first", clock_s, number))
            if reason is not None:
                self.open -= 1
                self.records.append(("end", clock_s, number))


class Arrivals:
    """The requests in order of arrival, for the scheduler to fetch."""

    def __init__(self, work: Any) -> None:
        self.work = work
        self.pending = list(enumerate(work.arrivals))
        self.pending.reverse()

    def due(self) -> list[Any]:
        requests = []
        while self.pending and self.pending[-1][1].at_s <= clock_s:
            number, arrival = self.pending.pop()
            told = self.work.max_tokens_told
            most = arrival.output_tokens if told is None else told
            sampling = SamplingParams(max_new_tokens=most, temperature=0.0)
            sampling.normalize(None)
            requests.append(
                TokenizedGenerateReqInput(
                    rid=str(number),
                    input_text=None,
                    input_ids=array("q", arrival.tokens().tolist()),
                    input_embeds=None,
                    mm_inputs=None,
                    token_type_ids=None,
                    sampling_params=sampling,
                    return_logprob=False,
                    logprob_start_len=-1,
                    top_logprobs_num=0,
                    token_ids_logprob=None,
                    stream=True,
                    priority=self.work.arrivals[number].priority,
                )
            )
        return requests

    def wait(self) -> None:
        """Lets the clock run to the next."""
        global clock_s
        if not self.pending:
            raise Stalled("requests wait, and nothing runs that could make room for them")
        clock_s = max(clock_s, self.pending[-1][1].at_s)


class Receiver(SchedulerRequestReceiver):  # type: ignore[misc]
    """SGLang's own but for the socket."""

    def _pull_raw_reqs(self) -> list[Any]:
        return self.recv_from_tokenizer.due()  # type: ignore[no-any-return]


class VirtualScheduler(Scheduler):  # type: ignore[misc]
    """SGLang's own, without sockets, model and wall clock."""

    def __init__(self, server_args: Any, ports: Any, work: Any) -> None:
        self.work = work
        self.idle_turns = 0
        self.arrivals = Arrivals(work)
        self.recorder = Recorder(len(work.arrivals))
        EventPublisherFactory.register_publisher("recorder", lambda **_: self.recorder)
        super().__init__(server_args, ports)

    def init_ipc_channels(self, ports: Any) -> None:
        self.ipc_channels = SchedulerIpcChannels(
            recv_from_tokenizer=self.arrivals,
            recv_from_rpc=None,
            send_to_tokenizer=self.recorder,
            send_to_detokenizer=self.recorder,
            send_metrics_from_scheduler=None,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = self.arrivals

    def init_tp_model_worker(self) -> None:
        self.tp_worker = VirtualWorker(self.work)
        self.tp_worker.model_config = self.model_config
        self.tp_worker.model_runner.model_config = self.model_config

    def init_request_receiver(self) -> None:
        super().init_request_receiver()
        theirs: Any = self.request_receiver
        fields = {name: getattr(theirs, name) for name in theirs.__dataclass_fields__}
        self.request_receiver: Any = Receiver(**fields)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        global clock_s
        clock_s = max(clock_s, result.ends_s)
        self.idle_turns = 0
        super().process_batch_result(batch, result)

    def on_idle(self) -> None:
        super().on_idle()
        self.idle_turns += 1
        if (self.waiting_queue or self.chunked_req) and self.idle_turns <= self.prefill_decode_interval:
            return  # the loop turns so many times for who could decode, and there is nobody
        if self.recorder.open:
            self.arrivals.wait()
        else:
            self.gracefully_exit = True


def scheduler(work: Any, folder: Path) -> VirtualScheduler:
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (folder / "rendezvous").unlink(missing_ok=True)
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/rendezvous"
    os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    settings = work.settings
    arguments = ServerArgs(
        model_path=str(model),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=0,
        context_length=settings.max_model_len,
        page_size=settings.block_size,
        max_total_tokens=(settings.num_gpu_blocks - 1) * settings.block_size,
        chunked_prefill_size=settings.max_num_batched_tokens if settings.enable_chunked_prefill else -1,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_running_requests=settings.max_num_seqs,
        disable_overlap_schedule=not settings.async_scheduling,
        schedule_policy=settings.schedule_policy,
        schedule_conservativeness=settings.schedule_conservativeness,
        enable_mixed_chunk=settings.enable_mixed_chunk,
        prefill_decode_interval=settings.prefill_decode_interval or None,
        enable_priority_scheduling=settings.enable_priority_scheduling,
        schedule_low_priority_values_first=settings.schedule_low_priority_values_first,
        priority_scheduling_preemption_threshold=settings.priority_scheduling_preemption_threshold,
        disable_priority_preemption=settings.disable_priority_preemption,
        # Outputs in between are of no interest; the first and the last always leave.
        stream_interval=1 << 30,
        kv_events_config=json.dumps({"publisher": "recorder"}),
        log_level="error",
    )
    # One process alone binds no cores and shares no memory.
    for name in ("_bind_threads_if_cpu", "_init_cpu_threads_env"):
        setattr(bootstrap, name, lambda **_: None)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    unused = "ipc:///nowhere"
    ports = PortArgs(unused, unused, unused, 0, unused, unused, None, None)
    return VirtualScheduler(arguments, ports, work)


def main() -> None:
    out, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    work = workloads.workload(asked["name"], asked.get("count"))
    begun = time.monotonic()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine = scheduler(work, Path(folder))
        engine.run_event_loop()
    recorder, steps = engine.recorder, engine.tp_worker.steps
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_bytes(
        msgspec.msgpack.encode({"records": recorder.records, "steps": steps, "cached": recorder.cached})
    )
    partial.rename(out)
    took_s = time.monotonic() - begun
    sys.stdout.write(f"{work.name}: {len(steps)} steps, {clock_s:.0f} s of virtual time in {took_s:.0f} s\n")


main()
sys.stdout.flush()
os._exit(0)  # libraries complain at length when they are unloaded in an unexpected order
