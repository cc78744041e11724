"""`python -m bench.goodput.vllm_engines TRACE.jsonl.gz`: the same comparison on engines that run vLLM's own scheduler
and KV cache in virtual time.

`--engine FOLDER` has vLLM in `venv` and a model folder in `model`, as `make test-engine` installs them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from bench.goodput.__main__ import SEED, TRACE_LIMITS, Fleet, best_limit_only, play_trace, policies, show
from bench.goodput.__main__ import trace_capacity_per_s as simulated_capacity_per_s
from enginesim.request import Request
from enginesim.scheduler import Output
from enginesim.settings import CostSettings, SchedulerSettings

_HOME = Path.home() / ".cache" / "headway-vllm"
_LOADS = (1.0, 1.3, 2.0)
_CONTEXT_TOKENS = 131_072


class Step(msgspec.Struct, frozen=True, array_like=True):
    """What `vllm_side.py` answers."""

    seconds: float
    prefilled_tokens: int
    brought: tuple[tuple[int, int, int | None, bool], ...]  # request, new tokens, its cached tokens at first, ended
    payloads: tuple[bytes, ...]


class Cores:
    """One process with vLLM, and as many engine cores in it as are asked for."""

    def __init__(self, home: Path) -> None:
        script = Path(__file__).parent / "vllm_side.py"
        command = [str(home / "venv/bin/python"), "-W", "ignore", str(script), str(home / "model")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._count = 0

    def core(self, limits: SchedulerSettings, costs: CostSettings) -> VllmCore:
        number, self._count = self._count, self._count + 1
        settings = {
            "block_size": limits.block_size,
            "num_gpu_blocks": limits.num_gpu_blocks,
            # vLLM keeps a block for itself, and wants to be able to serve its longest request.
            "max_model_len": min(_CONTEXT_TOKENS, (limits.num_gpu_blocks - 1) * limits.block_size),
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "long_prefill_token_threshold": limits.long_prefill_token_threshold,
            "long_prefill_token_threshold_adaptive": False,
            "scheduling_policy": "fcfs",
            "async_scheduling": False,
        }
        told = {
            "per_token_s": costs.prefill_us_per_token / 1e6,
            "per_token_squared_s": costs.prefill_ns_per_token2 / 1e9,
            "step_s": costs.step_ms / 1e3,
            "per_decode_s": costs.decode_ms / 1e3,
        }
        self.say(number, settings, told)
        return VllmCore(self, number)

    def say(self, *what: object) -> None:
        assert self._process.stdin is not None
        message = msgspec.msgpack.encode(what)
        self._process.stdin.write(struct.pack("<I", len(message)) + message)

    def step(self, number: int) -> Step:
        self.say(number)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.flush()
        head = self._process.stdout.read(4)
        if len(head) < 4:
            raise OSError(f"vLLM's process is gone: exit code {self._process.wait()}; see above for why")
        return msgspec.msgpack.decode(self._process.stdout.read(struct.unpack("<I", head)[0]), type=Step)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may be gone already
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class VllmCore:
    """See `bench.goodput.world.Core`."""

    def __init__(self, cores: Cores, number: int) -> None:
        self._cores, self._number = cores, number
        self._flying: dict[int, Request] = {}
        self._step = Step(0.0, 0, (), ())

    @property
    def has_work(self) -> bool:
        return bool(self._flying)

    def add(self, request: Request) -> None:
        self._flying[request.id] = request
        self._cores.say(self._number, request.id, request.token_ids, request.max_tokens)

    def begin(self) -> tuple[float, int]:
        step = self._step = self._cores.step(self._number)
        return step.seconds, step.prefilled_tokens

    def end(self, now_s: float) -> tuple[list[Output], Callable[[], bytes] | None]:
        del now_s
        outputs = []
        for number, new_tokens, cached_tokens, ended in self._step.brought:
            request = self._flying[number]
            if cached_tokens is not None:
                request.cached_tokens = cached_tokens
            for left in range(new_tokens - 1, -1, -1):
                position = request.output_tokens
                request.token_ids.append(0)
                outputs.append(Output(request, 0, position, "length" if ended and not left else None))
            if ended:
                del self._flying[number]
        payloads = self._step.payloads
        assert len(payloads) <= 1, "vLLM publishes one batch a step"
        return outputs, (lambda: payloads[0]) if payloads else None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.goodput.vllm_engines", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engine", type=Path, default=_HOME, metavar="FOLDER")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--loads", type=float, nargs="+", default=_LOADS)
    parser.add_argument("--only", nargs="+", help="names of policies")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    fleet = Fleet(chosen.engines)
    # The simulator's: the same costs, so that a load is the same number of requests.
    capacity_per_s = simulated_capacity_per_s(fleet, chosen.trace, chosen.requests)
    print(f"seed {SEED}, {fleet}, vLLM's scheduler, capacity {capacity_per_s:.2f} requests/s", flush=True)
    results = []
    for load in chosen.loads:
        scores = []
        for make in policies(fleet, TRACE_LIMITS):
            policy, started_s = make(), time.perf_counter()
            if chosen.only and policy.name not in chosen.only:
                continue
            cores = Cores(chosen.engine)
            try:
                _, got = play_trace(fleet, chosen.trace, chosen.requests, load * capacity_per_s, policy, cores.core)
            finally:
                cores.close()
            scores.append(got)
            print(f"  {load:g} {got.policy}: {got.served:.1%} in {time.perf_counter() - started_s:.0f} s", flush=True)
        results += [{"workload": "vllm", "fleet": str(fleet), "load": load, **asdict(got)} for got in scores]
        shown = {result["policy"] for result in best_limit_only(results[-len(scores) :])}
        show(f"vLLM's scheduler, {fleet}, load {load:g}", [got for got in scores if got.policy in shown])
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
