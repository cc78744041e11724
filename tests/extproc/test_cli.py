"""The `headway` command, in process where it ends by itself, as a process where it serves."""

import contextlib
import http.server
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from extproc.cli import EXIT_FAILED, EXIT_NOBODY_READS, EXIT_OK, EXIT_USAGE, main

MODEL = Path(__file__).parents[2] / "enginesim" / "model"
QUICK = "shutdown: {notice_s: 0.05, grace_s: 0.2}\n"
POOL = """\
pools:
  - name: m
    workers:
      - {name: w, endpoint: "127.0.0.1:1", kv_events: "tcp://127.0.0.1:1", kv_replay: "tcp://127.0.0.1:2"}
"""


def listen(grpc: int = 0, admin: int = 0) -> str:
    return f'listen: {{grpc: "127.0.0.1:{grpc}", admin: "127.0.0.1:{admin}"}}\n'


class Served:
    """`headway serve` as a process; `stderr` is a pipe that is read only when asked for."""

    def __init__(self, folder: Path, config: str) -> None:
        path = folder / "headway.yaml"
        path.write_text(config)
        command = [sys.executable, "-m", "extproc.cli", "serve", "-c", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def first_line(self, timeout_s: float = 30.0) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert ready, "it said nothing"
        return self.process.stdout.readline()

    def end(self, timeout_s: float = 30.0) -> tuple[int, str]:
        """Waits for its end; exit status and stderr."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stderr

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port: int = listening.getsockname()[1]
    return port


@pytest.fixture
def metrics_page() -> Iterator[str]:
    """The address of an admin port that has the metrics of a filter that has graded nothing."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"# TYPE headway_predictions_graded_total counter\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def written(folder: Path, text: str) -> str:
    path = folder / "headway.yaml"
    path.write_text(text)
    return str(path)


def test_a_good_file_is_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f"pools:\n- name: m\n  tokenizer: {os.path.relpath(MODEL, tmp_path)}\n- name: n\n")
    assert main(["check", "-c", path]) == EXIT_OK
    said = capsys.readouterr()
    first, *notes = said.out.splitlines()
    assert first == f"{path}: good: 2 pool(s), 0 worker(s)"
    # Allowed, and hardly meant: said all the same.
    assert "note: pool 'n': without a tokenizer prompts are estimated, and caches are not credited" in notes
    assert said.err == ""


def test_a_tokenizer_folder_without_a_chat_template_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    assert main(["check", "-c", written(tmp_path, "pools:\n- name: m\n  tokenizer: .\n")]) == EXIT_OK
    assert "note: pool 'm': its tokenizer folder has no chat template" in capsys.readouterr().out


def test_a_path_that_no_file_can_have_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, 'recording: {folder: "a\\0b"}\n')
    assert main(["check", "-c", path]) == EXIT_USAGE
    assert f"{path}:1: recording.folder: " in capsys.readouterr().err


def test_faults_are_told_on_stderr_each_on_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "listen: {grpc: x}\nsurprise: 1\n")
    assert main(["check", "-c", path]) == EXIT_USAGE
    said = capsys.readouterr()
    assert said.out == ""
    first, second = said.err.splitlines()
    assert first == f"{path}:1: listen.grpc: expected host:port"
    assert second.startswith(f"{path}:2: surprise: unknown key; known here: ")


def test_folders_and_model_files_are_checked_in_the_same_round_as_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = written(
        tmp_path,
        "listen: {grpc: '127.0.0.1:9', admin: '127.0.0.1:9'}\n"
        "recording: {folder: file, max_mb: 0}\nlearned: {folder: file}\nsurprise: 1\n"
        "pools:\n- name: m\n  tokenizer: nowhere\n  admission: {hold_s: 3}\n  workers: [{name: w, endpoint: x}]\n",
    )
    assert main(["check", "-c", path]) == EXIT_USAGE
    assert [line.split(": ")[:2] for line in capsys.readouterr().err.splitlines()] == [
        [f"{path}:1", "listen.admin"],
        [f"{path}:2", "recording.max_mb"],
        [f"{path}:2", "recording.folder"],
        [f"{path}:3", "learned.folder"],
        [f"{path}:4", "surprise"],
        [f"{path}:7", "pools[0].tokenizer"],
        [f"{path}:8", "pools[0].admission.hold_s"],
        [f"{path}:9", "pools[0].workers[0].endpoint"],
    ]


