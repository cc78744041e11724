"""One real vLLM engine as a process: started, waited for, and stopped with everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from extproc.stack import free_ports

HERE = Path(__file__).resolve().parent
MODEL = "sim"
TOPIC = "kv-events"

# An engine alone on a quiet machine is ready in half a minute.
_START_MAX_S = 300.0
_STOP_MAX_S = 20.0


class EngineFault(RuntimeError):
    """Says what is missing, or what the engine printed last."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes, in the units and under the names of the simulator's flags."""

    step_ms: float = 8.0
    prefill_us_per_token: float = 100.0
    prefill_ns_per_token2: float = 2.0
    decode_ms: float = 0.3

    def flags(self) -> tuple[str, ...]:
        """For the simulator."""
        return tuple(text for key, value in asdict(self).items() for text in (f"--{key.replace('_', '-')}", str(value)))


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Named as vLLM's flags. The cache must hold one request of `max_model_len` tokens."""

    block_size: int = 32
    num_gpu_blocks: int = 2049
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    long_prefill_token_threshold: int = 0
    max_model_len: int = 32_768
    num_speculative_tokens: int = 0  # drafted by n-gram lookup: it needs no other model
    cost: StepCost = field(default_factory=StepCost)

    def flags(self) -> tuple[str, ...]:
        values = {
            "block-size": self.block_size,
            "num-gpu-blocks-override": self.num_gpu_blocks,
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "max-num-seqs": self.max_num_seqs,
            "long-prefill-token-threshold": self.long_prefill_token_threshold,
            "max-model-len": self.max_model_len,
        }
        flags = tuple(text for name, value in values.items() for text in (f"--{name}", str(value)))
        if not self.num_speculative_tokens:
            return flags
        drafts = {"method": "ngram", "num_speculative_tokens": self.num_speculative_tokens, "prompt_lookup_max": 4}
        return (*flags, "--speculative-config", json.dumps(drafts))

    def simulator_flags(self) -> tuple[str, ...]:
        """The same engine, simulated."""
        flags = ("num-gpu-blocks" if flag == "--num-gpu-blocks-override" else flag for flag in self.flags())
        return (*(f"--{flag}" if flag == "num-gpu-blocks" else flag for flag in flags), *self.cost.flags())


class RealEngine:
    """A context manager: vLLM on loopback ports of its own. EngineFault if it does not get ready.

    `restart` ends it and starts another on the same ports, as a crashed engine comes back.
    """

    def __init__(self, log_folder: Path, settings: EngineSettings) -> None:
        self.settings = settings
        self.port, self._events_port, self._replay_port = free_ports(3)
        self.started_in_s = 0.0
        self._log = log_folder / f"engine-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def kv_events_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._events_port}"

    @property
    def kv_replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._replay_port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        """Ends the whole process group and waits until none of it is left."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + _STOP_MAX_S
        while _group_lives(process) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def request(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
        """One plain request, POST if there is a body: the status, and the body as JSON or text."""
        return http_request(f"{self.url}{path}", body, headers)

    def _start(self) -> None:
        home = engine_home()
        # vLLM binds where the address has a wildcard, and connects otherwise.
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self._replay_port}",
            "topic": TOPIC,
        }
        command = [
            *(str(home / "venv" / "bin" / "python"), "-W", "ignore::DeprecationWarning", "-m", "headway_engine"),
            *("--model", str(home / "model"), "--served-model-name", MODEL, "--load-format", "dummy"),
            *("--dtype", "bfloat16", "--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enable-prompt-tokens-details", "--trust-request-chat-template", "--kv-cache-memory-bytes", "256M"),
            *("--kv-events-config", json.dumps(events)),
            *self.settings.flags(),
        ]
        started_s = time.monotonic()
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(self.settings.cost),
                start_new_session=True,
            )
        while not self._healthy():
            if self._process.poll() is not None:
                raise EngineFault(f"vLLM ended with status {self._process.returncode}:\n{self.log_tail()}")
            if time.monotonic() - started_s > _START_MAX_S:
                raise EngineFault(f"vLLM was not ready in {_START_MAX_S:g} s:\n{self.log_tail()}")
            time.sleep(0.2)
        self.started_in_s = time.monotonic() - started_s

    def _healthy(self) -> bool:
        try:
            return self.request("/health")[0] == 200
        except OSError:
            return False


def engine_home() -> Path:
    """Where setup.sh has put vLLM. EngineFault if it has not."""
    home = Path(os.environ.get("HEADWAY_ENGINE_HOME") or Path.home() / ".cache" / "headway-vllm")
    if not (home / ".installed").exists():
        raise EngineFault(f"there is no vLLM in {home}: run `make test-engine`, or tests/engine/setup.sh before")
    return home


def sglang_home() -> Path:
    """Where setup-sglang.sh has put SGLang. EngineFault if it has not."""
    home = Path(os.environ.get("HEADWAY_SGLANG_HOME") or Path.home() / ".cache" / "headway-sglang")
    if not (home / ".installed").exists():
        raise EngineFault(
            f"there is no SGLang in {home}: run `make test-engine`, or tests/engine/setup-sglang.sh before"
        )
    return home


def http_request(url: str, body: object = None, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """POST if there is a body (bytes as they are, anything else as JSON); the status, and the body as JSON or text."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            status, raw = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def _environment(cost: StepCost) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(HERE / "vllm-side"),
        "HEADWAY_PARENT_PID": str(os.getpid()),
        "HEADWAY_STEP_COST": json.dumps(asdict(cost)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _group_lives(leader: subprocess.Popen[bytes]) -> bool:
    """Whether any process of the group is there. The leader must be reaped, or it would count."""
    leader.poll()
    try:
        os.killpg(leader.pid, 0)
    except ProcessLookupError:
        return False
    return True
