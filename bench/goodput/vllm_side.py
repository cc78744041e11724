"""Several of vLLM's own engine cores in virtual time, asked over a pipe for one step after the other.

Run by the interpreter that has vLLM:  python vllm_side.py MODEL_FOLDER. Each message, either way, is four bytes of
length and then msgpack. What comes: `[core, settings, costs]` makes a core, `[core, request, tokens, output tokens]`
adds a request to it, `[core]` has it do a step. Only the last is answered: seconds, prompt tokens computed,
`[request, new tokens, cached tokens or null, ended]` of each that got any, and payloads of KV events.
"""

import importlib
import os
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "engine" / "vllm-side"))
virtual: Any = importlib.import_module("virtual_engine")
workloads: Any = importlib.import_module("workloads")


class Core:
    def __init__(self, settings: dict[str, Any], costs: dict[str, float], model: str) -> None:
        self.core = virtual.engine_core(SimpleNamespace(**settings), workloads.Costs(**costs), model)
        self.events = virtual.Recorder()
        self.core.scheduler.kv_event_publisher = self.events
        self.seen: set[str] = set()

    def add(self, number: int, tokens: list[int], output_tokens: int) -> None:
        params = virtual.SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.0)
        self.core.model_executor.lengths[str(number)] = len(tokens)
        hasher = self.core.request_block_hasher
        self.core.add_request(virtual.Request(str(number), tokens, params, None, arrival_time=0.0, block_hasher=hasher))

    def step(self) -> tuple[float, int, list[tuple[int, int, int | None, bool]], list[bytes]]:
        executor, self.events.records = self.core.model_executor, []
        # Only how long a step takes is asked: each core's clock begins anew.
        virtual.clock_s = executor.free_at_s = 0.0
        executor.steps.clear()
        outputs, _ = self.core.step_fn()
        brought = []
        for output in (item for batch in (outputs or {}).values() for item in batch.outputs):
            stats = output.prefill_stats
            cached = stats.num_cached_tokens if stats and output.request_id not in self.seen else None
            self.seen.add(output.request_id)
            ended = output.finish_reason is not None
            brought.append((int(output.request_id), len(output.new_token_ids), cached, ended))
        prefilled = sum(end - start for _, _, chunks, _ in executor.steps for _, start, end in chunks)
        return executor.free_at_s, prefilled, brought, [payload for _, _, payload in self.events.records]


def main() -> None:
    # Libraries print: what they say must not get between answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    cores: dict[int, Core] = {}
    asked = sys.stdin.buffer
    while head := asked.read(4):
        (length,) = struct.unpack("<I", head)
        match msgspec.msgpack.decode(asked.read(length)):
            case [number, dict(settings), costs]:
                cores[number] = Core(settings, costs, sys.argv[1])
            case [number, request, tokens, output_tokens]:
                cores[number].add(request, tokens, output_tokens)
            case [number]:
                answer = msgspec.msgpack.encode(cores[number].step())
                answers.write(struct.pack("<I", len(answer)) + answer)
                answers.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries complain at length when they are unloaded in an unexpected order
