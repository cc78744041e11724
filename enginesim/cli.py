"""The command line of one simulated engine."""

import argparse
import math
from collections.abc import Callable, Sequence

from enginesim.block_pool import NULL_BLOCKS
from enginesim.settings import CostSettings, SchedulerSettings, SglangSettings
from enginesim.step_time import SPEED_MAX

PORT_MAX = 65535


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Checked options; argparse ends the process with a message that names the flag if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m enginesim", description="A simulated vLLM or SGLang engine.")
    port = _integer(0, PORT_MAX)
    cost, limits = CostSettings(), SchedulerSettings()

    network = parser.add_argument_group("network; port 0 takes a free one")
    network.add_argument("--host", default="127.0.0.1", help="address to listen on")
    network.add_argument("--port", type=port, default=0, help="HTTP")
    network.add_argument("--kv-events-port", type=port, default=0, help="ZMQ PUB of KV cache events")
    network.add_argument("--kv-replay-port", type=port, default=0, help="ZMQ ROUTER that replays them")
    network.add_argument("--kv-events-topic", default="", help="first frame of every event message")
    network.add_argument("--event-format", choices=("map", "array"), default="map", help="as vLLM 0.32 or as 0.22")
    network.add_argument("--buffer-steps", type=_integer(1), default=10_000, help="batches kept for replay")

    parser.add_argument("--family", choices=("vllm", "sglang"), default="vllm", help="which engine it simulates")

    engine = parser.add_argument_group("engine, named as in vLLM")
    engine.add_argument("--model", default="sim", help="name it is served under")
    engine.add_argument("--block-size", type=_integer(1), default=limits.block_size)
    engine.add_argument("--num-gpu-blocks", type=_integer(2), default=limits.num_gpu_blocks)
    engine.add_argument("--max-num-batched-tokens", type=_integer(1), default=limits.max_num_batched_tokens)
    engine.add_argument("--max-num-seqs", type=_integer(1), default=limits.max_num_seqs)
    engine.add_argument("--long-prefill-token-threshold", type=_integer(0), default=0, help="0: none")
    engine.add_argument("--max-model-len", type=_integer(2), default=limits.max_model_len)
    engine.add_argument("--no-prompt-tokens-details", dest="prompt_tokens_details", action="store_false")

    sglang = parser.add_argument_group("engine of the family sglang, named as there; these stand in for vLLM's")
    sglang.add_argument("--page-size", type=_integer(1), default=1)
    sglang.add_argument("--max-total-tokens", type=_integer(2), default=131_072, help="of the KV cache")
    sglang.add_argument("--chunked-prefill-size", type=_integer(1), default=8192)
    sglang.add_argument("--max-prefill-tokens", type=_integer(1), default=16_384)
    sglang.add_argument("--max-running-requests", type=_integer(1), default=2048)
    sglang.add_argument("--schedule-conservativeness", type=_number(0, above=True), default=1.0)
    sglang.add_argument("--decode-log-interval", type=_integer(1), default=40, help="decode steps between events")
    sglang.add_argument("--enable-mixed-chunk", action="store_true", help="decoding goes on beside prompts")
    sglang.add_argument("--prefill-decode-interval", type=_integer(0), default=0, help="decode steps after a prefill")
    sglang.add_argument("--prefill-decode-interval-min-bs", type=_integer(0), default=0, help="while so many decode")
    sglang.add_argument("--load-publish-port", type=port, default=None, help="ZMQ PUB of its load; 0 takes a free one")
    sglang.add_argument("--eagle", action="store_true", help="keys of the cache are pairs of tokens")

    time = parser.add_argument_group("how long a step takes")
    time.add_argument("--step-ms", type=_number(0), default=cost.step_ms, help="every step")
    time.add_argument("--prefill-us-per-token", type=_number(0), default=cost.prefill_us_per_token)
    time.add_argument("--prefill-ns-per-token2", type=_number(0), default=cost.prefill_ns_per_token2)
    time.add_argument("--decode-ms", type=_number(0), default=cost.decode_ms, help="every decoding sequence")
    time.add_argument("--speed", type=_number(0, SPEED_MAX, above=True), default=cost.speed, help="divides all of it")
    time.add_argument("--jitter", type=_number(0, 2), default=cost.jitter, help="sigma of a lognormal factor")
    time.add_argument("--seed", type=_integer(0), default=cost.seed, help="of the jitter")

    rest = parser.add_argument_group("simulator")
    rest.add_argument("--tokens-per-request-default", type=_integer(1), default=16, help="output without max_tokens")
    rest.add_argument("--name", default=None, help="sent back in x-engine-name")
    rest.add_argument("--exit-with-parent", action="store_true", help="end when the parent process does (Linux)")
    return parser.parse_args(arguments)


def scheduler_settings(options: argparse.Namespace) -> SchedulerSettings:
    """The scheduler's part of the options. ValueError if two of them do not go together."""
    if options.family == "sglang":
        return SglangSettings(
            block_size=options.page_size,
            num_gpu_blocks=options.max_total_tokens // options.page_size + NULL_BLOCKS,
            max_num_batched_tokens=options.chunked_prefill_size,
            max_num_seqs=options.max_running_requests,
            max_model_len=options.max_model_len,
            max_prefill_tokens=options.max_prefill_tokens,
            schedule_conservativeness=options.schedule_conservativeness,
            decode_log_interval=options.decode_log_interval,
            eagle=options.eagle,
            enable_mixed_chunk=options.enable_mixed_chunk,
            prefill_decode_interval=options.prefill_decode_interval,
            prefill_decode_interval_min_bs=options.prefill_decode_interval_min_bs,
        )
    return SchedulerSettings(
        block_size=options.block_size,
        num_gpu_blocks=options.num_gpu_blocks,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        max_model_len=options.max_model_len,
    )


def cost_settings(options: argparse.Namespace) -> CostSettings:
    """The cost formula's part of the options."""
    return CostSettings(
        step_ms=options.step_ms,
        prefill_us_per_token=options.prefill_us_per_token,
        prefill_ns_per_token2=options.prefill_ns_per_token2,
        decode_ms=options.decode_ms,
        speed=options.speed,
        jitter=options.jitter,
        seed=options.seed,
    )


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    allowed = f"a whole number from {least} to {most}" if most is not None else f"a whole number of at least {least}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {value}")
        return value

    return convert


def _number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    allowed = f"a number {'above' if above else 'of at least'} {least:g}" + (
        f" and at most {most:g}" if most < math.inf else ""
    )

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text!r}") from None
        if not least <= value <= most or math.isinf(value) or (above and value == least):
            raise argparse.ArgumentTypeError(f"must be {allowed}, not {text}")
        return value

    return convert
