"""The Prometheus page of a vLLM 0.32 engine, as far as routers read it."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesim.scheduler import Totals
from enginesim.settings import SchedulerSettings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_INDEX = "0"


@dataclass(frozen=True, slots=True)
class Gauges:
    """Load as of the end of the last step. `kv_usage_ratio` counts blocks in use, not those merely cached."""

    running: int = 0
    waiting: int = 0
    kv_usage_ratio: float = 0.0


class Histogram:
    """Cumulative counts by upper bound, as Prometheus wants them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self, name: str, labels: Mapping[str, str]) -> Iterator[str]:
        """Bucket, sum and count lines."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            yield _sample(f"{name}_bucket", {**labels, "le": "+Inf" if bound == float("inf") else str(bound)}, total)
        yield _sample(f"{name}_count", labels, total)
        yield _sample(f"{name}_sum", labels, self.sum)


def render(model: str, settings: SchedulerSettings, gauges: Gauges, totals: Totals, ttft_s: Histogram) -> str:
    """The whole page. Counters stand for themselves; gauges are those of the last step."""
    labels = {"engine": ENGINE_INDEX, "model_name": model}
    lines: list[str] = []

    def family(kind: str, name: str, text: str, samples: Iterator[str] | Sequence[str]) -> None:
        lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples))

    def gauge(name: str, text: str, value: float) -> None:
        family("gauge", name, text, [_sample(name, labels, value)])

    def counter(name: str, text: str, value: float) -> None:
        family("counter", name, text, [_sample(name, labels, value)])

    gauge("vllm:num_requests_running", "Requests in model execution batches.", gauges.running)
    gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.", gauges.waiting)
    by_reason = "vllm:num_requests_waiting_by_reason"
    reasons = {"capacity": gauges.waiting, "deferred": 0}
    waiting = [_sample(by_reason, {**labels, "reason": reason}, count) for reason, count in reasons.items()]
    family("gauge", by_reason, "Waiting requests by what they wait for.", waiting)
    gauge("vllm:kv_cache_usage_perc", "Share of the KV cache blocks in use; 1 is all.", gauges.kv_usage_ratio)
    info = "vllm:cache_config_info"
    family("gauge", info, "Settings of the KV cache.", [_sample(info, cache_labels(settings), 1)])

    counter("vllm:prefix_cache_queries_total", "Tokens looked up in the prefix cache.", totals.prefix_cache_queries)
    counter("vllm:prefix_cache_hits_total", "Tokens found in the prefix cache.", totals.prefix_cache_hits)
    counter("vllm:prompt_tokens_total", "Prompt tokens of requests with a first token.", totals.prompt_tokens)
    counter("vllm:generation_tokens_total", "Tokens generated.", totals.generation_tokens)
    counter("vllm:num_preemptions_total", "Preemptions.", totals.preemptions)
    success = "vllm:request_success_total"
    ended = {"stop": 0, "length": totals.finished_requests, "abort": totals.aborted_requests, "error": 0}
    ends = [_sample(success, {**labels, "finished_reason": reason}, count) for reason, count in ended.items()]
    family("counter", success, "Requests that ended, by reason.", ends)
    ttft = "vllm:time_to_first_token_seconds"
    family("histogram", ttft, "From arrival to the first token, in seconds.", ttft_s.samples(ttft, labels))
    return "\n".join(lines) + "\n"


def cache_labels(settings: SchedulerSettings) -> dict[str, str]:
    """CacheConfig as vLLM shows it: every field a string label, and no model name."""
    capacity_tokens = settings.num_gpu_blocks * settings.block_size
    return {
        "block_size": str(settings.block_size),
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": str(settings.block_size),
        "enable_prefix_caching": "True",
        "engine": ENGINE_INDEX,
        "hash_block_size": str(settings.block_size),
        "kv_cache_max_concurrency": str(capacity_tokens / settings.longest_request_tokens),
        "kv_cache_size_tokens": str(capacity_tokens),
        "num_gpu_blocks": str(settings.num_gpu_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
    }


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    escaped = (f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{','.join(escaped)}}} {float(value)}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
