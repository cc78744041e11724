"""What the filter writes down of a fleet: complete, bounded, off the event loop, and without a word of any prompt."""

import base64
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from enginesim.settings import CostSettings, SchedulerSettings
from extproc.recorder import Out, Recorder, open_recording
from extproc.recording_file import read_lines
from predictor.admission import Refusal
from predictor.backtest import Backtest
from predictor.engines.vllm import Drafting, Settings
from predictor.fleet import Fleet, Grant, NoWorker, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.kv_events import decode_batch
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt
from predictor.recording import (
    DraftingRecord,
    EndRecord,
    FirstTokenRecord,
    KvRecord,
    Record,
    RefusedRecord,
    RequestRecord,
    WorkerRecord,
    decode_tokens,
    read_records,
)
from tests.fakes.clock import ManualClock
from tests.fakes.waiting import until
from tests.sim.recorded import record_fleet

ENGINE = CostSettings(step_ms=5.0, prefill_us_per_token=30.0, prefill_ns_per_token2=0.037, decode_ms=0.05)


@pytest.fixture(scope="module")
def seen() -> list[Record]:
    """What happens in two simulated engines whose caches evict."""
    limits = SchedulerSettings(num_gpu_blocks=1500)
    return record_fleet(np.random.default_rng(4), [ENGINE, ENGINE], limits, 120, 3.0)


def watched(seen: list[Record], path: Path, keep_tokens: bool, lost: list[str]) -> Path:
    """Lets a recorder see all that through the fleet, as the filter does."""
    clock = ManualClock()
    rng = np.random.default_rng(11)
    hasher = BlockHasher(rng)
    fleet = Fleet([PoolPolicy("m")], hasher, rng)
    recorder = Recorder(open_recording(path), clock, hasher, lost.append, keep_tokens)
    began_s = clock()
    for record in seen:
        if isinstance(record, (WorkerRecord, KvRecord, RequestRecord, FirstTokenRecord, EndRecord)):
            clock.advance(began_s + record.t - clock())
        match record:
            case WorkerRecord():
                settings = Settings(block_size=16, num_gpu_blocks=1500)
                fleet.join("m", WorkerSpec(record.worker, record.worker, settings))
                recorder.worker("m", record.worker, settings)
            case KvRecord(payload=str() as payload):
                raw = base64.b64decode(payload)
                recorder.kv(record.worker, record.seq, raw)
                fleet.apply(record.worker, decode_batch(raw))
            case RequestRecord(tokens=str() as text):
                tokens = decode_tokens(text)
                hashes = {HashFamily(16): hasher.prompt_hashes(tokens, HashFamily(16), Namespace())}
                prompt = Prompt(len(tokens), True, hashes, tokens if keep_tokens else None)
                wish = Wish(record.id, clock(), subset=frozenset([record.worker]))
                decision = fleet.place("m", prompt, wish, clock())
                assert isinstance(decision, Grant)
                recorder.decided("m", prompt, wish, None, decision)
            case FirstTokenRecord():
                fleet.first_token(record.id, None, clock())
                recorder.first_token(record.id, None)
            case EndRecord():
                usage = Usage(record.prompt_tokens, record.cached_tokens, record.output_tokens)
                fleet.finish(record.id, usage, clock())
                recorder.ended(record.id, usage, 200, retried=False)
    recorder.close()
    return path


def test_what_drafts_give_is_written_down(tmp_path: Path) -> None:
    path, clock = tmp_path / "a.jsonl", ManualClock()
    recorder = Recorder(open_recording(path), clock, BlockHasher(np.random.default_rng(1)), pytest.fail)
    clock.advance(2.0)
    recorder.drafting("w", Drafting(gain=2.5, drafted=3.0))
    recorder.close()
    assert list(read_records(read_lines(path)))[1:] == [DraftingRecord(t=2.0, worker="w", gain=2.5, drafted=3.0)]


def test_with_tokens_everything_is_written_as_it_was_seen(seen: list[Record], tmp_path: Path) -> None:
    lost: list[str] = []
    path = watched(seen, tmp_path / "a.jsonl", keep_tokens=True, lost=lost)
    written = list(read_records(read_lines(path)))
    assert not lost
    assert [type(record) for record in written] == [type(record) for record in seen]
    for ours, theirs in zip(written[3:], seen[3:], strict=True):
        assert not isinstance(ours, (RequestRecord, EndRecord)) or ours.id == getattr(theirs, "id", None)
        if isinstance(ours, KvRecord):
            assert isinstance(theirs, KvRecord)
            assert (ours.worker, ours.seq, ours.payload) == (theirs.worker, theirs.seq, theirs.payload)
        if isinstance(ours, RequestRecord):
            assert isinstance(theirs, RequestRecord)
            assert (ours.worker, ours.tokens) == (theirs.worker, theirs.tokens)


def test_hashes_tell_a_backtest_as_much_as_tokens_and_hold_none(seen: list[Record], tmp_path: Path) -> None:
    lost: list[str] = []
    tokens = watched(seen, tmp_path / "tokens.jsonl", keep_tokens=True, lost=lost)
    hashes = watched(seen, tmp_path / "hashes.jsonl", keep_tokens=False, lost=lost)
    assert not lost
    outcomes = []
    for path in (tokens, hashes):
        backtest = Backtest(np.random.default_rng(1))
        backtest.run(read_records(read_lines(path)))
        assert not backtest.left_out
        outcomes.append(backtest.outcomes)
    assert outcomes[0] == outcomes[1]
    assert sum(one.cached_tokens for one in outcomes[0]) > 10_000
    assert all(one.cache == "right" for one in outcomes[0])
    for line in read_lines(hashes):
        assert not {"tokens", "payload", "cache_salt"} & set(json.loads(line))


