"""Runs a workload through vLLM's own engine core, scheduler and KV cache manager in virtual time, and writes down what
an outside observer would have seen, and beside it what only the engine knows.

Nothing is computed: the executor answers every step with made-up tokens after the step's known cost. Run by the
interpreter that has vLLM:  python virtual_engine.py MODEL_FOLDER OUT_FILE REQUEST_JSON
"""

import importlib
import json
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}.items():
    os.environ.setdefault(name, value)


def _from(module: str, name: str) -> Any:
    # Only after the environment is set, which vLLM reads when it is imported.
    return getattr(importlib.import_module(module), name)


workloads: Any = importlib.import_module("workloads")
SamplingParams = _from("vllm", "SamplingParams")
EngineArgs = _from("vllm.engine.arg_utils", "EngineArgs")
UsageContext = _from("vllm.usage.usage_lib", "UsageContext")
get_supported_kv_cache_layouts = _from("vllm.v1.attention.backends.utils", "get_supported_kv_cache_layouts")
EngineCore = _from("vllm.v1.engine.core", "EngineCore")
Executor: Any = _from("vllm.v1.executor.abstract", "Executor")
FullAttentionSpec = _from("vllm.v1.kv_cache_interface", "FullAttentionSpec")
DraftTokenIds = _from("vllm.v1.outputs", "DraftTokenIds")
ModelRunnerOutput = _from("vllm.v1.outputs", "ModelRunnerOutput")
Request = _from("vllm.v1.request", "Request")
bfloat16 = _from("torch", "bfloat16")

clock_s = 0.0
PROBE_S = 5.0


class _StepEnd(Future[Any]):
    """A step under way: asking for its result lets the clock run to its end."""

    def __init__(self, ends_s: float, output: Any) -> None:
        super().__init__()
        self.ends_s = ends_s
        self.set_result(output)

    def result(self, timeout: float | None = None) -> Any:
        global clock_s
        clock_s = max(clock_s, self.ends_s)
        return super().result(timeout)


class VirtualExecutor(Executor):  # type: ignore[misc]
    supports_pp = False

    def _init_executor(self) -> None:
        self.free_at_s = 0.0
        self.under_way: Any = None
        self.steps: list[Any] = []
        self.starts: dict[str, int] = {}  # request -> where its tokens of this step begin
        self.known: dict[str, int] = {}  # request -> its prompt and the tokens sampled since
        self.answers: dict[str, Any] = {}  # request -> its output, if that is not made up
        self.drafted: list[str] = []  # the requests that the newest step has drafted for
        self.counts = [0, 0, 0]  # tokens generated, drafted, accepted: what its metrics page would say
        self.rng = np.random.default_rng(77)
        self.luck = np.random.default_rng(79)
        self.noise = np.random.default_rng(78)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if method == "get_kv_cache_spec":
            spec = FullAttentionSpec(
                block_size=self.cache_config.block_size, num_kv_heads=1, head_size=64, dtype=bfloat16
            )
            return [{"layer": spec}]
        if method == "determine_available_memory":
            return [1 << 40]
        if method == "get_supported_kv_cache_layouts":
            return [[layout.name for layout in get_supported_kv_cache_layouts(())]]
        return [None]

    def compile_or_warm_up_model(self) -> None:
        return

    def check_health(self) -> None:
        return

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        ids = list(scheduler_output.num_scheduled_tokens)
        if not ids:
            done: Future[Any] = Future()
            done.set_result(ModelRunnerOutput([], {}))
            return done
        starts = self.starts
        for new in scheduler_output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.known[new.req_id] = len(new.prompt_token_ids)
        cached = scheduler_output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        chunks, decoding, tokens, drafts = [], 0, [], 0
        for req_id in ids:
            start, known = starts[req_id], self.known[req_id]
            end = start + scheduler_output.num_scheduled_tokens[req_id]
            if start == known - 1 and known > self.lengths[req_id]:
                decoding += 1
                drafts += end - known
            else:
                chunks.append((int(req_id), start, end))
            tokens.append(self._sampled(req_id, max(0, 1 + end - known)))
            drafted = max(0, end - known)
            for place, more in enumerate((len(tokens[-1]), drafted, max(0, len(tokens[-1]) - 1))):
                self.counts[place] += more
        self.drafted = [req_id for req_id, sampled in zip(ids, tokens, strict=True) if sampled]
        costs = self.costs
        duration_s = costs.step_s + costs.per_decode_s * decoding + costs.per_token_s * drafts
        duration_s += sum(costs.chunk_s(start, end) for _, start, end in chunks)
        if costs.noise:
            duration_s *= float(np.exp(costs.noise * self.noise.standard_normal()))
        starts_s = max(clock_s, self.free_at_s)
        self.free_at_s = starts_s + duration_s
        self.steps.append((starts_s, self.free_at_s, chunks, decoding))
        output = ModelRunnerOutput(ids, {req_id: at for at, req_id in enumerate(ids)}, sampled_token_ids=tokens)
        self.under_way = _StepEnd(self.free_at_s, output)
        none: Future[Any] = Future()
        none.set_result(None)
        return none if non_block else None

    def _sampled(self, req_id: str, most: int) -> list[int]:
        """One token, and after it as many drafted ones as turn out to be right; nothing while a prompt goes on."""
        sampled: list[int] = []
        while len(sampled) < most and (not sampled or self.luck.random() < self.accepted):
            self.known[req_id] += 1
            sampled.append(self._sample(req_id))
        return sampled

    def take_draft_token_ids(self) -> Any:
        draft = [0] * self.vllm_config.speculative_config.num_speculative_tokens
        return DraftTokenIds(self.drafted, [list(draft) for _ in self.drafted])

    def _sample(self, req_id: str) -> int:
        answer, said = self.answers.get(req_id), self.known[req_id] - self.lengths[req_id] - 1
        if answer is not None and said < len(answer):
            return int(answer[said])
        return int(self.rng.integers(0, 128))

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.under_way if non_block else self.under_way.result()


