"""The lines of a recording: what is read, and what is refused with its place."""

import base64
import contextlib
import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.kv_events import Cleared, Removed, Stored, Tier
from predictor.prompt import BlockHasher, HashFamily, Namespace, as_tokens
from predictor.recording import (
    BadRecording,
    DraftingRecord,
    EndRecord,
    FirstTokenRecord,
    HashedCleared,
    HashedRemoved,
    HashedStored,
    Header,
    KvRecord,
    Record,
    RefusedRecord,
    RequestRecord,
    WorkerRecord,
    batch_of,
    decode_hashes,
    decode_tokens,
    encode_hashes,
    encode_tokens,
    read_record,
    read_records,
    stand_in_tokens,
    write_record,
)

HEADER = b'{"kind":"header","version":1}\n'
TOKENS = encode_tokens(as_tokens([1, 2, 70_000]))


def request(**changes: object) -> bytes:
    fields = {"kind": "request", "t": 1.0, "id": "r1", "pool": "m", "worker": "w0", "tokens": TOKENS} | changes
    return json.dumps({key: value for key, value in fields.items() if value is not ...}).encode() + b"\n"


# What is read


def test_the_example_of_the_format_is_read_to_the_letter() -> None:
    lines = [
        HEADER,
        b'{"kind":"worker","t":0.0,"worker":"w0","pool":"m","engine":"vllm","settings":{"block_size":16,'
        b'"num_gpu_blocks":4096,"async_scheduling":false,"scheduling_policy":"fcfs"}}\n',
        b'{"kind":"kv","t":1.2,"worker":"w0","seq":17,"payload":"kAE="}\n',
        b'{"kind":"request","t":1.0,"id":"r1","pool":"m","worker":"w0","tokens":"AQAAAA==","max_tokens":null,'
        b'"bound_s":null,"priority":0,"cache_salt":null,"lora_name":null}\n',
        b'{"kind":"first_token","t":1.9,"id":"r1"}\n',
        b'{"kind":"end","t":4.0,"id":"r1","prompt_tokens":812,"cached_tokens":256,"output_tokens":120,"status":200}\n',
        b'{"kind":"refused","t":5.0,"id":"r2","pool":"m","tokens":"AQAAAA==","bound_s":10.0,"reason":"queue_wait",'
        b'"retry_after_s":12.0}\n',
    ]
    header, worker, kv, asked, first, end, refused = read_records(lines)
    assert header == Header(version=1)
    assert isinstance(worker, WorkerRecord)
    assert worker.settings["num_gpu_blocks"] == 4096
    assert isinstance(kv, KvRecord)
    assert (kv.seq, kv.payload) == (17, "kAE=")
    assert isinstance(asked, RequestRecord)
    assert decode_tokens(asked.tokens or "").tolist() == [1]
    assert first == FirstTokenRecord(t=1.9, id="r1")
    assert end == EndRecord(t=4.0, id="r1", prompt_tokens=812, cached_tokens=256, output_tokens=120, status=200)
    assert isinstance(refused, RefusedRecord)
    assert (refused.bound_s, refused.retry_after_s) == (10.0, 12.0)


def test_unknown_kinds_and_keys_are_ignored() -> None:
    lines = [HEADER, b'{"kind":"weather","t":1}\n', b'{"kind":"first_token","t":1.0,"id":"a","mood":"good"}\n', b"\n"]
    assert [type(record) for record in read_records(lines)] == [Header, FirstTokenRecord]


def test_a_last_line_that_was_cut_off_is_left_out() -> None:
    assert list(read_records([HEADER, request()[:-20]])) == [Header(version=1)]


records = st.one_of(
    st.builds(
        WorkerRecord,
        t=st.floats(0, 1e9),
        worker=st.text(min_size=1),
        pool=st.text(min_size=1),
        settings=st.dictionaries(st.text(), st.one_of(st.integers(-(2**53), 2**53), st.booleans(), st.none())),
        version=st.none() | st.text(),
        rank=st.none() | st.integers(0, 64),
    ),
    st.builds(
        DraftingRecord,
        t=st.floats(0, 1e9),
        worker=st.text(min_size=1),
        gain=st.floats(1, 1000),
        drafted=st.floats(0, 1000),
    ),
    st.builds(
        RequestRecord,
        t=st.floats(0, 1e9),
        id=st.text(min_size=1),
        pool=st.text(min_size=1),
        worker=st.text(min_size=1),
        tokens=st.lists(st.integers(0, 2**32 - 1)).map(lambda ids: encode_tokens(as_tokens(ids))),
        max_tokens=st.none() | st.integers(0, 10**6),
        bound_s=st.none() | st.floats(5, 300),
        cache_salt=st.none() | st.text(),
        waited_s=st.floats(0, 100),
    ),
    st.builds(
        KvRecord,
        t=st.floats(0, 1e9),
        worker=st.text(min_size=1),
        seq=st.integers(0, 2**40),
        payload=st.none(),
        events=st.lists(
            st.one_of(
                st.builds(
                    HashedStored,
                    hashes=st.lists(st.integers(0, 2**64 - 1), min_size=1).map(encode_hashes),
                    parent=st.none() | st.integers(0, 2**64 - 1).map(lambda one: encode_hashes([one])),
                    tier=st.sampled_from(Tier),
                ),
                st.builds(HashedRemoved, hashes=st.lists(st.integers(0, 2**64 - 1)).map(encode_hashes)),
                st.just(HashedCleared()),
            )
        ),
        block_size=st.integers(1, 4096),
    ),
    st.builds(EndRecord, t=st.floats(0, 1e9), id=st.text(min_size=1), cached_tokens=st.none() | st.integers(0, 10**6)),
)


