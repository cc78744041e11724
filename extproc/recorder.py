"""Writes down what the filter sees of a fleet, for `headway backtest`: one file for each run of the service.

The event loop only puts things aside; a thread turns them into lines, compresses and writes them. What it cannot keep
up with, or has no space for, is lost and counted, and nobody waits. By default prompts and KV events are written as
hashes whose key is drawn at start and forgotten at the end: such a recording holds no text and no token.
"""

from __future__ import annotations

import base64
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from predictor.admission import Refusal
from predictor.engines.vllm import Drafting, Settings
from predictor.fleet import Decision, Grant, Usage, Wish
from predictor.hashed_events import HashedEvents
from predictor.prompt import BlockHasher, HashFamily, Prompt
from predictor.recording import (
    VERSION,
    DraftingRecord,
    EndRecord,
    FirstTokenRecord,
    Header,
    KvRecord,
    Record,
    RefusedRecord,
    RequestRecord,
    WorkerRecord,
    encode_hashes,
    encode_tokens,
    write_record,
)

# What may wait for the thread.
_MOST_WAITING, _MOST_WAITING_BYTES = 20_000, 64 << 20
# Waking it for each record would cost more than the record; it looks for itself.
_LOOK_EVERY_S, _FLUSH_EVERY_LOOKS = 0.05, 40


class Out(Protocol):
    """A file, as far as it matters here. Its methods may raise OSError."""

    def write(self, data: bytes, /) -> object: ...
    def flush(self) -> object: ...
    def close(self) -> object: ...