class Recorder:
    def __init__(self) -> None:
        self.encoder = msgspec.msgpack.Encoder()
        self.records: list[tuple[str, float, Any]] = []

    def publish(self, batch: Any) -> None:
        batch.ts = clock_s
        self.records.append(("kv", clock_s, self.encoder.encode(batch)))

    def shutdown(self) -> None:
        return


def _speculation(tokens: int) -> dict[str, Any] | None:
    return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 4} if tokens else None


def engine_core(settings: Any, costs: Any, model: str) -> Any:
    args = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        block_size=settings.block_size,
        num_gpu_blocks_override=settings.num_gpu_blocks,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        long_prefill_token_threshold_adaptive=settings.long_prefill_token_threshold_adaptive,
        scheduling_policy=settings.scheduling_policy,
        enable_prefix_caching=True,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
        distributed_executor_backend=VirtualExecutor,
        speculative_config=_speculation(getattr(settings, "num_speculative_tokens", 0)),
    )
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    config.scheduler_config.async_scheduling = settings.async_scheduling
    core = EngineCore(config, VirtualExecutor, log_stats=False)
    core.model_executor.costs = costs
    core.model_executor.lengths, core.model_executor.accepted = {}, 0.0
    return core


def run(work: Any, model: str) -> tuple[list[Any], list[Any], dict[int, Any]]:
    global clock_s
    core = engine_core(work.settings, work.costs, model)
    recorder = Recorder()
    core.scheduler.kv_event_publisher = recorder
    core.model_executor.accepted = work.accepted
    lengths, ended = core.model_executor.lengths, 0
    cached: dict[int, Any] = {}
    pending = list(enumerate(work.arrivals))
    generated: dict[int, int] = {}
    pending.reverse()
    probed_s = 0.0
    while ended < len(work.arrivals):
        if pending and not core.scheduler.has_requests() and not core.batch_queue:
            clock_s = max(clock_s, pending[-1][1].at_s)
        while pending and pending[-1][1].at_s <= clock_s:
            number, arrival = pending.pop()
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True, temperature=0.0)
            lengths[str(number)] = arrival.prompt_tokens
            if (answer := arrival.answer_tokens()) is not None:
                core.model_executor.answers[str(number)] = answer
            request = Request(
                str(number),
                arrival.tokens().tolist(),
                params,
                None,
                arrival_time=arrival.at_s,
                priority=arrival.priority or 0,
                block_hasher=core.request_block_hasher,
            )
            core.add_request(request)
        if work.settings.num_speculative_tokens and clock_s >= probed_s + PROBE_S:
            probed_s = clock_s
            recorder.records.append(("drafts", clock_s, list(core.model_executor.counts)))
        outputs, has_run = core.step_fn()
        core.post_step(has_run)
        for output in (item for batch in (outputs or {}).values() for item in batch.outputs):
            number = int(output.request_id)
            if output.new_token_ids and number not in generated:
                generated[number] = 0
                cached[number] = output.prefill_stats.num_cached_tokens if output.prefill_stats else None
                recorder.records.append(("first", clock_s, number))
            generated[number] = generated.get(number, 0) + len(output.new_token_ids)
            if output.finish_reason is not None:
                ended += 1
                recorder.records.append(("end", clock_s, number))
    return recorder.records, core.model_executor.steps, cached


def main() -> None:
    model, out, asked = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    work = workloads.workload(asked["name"], asked.get("count"))
    begun = time.monotonic()
    records, steps, cached = run(work, model)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_bytes(msgspec.msgpack.encode({"records": records, "steps": steps, "cached": cached}))
    partial.rename(out)
    took_s = time.monotonic() - begun
    sys.stdout.write(f"{work.name}: {len(steps)} steps, {clock_s:.0f} s of virtual time in {took_s:.0f} s\n")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # libraries complain at length when they are unloaded in an unexpected order