def test_a_key_without_effect_is_noted_and_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, POOL.replace("name: w,", "name: w, cache: {rule: sglang}, settings: {draft_slots: 1},"))
    assert main(["check", "-c", path]) == EXIT_OK
    said = capsys.readouterr()
    assert "note: pool 'm', worker 'w', settings.draft_slots: no effect with cache.rule sglang" in said.out
    assert said.err == ""


def test_a_missing_file_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-c", str(tmp_path / "missing.yaml")]) == EXIT_USAGE
    assert "missing.yaml: cannot be read" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    path = written(tmp_path, "recording: {folder: file/below}\nlearned:\n  folder: nowhere\n")
    assert main(["check", "-c", path]) == EXIT_USAGE
    assert capsys.readouterr().err.splitlines() == [
        f"{path}:1: recording.folder: {tmp_path / 'file'} is not a folder",
        f"{path}:3: learned.folder: {tmp_path / 'nowhere'} leads nowhere",
    ]
    # One that is not there yet is made.
    path = written(tmp_path, "recording: {folder: new/below}\nlearned: {folder: .}\n")
    assert main(["check", "-c", path]) == EXIT_OK
    assert not (tmp_path / "new").exists()


def test_broken_model_files_are_faults_of_their_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "pools:\n- {name: m, tokenizer: here}\n- {name: n, tokenizer: there}\n")
    assert main(["check", "-c", path]) == EXIT_USAGE
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{path}:2: pools[0].tokenizer: {tmp_path / 'here' / 'tokenizer.json'}: ")
    assert second.startswith(f"{path}:3: pools[1].tokenizer: {tmp_path / 'there' / 'tokenizer.json'}: ")


def recording(folder: Path, *records: str) -> str:
    path = folder / "recording.jsonl"
    path.write_text("".join(f"{record}\n" for record in records))
    return str(path)


HEADER = '{"kind":"header","version":1}'
WORKER = '{"kind":"worker","t":0,"worker":"w","pool":"m","engine":"vllm","settings":{"block_size":16}}'
ASKED = '{"kind":"request","t":1,"id":"r","pool":"m","worker":"w","prompt_tokens":500,"hashes":"","block_size":16}'


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "no request was recorded: it has no records"),
        ([HEADER], "no request was recorded: it has no records"),
        ([HEADER, WORKER], "no request was recorded: it has 1 of kind 'worker'"),
    ],
)
def test_a_recording_with_nothing_to_predict_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[str], said: str
) -> None:
    path = recording(tmp_path, *records)
    assert main(["backtest", path, "--json", str(tmp_path / "out")]) == EXIT_USAGE
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == f"{path}: {said}"
    assert told.out == ""
    assert not (tmp_path / "out").exists()


def test_a_recording_without_first_tokens_says_that_nothing_was_graded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backtest", recording(tmp_path, HEADER, WORKER, ASKED)]) == EXIT_OK
    assert "nothing could be graded" in capsys.readouterr().out


@contextlib.contextmanager
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe that nobody reads any more, as after `head`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


