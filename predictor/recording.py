"""The lines of a recording: what an outside observer saw of a fleet, one JSON object a line, in the order of time.

Unknown keys and kinds are ignored, so that later versions can be read. Prompts stand as token ids, or as the chained
hashes of their full blocks: then a recording holds no text, and KV events carry the same hashes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
import numpy as np

from predictor.kv_events import Batch, Cleared, KvEvent, MalformedBatch, Removed, Stored, Tier, decode_batch
from predictor.prompt import MAX_BLOCK_SIZE, Tokens

VERSION = 1

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_BlockSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
_Id = Annotated[str, msgspec.Meta(min_length=1)]


class _Record(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True, omit_defaults=True):
    pass


class Header(_Record, frozen=True, tag="header"):
    version: int = 0


class WorkerRecord(_Record, frozen=True, tag="worker"):
    """A worker has come, was restarted, or has changed its settings."""

    t: _Seconds
    worker: _Id
    pool: _Id
    engine: str = "vllm"
    settings: dict[str, Any] = {}
    version: str | None = None
    rank: int | None = None


class DraftingRecord(_Record, frozen=True, tag="drafting"):
    """Tokens that each who decodes on it gets out of a step from now on, and that are drafted for it; averages."""

    t: _Seconds
    worker: _Id
    gain: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0
    drafted: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0


class HashedStored(msgspec.Struct, frozen=True, tag="stored", kw_only=True, omit_defaults=True):
    hashes: str  # base64 of little-endian uint64, as all hashes here
    parent: str | None = None
    tier: Tier = Tier.DEVICE


class HashedRemoved(msgspec.Struct, frozen=True, tag="removed", kw_only=True, omit_defaults=True):
    hashes: str
    tier: Tier = Tier.DEVICE


class HashedCleared(msgspec.Struct, frozen=True, tag="cleared"):
    pass


HashedEvent = HashedStored | HashedRemoved | HashedCleared


class KvRecord(_Record, frozen=True, tag="kv"):
    """A batch of KV events: as published (`payload`, base64 of msgpack), or as hashes (`events`)."""

    t: _Seconds
    worker: _Id
    seq: _Count
    payload: str | None = None
    events: list[HashedEvent] | None = None
    block_size: _BlockSize | None = None


class _Prompted(_Record, frozen=True):
    t: _Seconds
    id: _Id
    pool: _Id
    tokens: str | None = None  # base64 of little-endian uint32
    hashes: str | None = None
    block_size: _BlockSize | None = None  # with `hashes`
    prompt_tokens: _Count | None = None  # with `hashes`, or alone where the prompt was estimated
    max_tokens: _Count | None = None
    bound_s: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class RequestRecord(_Prompted, frozen=True, kw_only=True, tag="request"):
    worker: _Id  # where it really went
    waited_s: _Seconds = 0.0  # before it was decided
    streaming: bool = True


class RefusedRecord(_Prompted, frozen=True, tag="refused"):
    reason: str = ""
    retry_after_s: float | None = None


class FirstTokenRecord(_Record, frozen=True, tag="first_token"):
    t: _Seconds
    id: _Id
    worker: str | None = None  # who served it, where that is another one


class EndRecord(_Record, frozen=True, tag="end"):
    t: _Seconds
    id: _Id
    prompt_tokens: _Count | None = None
    cached_tokens: _Count | None = None
    output_tokens: _Count | None = None
    status: int | None = None
    attempts: int = 1


_OfEngine = WorkerRecord | DraftingRecord | KvRecord
Record = Header | _OfEngine | RequestRecord | RefusedRecord | FirstTokenRecord | EndRecord


class BadRecording(ValueError):
    """A line that is no record; the message names the line, the field, and what was expected."""


class _Kind(msgspec.Struct):
    kind: str


_KIND = msgspec.json.Decoder(_Kind)
_DECODERS: dict[str, msgspec.json.Decoder[Record]] = {
    "header": msgspec.json.Decoder(Header),
    "worker": msgspec.json.Decoder(WorkerRecord),
    "drafting": msgspec.json.Decoder(DraftingRecord),
    "kv": msgspec.json.Decoder(KvRecord),
    "request": msgspec.json.Decoder(RequestRecord),
    "refused": msgspec.json.Decoder(RefusedRecord),
    "first_token": msgspec.json.Decoder(FirstTokenRecord),
    "end": msgspec.json.Decoder(EndRecord),
}


def read_record(line: bytes) -> Record | None:
    """One line; None for a kind that is not known. BadRecording says what is wrong with it."""
    try:
        kind = _KIND.decode(line).kind
        decoder = _DECODERS.get(kind)
        record = None if decoder is None else decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise BadRecording(str(fault)) from fault
    if isinstance(record, (RequestRecord, RefusedRecord)):
        _check_prompt(record)
    if isinstance(record, KvRecord) and (record.payload is None) == (record.events is None):
        raise BadRecording("a kv record has either `payload` or `events`")
    if isinstance(record, Header) and record.version != VERSION:
        raise BadRecording(f"`version` is {record.version}; this program reads version {VERSION}")
    return record


def read_records(lines: Iterable[bytes]) -> Iterator[Record]:
    """All records, with the line's number in what is raised. A last line that was cut off is left out.

    Times that go back a little (several sources write into one recording) are left to the reader of the records.
    """
    last: tuple[int, str] | None = None
    begun = False
    for number, line in enumerate(lines, start=1):
        if last is not None:
            raise BadRecording(f"line {last[0]}: {last[1]}")
        if not line.strip():
            continue
        try:
            record = read_record(line)
        except BadRecording as fault:
            # Only a line that ends is wrong; one that does not was being written when the recorder was stopped.
            if line.endswith(b"\n"):
                raise BadRecording(f"line {number}: {fault}") from fault
            last = number, str(fault)
            continue
        if not begun and not isinstance(record, Header):
            raise BadRecording(f'line {number}: a recording begins with {{"kind":"header","version":{VERSION}}}')
        begun = True
        if record is not None:
            yield record


def write_record(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


# Values inside of records


def encode_tokens(tokens: Tokens) -> str:
    return base64.b64encode(tokens.astype("<u4", copy=False).tobytes()).decode()


def encode_hashes(hashes: Iterable[int]) -> str:
    return base64.b64encode(np.array(list(hashes), "<u8").tobytes()).decode()


def decode_tokens(text: str) -> Tokens:
    return np.frombuffer(_bytes(text, 4, "tokens"), "<u4").astype(np.uint32, copy=False)


def decode_hashes(text: str) -> list[int]:
    hashes: list[int] = np.frombuffer(_bytes(text, 8, "hashes"), "<u8").tolist()
    return hashes


def stand_in_tokens(hashes: Iterable[int], block_size: int) -> Tokens:
    """Tokens of which two blocks are equal exactly where two chained hashes are: whole prefixes, that is.

    So what reads prompts need not know that a recording held hashes. (At one token a block, 32 bits of each.)
    """
    known = np.array(list(hashes), "<u8")
    tokens = np.zeros((len(known), block_size), np.uint32)
    words = known.view("<u4").reshape(-1, 2)
    width = min(2, block_size)
    tokens[:, :width] = words[:, :width]
    return tokens.reshape(-1)


def batch_of(record: KvRecord, default_block_size: int) -> Batch:
    """The events of a record. BadRecording for what is no batch."""
    if record.payload is not None:
        try:
            return decode_batch(_bytes(record.payload, 1, "payload"))
        except MalformedBatch as fault:
            raise BadRecording(f"`payload`: {fault}") from fault
    size = record.block_size or default_block_size
    events: list[KvEvent] = []
    for event in record.events or ():
        match event:
            case HashedStored():
                hashes = decode_hashes(event.hashes)
                parent = None if event.parent is None else decode_hashes(event.parent)[0]
                stored = Stored(
                    tuple(hashes), parent, stand_in_tokens(hashes, size), size, event.tier, None, None, None
                )
                events.append(stored)
            case HashedRemoved():
                events.append(Removed(tuple(decode_hashes(event.hashes)), event.tier))
            case HashedCleared():
                events.append(Cleared())
    return Batch(None, tuple(events), 0)


def _check_prompt(record: RequestRecord | RefusedRecord) -> None:
    if record.tokens is not None:
        decode_tokens(record.tokens)
    elif record.hashes is not None:
        if record.block_size is None or record.prompt_tokens is None:
            raise BadRecording("`hashes` need `block_size` and `prompt_tokens` beside them")
        held = len(decode_hashes(record.hashes)) * record.block_size
        if held > record.prompt_tokens:
            raise BadRecording(f"`hashes` cover {held} tokens, more than the `prompt_tokens`, {record.prompt_tokens}")
    elif record.prompt_tokens is None:
        raise BadRecording("a prompt needs `tokens`, `hashes` or `prompt_tokens`")


def _bytes(text: str, unit: int, field: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as fault:
        raise BadRecording(f"`{field}` is no base64: {fault}") from fault
    if len(raw) % unit:
        raise BadRecording(f"`{field}` has {len(raw)} bytes, which is no multiple of {unit}")
    return raw