def test_a_compressed_recording_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl.zst"
    recorder = Recorder(open_recording(path), ManualClock(), BlockHasher(np.random.default_rng(1)), lambda _: None)
    recorder.first_token("a", None)
    recorder._drain()
    recorder._flush()
    assert FirstTokenRecord(t=0.0, id="a") in list(read_records(read_lines(path)))
    recorder.first_token("b", "elsewhere")
    recorder.close()
    assert FirstTokenRecord(t=0.0, id="b", worker="elsewhere") in list(read_records(read_lines(path)))


def test_an_engine_that_was_restarted_names_its_blocks_anew(seen: list[Record], tmp_path: Path) -> None:
    recorder = Recorder(
        open_recording(tmp_path / "a"), ManualClock(), BlockHasher(np.random.default_rng(1)), lambda _: None
    )
    recorder.worker("m", "w0", Settings())
    batches = [record for record in seen if isinstance(record, KvRecord) and record.worker == "w0"][:20]
    for again in range(2):
        for record in batches:
            recorder.kv("w0", record.seq, base64.b64decode(record.payload or ""))
        assert again < 2
    recorder.close()
    written = [record for record in read_records(read_lines(tmp_path / "a")) if isinstance(record, KvRecord)]
    assert [one.events for one in written[:20]] == [one.events for one in written[20:]]
    assert any(one.events for one in written)


def test_refusals_are_written_and_a_pool_without_workers_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    recorder = Recorder(open_recording(tmp_path / "a"), ManualClock(), BlockHasher(rng), lambda _: None)
    prompt = Prompt(100, True, {HashFamily(16): np.array([1, 2], np.uint64)})
    wish = Wish("r1", 0.0, max_queue_wait_s=5.0, max_tokens=64)
    nobody = fleet.place("m", prompt, wish, 0.0)
    assert isinstance(nobody, NoWorker)
    recorder.decided("m", prompt, wish, None, nobody)
    fleet.join("m", WorkerSpec("w0", "w0", Settings()))
    recorder.worker("m", "w0", Settings())
    refused = fleet.place("m", prompt, wish, 10.0)  # the time already waited has used up its bound
    assert isinstance(refused, Refusal)
    recorder.decided("m", prompt, wish, None, refused)
    recorder.close()
    (record,) = [one for one in read_records(read_lines(tmp_path / "a")) if isinstance(one, RefusedRecord)]
    assert (record.id, record.pool, record.bound_s, record.prompt_tokens) == ("r1", "m", 5.0, 100)
    assert (record.block_size, record.reason, record.max_tokens) == (16, "bound_used_up", 64)
    assert record.retry_after_s is not None


# What cannot be kept is lost, counted, and waited for by nobody


class Held(Out):
    """A disk that hangs until it is let go, and fails if it is told to."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.fails = False
        self.written: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        if self.written:  # the header is written at once
            self.free.wait(20)
        if self.fails:
            raise OSError("no space left on device")
        self.written.append(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def recorder_to(out: Out, lost: list[str], max_bytes: int = 1 << 30) -> Recorder:
    return Recorder(out, ManualClock(), BlockHasher(np.random.default_rng(1)), lost.append, True, max_bytes)


def test_a_disk_that_hangs_fills_a_bounded_queue_and_holds_up_nobody() -> None:
    out, lost = Held(), list[str]()
    recorder = recorder_to(out, lost)
    for number in range(25_000):
        recorder.first_token(str(number), None)
    assert 4_900 < len(lost) <= 5_000
    assert set(lost) == {"busy"}
    out.free.set()
    recorder.close(30)
    assert len(out.written) == 25_001 - len(lost)


def test_large_records_are_bounded_by_their_bytes() -> None:
    out, lost = Held(), list[str]()
    recorder = recorder_to(out, lost)
    payload = bytes(1 << 20)
    for number in range(100):
        recorder.kv("w0", number, payload)
    assert 30 < len(lost) <= 37
    out.free.set()
    recorder.close(30)


async def test_a_disk_that_fails_ends_the_recording_and_nothing_else() -> None:
    out, lost = Held(), list[str]()
    recorder = recorder_to(out, lost)
    out.fails = True
    out.free.set()
    for number in range(10):
        recorder.first_token(str(number), None)
    await until(lambda: len(lost) == 10)
    assert set(lost) == {"disk"}
    recorder.close()


def test_a_recording_that_is_full_ends_for_good() -> None:
    out, lost = Held(), list[str]()
    out.free.set()
    recorder = recorder_to(out, lost, max_bytes=400)
    for number in range(20):
        recorder.first_token(str(number), None)
    recorder.first_token("x" * 1000, None)
    recorder.first_token("y", None)
    recorder.close()
    assert sum(map(len, out.written)) <= 400
    assert set(lost) == {"full"}
    assert len(out.written) + len(lost) == 23


def test_what_cannot_be_written_down_is_one_record_less(tmp_path: Path) -> None:
    lost: list[str] = []
    recorder = recorder_to(open_recording(tmp_path / "a"), lost)
    recorder._put(1, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    recorder.first_token("a", None)
    recorder.close()
    assert lost == ["bug"]
    assert list(read_records(read_lines(tmp_path / "a")))[-1] == FirstTokenRecord(t=0.0, id="a")


def test_no_recording_is_written_over_another(tmp_path: Path) -> None:
    open_recording(tmp_path / "a").close()
    with pytest.raises(FileExistsError):
        open_recording(tmp_path / "a")