class Recorder:
    """`clock` gives monotonic seconds; `lost` is told why a record is missing, from this thread or the other."""

    def __init__(
        self,
        out: Out,
        clock: Callable[[], float],
        hasher: BlockHasher,
        lost: Callable[[str], None],
        keep_tokens: bool = False,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.keep_tokens = keep_tokens
        self._clock = clock
        self._began_s = clock()
        self._lost = lost
        self._left_bytes = max_bytes
        self._hashed = HashedEvents(hasher)
        self._out = out
        self._waiting: deque[tuple[int, Callable[[], Record | None]]] = deque()
        self._put_bytes = self._taken_bytes = 0  # each is changed by one thread only
        self._block_sizes: dict[str, int] = {}
        self._next_seq: dict[str, int] = {}
        self._broken = False
        self._write(write_record(Header(version=VERSION)))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    # What is put aside, on the event loop

    def worker(self, pool: str, worker: str, settings: Settings) -> None:
        """It has come, or runs with other settings than before."""
        at_s = self._now_s()
        self._put(200, lambda: self._worker(at_s, pool, worker, settings))

    def drafting(self, worker: str, drafting: Drafting) -> None:
        at_s = self._now_s()
        self._put(100, lambda: DraftingRecord(t=at_s, worker=worker, gain=drafting.gain, drafted=drafting.drafted))

    def kv(self, worker: str, seq: int, payload: bytes) -> None:
        at_s = self._now_s()
        self._put(len(payload), lambda: self._kv(at_s, worker, seq, payload))

    def decided(self, pool: str, prompt: Prompt, wish: Wish, cache_salt: str | None, decision: Decision) -> None:
        at_s = self._now_s()
        size = 8 * sum(map(len, prompt.hashes.values())) + (4 * prompt.token_count if self.keep_tokens else 0)
        self._put(size, lambda: self._decision(at_s, pool, prompt, wish, cache_salt, decision))

    def first_token(self, ticket_id: str, served_by: str | None) -> None:
        """`served_by`: another worker than the chosen one."""
        at_s = self._now_s()
        self._put(100, lambda: FirstTokenRecord(t=at_s, id=ticket_id, worker=served_by))

    def ended(self, ticket_id: str, usage: Usage, status: int | None, retried: bool) -> None:
        at_s = self._now_s()
        self._put(
            200,
            lambda: EndRecord(
                t=at_s,
                id=ticket_id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
                status=status,
                attempts=2 if retried else 1,
            ),
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is waiting."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _now_s(self) -> float:
        return round(self._clock() - self._began_s, 6)

    def _put(self, size: int, make: Callable[[], Record | None]) -> None:
        if len(self._waiting) >= _MOST_WAITING or self._put_bytes - self._taken_bytes + size > _MOST_WAITING_BYTES:
            self._lost("busy")
            return
        self._put_bytes += size
        self._waiting.append((size, make))

    # What becomes of it, in the thread

    def _run(self) -> None:
        looks = 0
        while not self._closing.wait(_LOOK_EVERY_S):
            self._drain()
            looks += 1
            if looks % _FLUSH_EVERY_LOOKS == 0:
                self._flush()
        self._drain()
        try:
            self._out.close()
        except OSError:
            self._lost("disk")

    def _drain(self) -> None:
        while self._waiting:
            size, make = self._waiting.popleft()
            self._taken_bytes += size
            try:
                record = make()
            except Exception:
                # One record less is better than none at all from here on.
                self._lost("bug")
                continue
            if record is not None:
                self._write(write_record(record))

    def _write(self, line: bytes) -> None:
        if self._broken:
            self._lost("disk")
        elif len(line) > self._left_bytes:
            # A hole in the middle would spoil what follows: from here on it is full.
            self._left_bytes = 0
            self._lost("full")
        else:
            self._left_bytes -= len(line)
            try:
                self._out.write(line)
            except OSError:
                self._broken = True
                self._lost("disk")

    def _flush(self) -> None:
        try:
            self._out.flush()
        except OSError:
            self._broken = True

    def _worker(self, at_s: float, pool: str, worker: str, settings: Settings) -> Record:
        self._block_sizes[worker] = settings.block_size
        return WorkerRecord(t=at_s, worker=worker, pool=pool, settings=asdict(settings))

    def _kv(self, at_s: float, worker: str, seq: int, payload: bytes) -> Record:
        if seq < self._next_seq.get(worker, 0):
            self._hashed.forget(worker)  # the engine was restarted
        self._next_seq[worker] = seq + 1
        if self.keep_tokens:
            return KvRecord(t=at_s, worker=worker, seq=seq, payload=base64.b64encode(payload).decode())
        size = self._block_sizes.get(worker, 0)
        return KvRecord(
            t=at_s, worker=worker, seq=seq, events=self._hashed.read(worker, payload, size), block_size=size or None
        )

    def _decision(
        self, at_s: float, pool: str, prompt: Prompt, wish: Wish, cache_salt: str | None, decision: Decision
    ) -> Record | None:
        tokens, hashes, size = None, None, None
        if self.keep_tokens and prompt.tokens is not None:
            tokens = encode_tokens(prompt.tokens)
        else:
            match decision:
                case Grant(ticket):
                    size = self._block_sizes.get(ticket.worker)
                case Refusal(best=best):
                    size = self._block_sizes.get(best.worker)
            known = None if size is None else prompt.hashes.get(HashFamily(size))
            if known is not None:
                hashes = encode_hashes(known.tolist())
        block_size = None if hashes is None else size
        # Hashes hold the salt already.
        salt = None if tokens is None else cache_salt
        prompt_tokens = None if tokens is not None else prompt.token_count
        match decision:
            case Grant(ticket):
                return RequestRecord(
                    t=at_s,
                    id=wish.ticket_id,
                    pool=pool,
                    worker=ticket.worker,
                    tokens=tokens,
                    hashes=hashes,
                    block_size=block_size,
                    prompt_tokens=prompt_tokens,
                    max_tokens=wish.max_tokens,
                    bound_s=wish.max_queue_wait_s,
                    priority=wish.priority,
                    cache_salt=salt,
                    waited_s=ticket.forecast.already_waited_s,
                    streaming=wish.streaming,
                )
            case Refusal(reason=reason, retry=retry):
                return RefusedRecord(
                    t=at_s,
                    id=wish.ticket_id,
                    pool=pool,
                    tokens=tokens,
                    hashes=hashes,
                    block_size=block_size,
                    prompt_tokens=prompt_tokens,
                    max_tokens=wish.max_tokens,
                    bound_s=wish.max_queue_wait_s,
                    priority=wish.priority,
                    cache_salt=salt,
                    reason=reason.value,
                    retry_after_s=None if retry is None else retry.told_s,
                )
        return None


def open_recording(path: Path) -> Out:
    """A new file, compressed if its name ends in `.zst`. Raises OSError if there is one, or it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("xb")
    if path.suffix != ".zst":
        return file
    return _Packed(file)


class _Packed:
    """A file that is compressed on its way; what is flushed can be read even if the rest never comes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._writer = zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False)

    def write(self, data: bytes, /) -> object:
        return self._writer.write(data)

    def flush(self) -> object:
        self._writer.flush(zstandard.FLUSH_BLOCK)
        return self._file.flush()

    def close(self) -> object:
        self._writer.flush(zstandard.FLUSH_FRAME)
        return self._file.close()