COMMAND = [sys.executable, "-m", "extproc.cli"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["check", "backtest", "report", "--help", "--version", "backtest --help"])
def test_what_nobody_reads_any_more_ends_quietly(
    tmp_path: Path, metrics_page: str, command: str, unbuffered: str
) -> None:
    arguments = {
        "check": ["check", "-c", written(tmp_path, POOL)],
        "backtest": ["backtest", recording(tmp_path, HEADER, WORKER, ASKED)],
        "report": ["report", metrics_page],
    }.get(command, command.split())
    with closed_pipe() as pipe:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(
            [*COMMAND, *arguments], stdout=pipe, stderr=subprocess.PIPE, env=environment, text=True, check=False
        )
    # What argparse prints by itself it gives up printing without a word.
    printed_by_argparse = unbuffered and command.endswith(("--help", "--version"))
    assert ended.returncode == (EXIT_OK if printed_by_argparse else EXIT_NOBODY_READS)
    # How long a backtest took stands on standard error, and comes last.
    assert ended.stderr == ""


def test_faults_that_nobody_reads_any_more_end_quietly_too(tmp_path: Path) -> None:
    with closed_pipe() as pipe:
        path = written(tmp_path, "surprise: 1\n")
        ended = subprocess.run([*COMMAND, "check", "-c", path], stdout=subprocess.PIPE, stderr=pipe, check=False)
    assert ended.returncode == EXIT_NOBODY_READS
    assert ended.stdout == b""


def test_a_filter_whose_output_nobody_reads_serves_all_the_same(tmp_path: Path, free_port: int) -> None:
    path = written(tmp_path, listen(admin=free_port) + QUICK + POOL)
    with closed_pipe() as pipe:
        process = subprocess.Popen([*COMMAND, "serve", "-c", path], stdout=pipe, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{free_port}/fleet"):
                break
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == EXIT_OK
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("arguments", [[], ["fly"], ["serve"], ["check"], ["check", "-c"]])
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == EXIT_USAGE
    assert "usage: headway" in capsys.readouterr().err


def test_serving_a_bad_file_says_so_and_ends_with_2(tmp_path: Path) -> None:
    with Served(tmp_path, "pools: 5\n") as served:
        code, stderr = served.end()
    assert code == EXIT_USAGE
    assert stderr == f"{tmp_path / 'headway.yaml'}:1: pools: expected a list\n"


@pytest.mark.parametrize("which", ["grpc", "admin"])
def test_a_port_that_is_taken_is_named_and_ends_with_1(tmp_path: Path, taken: int, which: str) -> None:
    with Served(tmp_path, listen(**{which: taken}) + QUICK + POOL) as served:
        code, stderr = served.end()
    assert code == EXIT_FAILED
    (said,) = [line for line in stderr.splitlines() if line.startswith("headway: ")]
    assert str(taken) in said
    assert "Traceback" not in stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with Served(tmp_path, listen() + QUICK + POOL) as served:
        said = served.first_line()
        match = re.fullmatch(r"headway: ext_proc on 127\.0\.0\.1:(\d+), admin on 127\.0\.0\.1:(\d+)\n?", said)
        assert match is not None, said
        admin_port = int(match[2])
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/fleet", timeout=10) as response:
            assert set(json.load(response)["pools"]["m"]["workers"]) == {"w"}
        served.process.send_signal(number)
        code, stderr = served.end()
    assert code == EXIT_OK, stderr
    events = [json.loads(line) for line in stderr.splitlines()]
    # What `headway check` would have noted, for who did not run it.
    assert [event.get("note") for event in events if event["event"] == "config_note"] == [
        "pool 'm': without a tokenizer prompts are estimated, and caches are not credited"
    ]
    # Nobody is at the engine's address, which may be known before the filter listens, or after.
    names = [event["event"] for event in events if event["event"] != "engine_down"]
    assert names == ["config_note", "listening", "draining", "stopped"]


def test_a_log_that_nobody_reads_holds_up_neither_the_start_nor_the_end(tmp_path: Path) -> None:
    with Served(tmp_path, listen() + QUICK + POOL) as served:
        stderr = served.process.stderr
        assert stderr is not None
        # Full from the other side: what the process says next waits for a reader that never comes.
        writing = os.open(f"/proc/{os.getpid()}/fd/{stderr.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        served.first_line()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == EXIT_OK
        os.close(writing)