@given(written=st.lists(records, max_size=5))
def test_what_is_written_is_read_again(written: list[Record]) -> None:
    assert list(read_records([HEADER, *map(write_record, written)])) == [Header(version=1), *written]


# What is refused


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"nonsense\n", "malformed"),
        (b"[1]\n", "Expected `object`"),
        (b'{"t":1}\n', "missing required field `kind`"),
        (request(t="soon"), r"Expected `float`, got `str` - at `\$.t`"),
        (request(t=-1.0), r">= 0.*`\$.t`"),
        (request(id=""), r"length >= 1 - at `\$.id`"),
        (request(worker=...), "missing required field `worker`"),
        (request(tokens="AQA="), "`tokens` has 2 bytes, which is no multiple of 4"),
        (request(tokens="!!"), "`tokens` is no base64"),
        (request(tokens=...), "needs `tokens`, `hashes` or `prompt_tokens`"),
        (request(tokens=..., hashes=encode_hashes([1])), "`hashes` need `block_size` and `prompt_tokens`"),
        (
            request(tokens=..., hashes=encode_hashes([1, 2]), block_size=16, prompt_tokens=31),
            "`hashes` cover 32 tokens, more than the `prompt_tokens`, 31",
        ),
        (request(tokens=..., hashes=encode_hashes([1]), block_size=0, prompt_tokens=31), r">= 1 - at `\$.block_size`"),
        (b'{"kind":"kv","t":1.0,"worker":"w0","seq":1}\n', "either `payload` or `events`"),
        (b'{"kind":"kv","t":1.0,"worker":"w0","seq":-1,"payload":""}\n', r">= 0 - at `\$.seq`"),
        (b'{"kind":"header","version":9}\n', "`version` is 9; this program reads version 1"),
        (b"\xff\xfe\n", "malformed"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line_and_field(line: bytes, says: str) -> None:
    with pytest.raises(BadRecording, match=f"line 2: .*{says}"):
        list(read_records([HEADER, line, request()]))


def test_a_file_that_does_not_begin_with_a_header_is_no_recording() -> None:
    with pytest.raises(BadRecording, match=r"line 1: a recording begins with \{\"kind\":\"header\""):
        list(read_records([request()]))


def test_a_broken_line_in_the_middle_is_no_cut_off_end() -> None:
    with pytest.raises(BadRecording, match="line 2"):
        list(read_records([HEADER, request()[:-20], request()]))


@given(junk=st.binary(max_size=200))
@hypothesis_settings(max_examples=300)
def test_junk_is_refused_and_nothing_else_happens(junk: bytes) -> None:
    with contextlib.suppress(BadRecording):
        read_record(junk)


@given(
    position=st.integers(0, 400),
    byte=st.integers(0, 255),
    line=st.sampled_from(
        [
            request(),
            request(tokens=..., hashes=encode_hashes([1, 2]), block_size=16, prompt_tokens=40),
            b'{"kind":"kv","t":1.2,"worker":"w0","seq":17,"payload":"' + base64.b64encode(msgspec.msgpack.encode(
                [1.0, [{"type": "BlockRemoved", "block_hashes": [1, 2]}], 0]
            )) + b'"}\n',
            b'{"kind":"kv","t":1.2,"worker":"w0","seq":17,"block_size":16,"events":[{"type":"cleared"}]}\n',
        ]
    ),
)  # fmt: skip
@hypothesis_settings(max_examples=300)
def test_a_line_with_one_byte_wrong_is_read_or_refused(position: int, byte: int, line: bytes) -> None:
    at = position % len(line)
    changed = line[:at] + bytes([byte]) + line[at + 1 :]
    try:
        record = read_record(changed)
        if isinstance(record, KvRecord):
            batch_of(record, 16)
    except BadRecording:
        pass


# Hashes instead of tokens


def test_events_as_hashes_are_events_over_tokens_that_stand_in() -> None:
    events: list[HashedStored | HashedRemoved | HashedCleared] = [
        HashedStored(hashes=encode_hashes([5, 6]), parent=encode_hashes([4])),
        HashedRemoved(hashes=encode_hashes([6]), tier=Tier.HOST),
        HashedCleared(),
    ]
    batch = batch_of(KvRecord(t=0.0, worker="w0", seq=0, events=events, block_size=4), 16)
    stored, removed, cleared = batch.events
    assert isinstance(stored, Stored)
    assert (stored.hashes, stored.parent, stored.block_size, stored.tier) == ((5, 6), 4, 4, Tier.DEVICE)
    assert stored.tokens.tolist() == [5, 0, 0, 0, 6, 0, 0, 0]
    assert removed == Removed((6,), Tier.HOST)
    assert cleared == Cleared()


@given(
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=2, max_size=2),
    block_size=st.sampled_from([1, 2, 4]),
)
def test_prompts_share_as_many_stand_in_blocks_as_real_ones(prompts: list[list[int]], block_size: int) -> None:
    def shared(left: list[int], right: list[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )

    ours, theirs = BlockHasher(np.random.default_rng(1)), BlockHasher(np.random.default_rng(2))
    family = HashFamily(block_size)
    real = [theirs.prompt_hashes(as_tokens(tokens), family, Namespace()).tolist() for tokens in prompts]
    recorded = [decode_hashes(encode_hashes(hashes)) for hashes in real]
    again = [ours.prompt_hashes(stand_in_tokens(one, block_size), family, Namespace()).tolist() for one in recorded]
    assert [len(one) for one in again] == [len(one) for one in real]
    assert shared(*again) == shared(*real)
