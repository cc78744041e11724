"""`headway stack` as a person starts it, and stops it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "extproc.cli", "stack"]
INTERRUPTED = 130


def environment(folder: Path) -> dict[str, str]:
    """With temporary files in a folder of the test's own."""
    return {**os.environ, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}


def children_of(pid: int) -> set[int]:
    """All that descend from a process and are alive."""
    found: set[int] = set()
    frontier = [pid]
    while frontier:
        parent = frontier.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                new = {int(child) for child in task.read_text().split()} - found
            except OSError:  # it has just ended
                continue
            found |= new
            frontier += new
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A stack without a scene, just started, from a folder that is not the checkout."""
    process = subprocess.Popen(
        COMMAND, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ends_cleanly(process: subprocess.Popen[str], children: set[int], status: int, folder: Path) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "Traceback" not in output
    # Asked to end and waited for, so there is nothing to wait for here.
    assert [pid for pid in children if alive(pid)] == []
    assert list(folder.glob("headway-*")) == []
    return output


def wait_until_up(process: subprocess.Popen[str]) -> str:
    """Reads what it prints until it says how to try it; the address of Envoy's listener."""
    assert process.stdout is not None
    address, printed = "", []
    for line in process.stdout:
        printed.append(line)
        match = re.search(r"(http://127\.0\.0\.1:\d+)/v1/chat/completions", line)
        address = match[1] if match else address
        if "curl" in line:
            return address
    raise AssertionError(f"it ended with status {process.wait()}:\n{''.join(printed)}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_running_stack_ends_when_told(stack: subprocess.Popen[str], tmp_path: Path, number: int) -> None:
    address = wait_until_up(stack)
    children = children_of(stack.pid)
    assert len(children) >= 5  # three engines, the filter, Envoy
    with urllib.request.urlopen(f"{address}/v1/models", timeout=20) as answer:
        assert b'"sim"' in answer.read()
    stack.send_signal(number)
    ends_cleanly(stack, children, 0, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("part", ["the first engine", "the filter", "Envoy"])
def test_a_stack_ends_when_told_so_while_it_starts(
    stack: subprocess.Popen[str], tmp_path: Path, number: int, part: str
) -> None:
    count = {"the first engine": 1, "the filter": 4, "Envoy": 5}[part]
    deadline_s = time.monotonic() + 60
    while len(children := children_of(stack.pid)) < count:
        assert stack.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    stack.send_signal(number)
    seen = children | children_of(stack.pid)
    output = ends_cleanly(stack, seen, INTERRUPTED, tmp_path)
    assert "Where to look" not in output


def test_no_child_outlives_a_stack_that_is_killed(stack: subprocess.Popen[str], tmp_path: Path) -> None:
    wait_until_up(stack)
    children = children_of(stack.pid)
    stack.kill()
    stack.wait()
    deadline_s = time.monotonic() + 15
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_part_that_does_not_start_is_told_with_its_last_words(tmp_path: Path) -> None:
    """Envoy, here: a file of that name that is a program, but not Envoy."""
    folder = tmp_path / "bin"
    folder.mkdir()
    not_envoy = shutil.which("false")
    assert not_envoy is not None
    shutil.copy(not_envoy, folder / "envoy")
    variables = environment(tmp_path) | {"PATH": f"{folder}:{os.environ['PATH']}"}
    ended = subprocess.run(
        [*COMMAND, "--once"], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 1
    assert "envoy ended with status 1" in ended.stderr
    assert "Traceback" not in ended.stderr
    # What was written is there to be read.
    (kept,) = tmp_path.glob("headway-*")
    assert str(kept) in ended.stderr
    assert (kept / "envoy.yaml").exists()


def backtest(recording: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "extproc.cli", "backtest", str(recording)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("name", ["recorded.jsonl", "recorded.jsonl.zst"])
def test_what_a_stack_recorded_can_be_run_again(tmp_path: Path, name: str) -> None:
    recording = tmp_path / name
    process = subprocess.Popen(
        [*COMMAND, "--record", str(recording)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        address = wait_until_up(process)
        children = children_of(process.pid)
        body = b'{"model":"sim","stream":true,"max_tokens":3,"messages":[{"role":"user","content":"Hi"}]}'
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert b"[DONE]" in answer.read()
        process.send_signal(signal.SIGINT)
        output = ends_cleanly(process, children, 0, tmp_path)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
    assert f"headway backtest {recording}" in output
    assert recording.read_bytes().startswith(b"\x28\xb5\x2f\xfd" if name.endswith(".zst") else b'{"kind":"header"')
    ended = backtest(recording)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^all +1 ", ended.stdout, re.MULTILINE), ended.stdout


@pytest.mark.parametrize(
    ("place", "why"), [("missing/recorded.jsonl", "there is no folder"), (".", "this is a folder")]
)
def test_a_recording_that_could_not_be_written_is_told_before_anything_starts(
    tmp_path: Path, place: str, why: str
) -> None:
    command = [*COMMAND, "--once", "--record", place]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"headway: --record {place}: {why}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scene", [[], ["--scene"]])
def test_a_stack_whose_output_nobody_reads_any_more_ends_with_all_its_parts(tmp_path: Path, scene: list[str]) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, *scene], cwd=tmp_path, env=environment(tmp_path), stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    children: set[int] = set()
    while len(children) < 5 and process.poll() is None:
        children |= children_of(process.pid)
        time.sleep(0.01)
    os.close(reading)
    try:
        _, stderr = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, stderr) == (141, "")
    assert [pid for pid in children if alive(pid)] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(240)
def test_the_scene_plays_and_finds_every_prediction_right(tmp_path: Path) -> None:
    recording = tmp_path / "scene.jsonl"
    ended = subprocess.run(
        [*COMMAND, "--once", "--record", str(recording)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^bound 5 s .* 429, retry in \d+ s", ended.stdout, re.MULTILINE)
    assert re.search(r"^follow-up +[\d,]+ +200 ", ended.stdout, re.MULTILINE)
    assert "FAIL" not in ended.stdout
    assert ended.stdout.count("  ok  ") >= 10
    assert list(tmp_path.glob("headway-*")) == []
    again = backtest(recording)
    assert again.returncode == 0, again.stderr
    (graded,) = re.findall(r"^all +(\d+) ", again.stdout, re.MULTILINE)
    assert int(graded) >= 40


def test_an_ordinary_user_can_run_it() -> None:
    """One who may read everything (the interpreter may be root's), and write only temporary files; root becomes one."""
    keep = [
        "--inh-caps=-all,+dac_read_search",
        "--ambient-caps=-all,+dac_read_search",
        "--bounding-set=-all,+dac_read_search",
    ]
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *keep]
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    command = [*(become if os.geteuid() == 0 else []), *COMMAND]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            wait_until_up(process)
            owners = {Path(f"/proc/{pid}").stat().st_uid for pid in children_of(process.pid) if alive(pid)}
            assert owners == {user}
            children = children_of(process.pid)
            process.send_signal(signal.SIGINT)
            ends_cleanly(process, children, 0, folder)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
