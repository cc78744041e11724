"""Recordings on disk, and `headway backtest` over them."""

import json
from pathlib import Path

import numpy as np
import pytest
import zstandard

from enginesim.settings import CostSettings, SchedulerSettings
from extproc import recording_file
from extproc.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE, main
from extproc.recording_file import read_lines
from predictor.recording import BadRecording, write_record
from tests.sim.recorded import record_fleet

ENGINE = CostSettings(step_ms=5.0, prefill_us_per_token=30.0, prefill_ns_per_token2=0.037, decode_ms=0.05)


@pytest.fixture(scope="module")
def text() -> bytes:
    limits = SchedulerSettings(num_gpu_blocks=20_000)
    return b"".join(map(write_record, record_fleet(np.random.default_rng(3), [ENGINE], limits, 40, 2.0)))


def test_a_compressed_recording_is_read_as_the_plain_one(tmp_path: Path, text: bytes) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.zst"
    plain.write_bytes(text)
    half = text.index(b"\n", len(text) // 2) + 1
    # Two frames, as a recorder leaves them that was started twice.
    packed.write_bytes(zstandard.compress(text[:half]) + zstandard.compress(text[half:]))
    assert list(read_lines(plain)) == list(read_lines(packed)) == text.splitlines(keepends=True)


def test_a_compressed_recording_that_was_cut_off_is_read_to_there(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.zst"
    packed = zstandard.compress(text)
    path.write_bytes(packed[: len(packed) // 2])
    lines = list(read_lines(path))
    assert b"".join(lines) == text[: sum(map(len, lines))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [0.01, 0.5, 0.999])
def test_the_command_says_that_a_recording_was_cut_off_and_how_much_was_read(
    tmp_path: Path, text: bytes, part: float, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a"
    whole = zstandard.compress(text) if packed else text
    path.write_bytes(whole[: round(len(whole) * part)])
    lines = list(read_lines(path))
    asked = any(b'"kind":"request"' in line for line in lines)
    assert main(["backtest", str(path)]) == (EXIT_OK if asked else EXIT_USAGE)
    said = f"{len(lines)} lines, {len(b''.join(lines)) / 1e6:.1f} MB, were read"
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "cut off" in line]
    assert told.startswith(f"{path}: cut off: ")
    assert told.endswith(said)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_said_of_a_recording_that_is_whole(
    tmp_path: Path, text: bytes, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(zstandard.compress(text) if packed else text)
    assert main(["backtest", str(path)]) == EXIT_OK
    assert "cut off" not in capsys.readouterr().err


def test_what_is_packed_very_small_is_unpacked_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(zstandard.compress((b"x" * 999 + b"\n") * 200_000))
    with path.open("rb") as file:
        unpacked = recording_file._Unpacked(file)
        largest = 0
        while unpacked.readinto(bytearray(4096)):
            largest = max(largest, len(unpacked._ready))
    assert largest < 64 << 20
    assert sum(map(len, read_lines(path))) == 200_000_000


def test_damage_is_said(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.zst"
    packed = bytearray(zstandard.compress(text))
    packed[len(packed) // 3 : len(packed) // 2] = bytes(len(packed) // 2 - len(packed) // 3)
    path.write_bytes(packed)
    with pytest.raises(BadRecording, match="damaged"):
        list(read_lines(path))


def test_the_command_prints_a_table_and_writes_the_predictions(
    tmp_path: Path, text: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    recording, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    recording.write_bytes(text)
    assert main(["backtest", str(recording), "--json", str(out)]) == EXIT_OK
    printed = capsys.readouterr()
    assert "by cache estimate" in printed.out
    assert "times real time" in printed.err
    *predictions, last = map(json.loads, out.read_text().splitlines())
    assert len(predictions) == last["summary"]["requests"] == 40
    assert main(["backtest", str(recording), "--json", str(tmp_path / "again")]) == EXIT_OK
    assert (tmp_path / "again").read_bytes() == out.read_bytes()


def test_the_command_can_be_told_the_future(tmp_path: Path, text: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    recording, costs, out = tmp_path / "a.jsonl", tmp_path / "costs.json", tmp_path / "out"
    recording.write_bytes(text)
    costs.write_text('{"a": 30e-6, "b": 37e-12, "c": 0.005, "d": 50e-6}')
    assert main(["backtest", str(recording), "--clairvoyant", str(costs), "--json", str(out)]) == EXIT_OK
    figures = json.loads(out.read_text().splitlines()[-1])["summary"]["all"]
    assert figures["p90_relative"] < 0.001
    costs.write_text('{"speed": 1}')
    capsys.readouterr()
    assert main(["backtest", str(recording), "--clairvoyant", str(costs)]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"{costs}: unknown cost 'speed'")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--what-if", "speed=2"], EXIT_USAGE, "unknown key 'speed'"),
        (["--what-if", "w9:max_num_seqs=2"], EXIT_USAGE, "unknown worker 'w9'; the recording has w0"),
        (["--json", "/nowhere/out"], EXIT_FAILED, "/nowhere/out"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, text: bytes, arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "a.jsonl"
    recording.write_bytes(text)
    assert main(["backtest", str(recording), *arguments]) == status
    assert says in capsys.readouterr().err


def test_a_file_that_is_no_recording_is_named_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.jsonl"
    path.write_text('{"kind":"header","version":1}\n{"kind":"end","t":1.0}\n')
    assert main(["backtest", str(path)]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(f"{path}: line 2: Object missing required field `id`")
    assert main(["backtest", str(tmp_path / "missing")]) == EXIT_FAILED
