"""Starting a simulated engine as a process of its own, for tests and benches."""

import json
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

STOP_MAX_S = 10.0


class EngineProcess:
    """`python -m enginesim FLAGS`, from ready to stopped, as a context manager. RuntimeError if it never gets ready."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "enginesim", "--exit-with-parent", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        first_line = self._process.stdout.readline()
        if not first_line:
            raise RuntimeError(f"enginesim ended with status {self.stop()} before it was ready; its stderr says why")
        ready = json.loads(first_line)
        self.pid: int = ready["pid"]
        self.port: int = ready["port"]
        self.kv_events_endpoint: str = ready["kv_events_endpoint"]
        self.kv_replay_endpoint: str = ready["kv_replay_endpoint"]

    @property
    def url(self) -> str:
        """Root of its HTTP API, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing if it has ended."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_MAX_S) -> int:
        """Wait until it has ended; the exit status. subprocess.TimeoutExpired if it does not."""
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """Have it end, by force if it must be, and wait for that; the exit status."""
        self.send_signal(signal.SIGTERM)
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
