"""One payload to events, whatever version wrote it, and sequence numbers to what they mean."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesim import kv_events as engine
from predictor import kv_events
from predictor.kv_events import (
    Arrival,
    Batch,
    Bundle,
    Cleared,
    FeedCursor,
    KvEvent,
    MalformedBatch,
    Named,
    Removed,
    Stored,
    Tier,
    decode_batch,
    decode_pieces,
)

HIGH = 2**63 + 5
# Every field of a vLLM 0.33 store, in the order in which the versions added them.
FULL: dict[str, object] = {
    "block_hashes": [HIGH, 6],
    "parent_block_hash": 4,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [["salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "kv_cache_spec_sliding_window": None,
    "locality": "LOCAL",
    "ownership": None,
    "session_id": "s",
    "lookahead_token_ids": None,
}
# How many fields an array had: SGLang before 0.5.9, vLLM up to 0.12, 0.14, 0.18, 0.20, 0.22; then 0.26 to 0.33 as maps.
FIELD_COUNTS = [5, 6, 7, 8, 9, 11, 12, 13, 14, 15]


def encode(*events: object) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 3])


def decode(*events: object) -> Batch:
    return decode_batch(encode(*events))


def as_map(**changes: object) -> dict[str, object]:
    return {"type": "BlockStored", **FULL, **changes}


def as_array(fields: int = len(FULL), **changes: object) -> list[object]:
    return ["BlockStored", *list({**FULL, **changes}.values())[:fields]]


def comparable(event: KvEvent) -> tuple[object, ...]:
    match event:
        case Stored():
            fields = (event.hashes, event.parent, event.block_size, event.tier, event.lora_name, event.extra_keys)
            ahead = () if event.ahead is None else (event.ahead.tolist(),)
            return ("stored", event.tokens.tolist(), *fields, event.group, *ahead)
        case Named():
            return ("named", event.hashes, event.tier, event.group)
        case Removed():
            return ("removed", event.hashes, event.tier, event.group)
        case Cleared():
            return ("cleared",)
        case Bundle():
            return ("bundle", *map(comparable, event.events()))


def apart(events: Iterable[KvEvent]) -> Iterator[KvEvent]:
    """With bundles as the events that they stand for."""
    for event in events:
        yield from event.events() if isinstance(event, Bundle) else (event,)


def stored(batch: Batch) -> Stored:
    assert batch.skipped == {}
    (event,) = batch.events
    assert isinstance(event, Stored)
    return event


@pytest.mark.parametrize("fields", FIELD_COUNTS)
def test_arrays_of_every_length_and_maps_say_the_same(fields: int) -> None:
    names = list(FULL)[:fields]
    from_array = stored(decode(as_array(fields)))
    from_map = stored(decode({"type": "BlockStored"} | {name: FULL[name] for name in names}))
    assert comparable(from_array) == comparable(from_map)
    assert comparable(from_array) == (
        "stored",
        [1, 2, 3, 4],
        (HIGH, 6),
        4,
        2,
        Tier.DEVICE,
        None,
        (("salt",), ()) if fields >= 8 else None,
        0 if fields >= 9 else None,
    )
    assert from_array.tokens.dtype == np.uint32


@pytest.mark.parametrize("fields", [1, 2, 3, 4, 5])
def test_removals_of_every_length_and_form_say_the_same(fields: int) -> None:
    values = {"block_hashes": [9, HIGH], "medium": "CPU", "group_idx": 1, "locality": None, "ownership": None}
    known = dict(list(values.items())[:fields])
    array_form, map_form = decode(["BlockRemoved", *known.values()]), decode({"type": "BlockRemoved", **known})
    assert array_form.events == map_form.events
    assert array_form.events == (
        Removed((9, HIGH), Tier.HOST if fields > 1 else Tier.DEVICE, 1 if fields > 2 else None),
    )


def test_a_batch_carries_time_and_rank_and_keeps_the_order_of_its_events() -> None:
    cleared = {"type": "AllBlocksCleared"}, ["AllBlocksCleared"]
    batch = decode(as_map(), ["BlockRemoved", [6]], *cleared, as_array())
    assert (batch.timestamp_s, batch.rank, batch.skipped) == (12.5, 3, {})
    assert [comparable(event)[0] for event in batch.events] == ["stored", "removed", "cleared", "cleared", "stored"]


@pytest.mark.parametrize(
    ("raw", "timestamp_s", "rank"),
    [([1, []], 1.0, None), ([None, [], None], None, None), (["x", [], "y"], None, None), ([1.5, [], 0, "new"], 1.5, 0)],
)
def test_time_and_rank_may_be_missing_and_more_may_follow(
    raw: list[object], timestamp_s: float | None, rank: int | None
) -> None:
    assert decode_batch(msgspec.msgpack.encode(raw)) == Batch(timestamp_s, (), rank, {})


@pytest.mark.parametrize("form", ["map", "array"])
def test_both_forms_of_the_simulated_engine_are_read(form: engine.EventForm) -> None:
    events: list[engine.KvEvent] = [
        engine.BlockStored([HIGH, 6], None, [1, 2, 3, 4], 2, [["salt"], None]),
        engine.BlockStored([7], 6, [5, 6], 2, [None]),
        engine.BlockRemoved(HIGH),
        engine.AllBlocksCleared(),
    ]
    batch = decode_batch(engine.encode_batch(events, 12.5, form))
    assert (batch.timestamp_s, batch.rank, batch.skipped) == (12.5, 0, {})
    assert list(map(comparable, batch.events)) == [
        ("stored", [1, 2, 3, 4], (HIGH, 6), None, 2, Tier.DEVICE, None, (("salt",), ()), 0),
        ("stored", [5, 6], (7,), 6, 2, Tier.DEVICE, None, None, 0),
        ("removed", (HIGH,), Tier.DEVICE, 0),
        ("cleared",),
    ]


@pytest.mark.parametrize("number", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_hash_is_the_same_as_unsigned_or_signed_integer_or_the_end_of_its_bytes(number: int) -> None:
    signed = number - 2**64 if number >= 2**63 else number
    spellings: list[object] = [number, signed, number.to_bytes(8, "big")]
    spellings += [b"\xab" * (width - 8) + number.to_bytes(8, "big") for width in (16, 32)]
    for spelling in spellings:
        event = stored(decode(as_map(block_hashes=[spelling, 6], parent_block_hash=spelling)))
        assert (event.hashes, event.parent) == ((number, 6), number)
        assert decode(["BlockRemoved", [spelling]]).events == (Removed((number,), Tier.DEVICE),)


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.DEVICE),
        ("GPU", Tier.DEVICE),
        ("cpu", Tier.HOST),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("DISK", Tier.STORAGE),
        ("STORAGE", Tier.STORAGE),
        ("FS", Tier.STORAGE),
        ("OBJ", Tier.STORAGE),
        ("EXTERNAL", Tier.STORAGE),
    ],
)
def test_media_are_tiers(medium: str | None, tier: Tier) -> None:
    assert stored(decode(as_map(medium=medium))).tier is tier


SKIPPED: list[tuple[Any, str]] = [
    (["BlockMoved", [1]], "unknown_event"),
    ({"type": "BlockMoved"}, "unknown_event"),
    ({"type": ["BlockStored"]}, "unknown_event"),
    ({"block_hashes": [1]}, "unknown_event"),
    ([], "malformed"),
    ("BlockStored", "malformed"),
    (None, "malformed"),
    (["BlockStored"], "malformed"),
    (["BlockRemoved"], "malformed"),
    (["BlockRemoved", 5], "malformed"),
    (["BlockRemoved", ["5"]], "malformed"),
    (["BlockRemoved", [5], "TAPE"], "unknown_medium"),
    ({"type": "BlockRemoved", "block_hashes": [5], "kv_cache_spec_kind": "mamba"}, "group_mamba"),
    ({"type": "BlockRemoved", "block_hashes": [5], "kv_cache_spec_kind": "perceiver"}, "group"),
    (as_map(medium="TAPE"), "unknown_medium"),
    (as_map(medium=5), "unknown_medium"),
    (as_map(kv_cache_spec_kind="sliding_window"), "group_sliding_window"),
    (as_map(kv_cache_spec_kind="mamba", block_hashes=[], extra_keys=[]), "group_mamba"),
    (as_map(kv_cache_spec_kind=5), "group"),
    (as_map(group_idx="0"), "group"),
    (as_array(kv_cache_spec_kind="chunked_local_attention"), "group_chunked_local_attention"),
    (as_map(token_ids=[], block_size=0, block_hashes=[], medium="CPU"), "without_tokens"),
    (as_map(token_ids=None), "without_tokens"),
    (as_map(token_ids=[1] * 2 * 8192, block_size=8192), "block_size"),
    (as_map(token_ids=[]), "without_tokens"),
    (as_map(block_size=-2), "without_tokens"),
    # Masked groups: the tokens span the run, the hashes have holes.
    (as_map(block_hashes=[6], extra_keys=None), "masked"),
    (as_map(block_hashes=[], extra_keys=None), "masked"),
    (as_map(token_ids=[1, 2, 3]), "masked"),
    (as_map(block_size="2"), "malformed"),
    (as_map(block_size=True), "malformed"),
    (as_map(token_ids=b"abcd"), "malformed"),
    (as_map(block_hashes=None), "malformed"),
    (as_map(block_hashes=[1, None]), "malformed"),
    (as_map(block_hashes=[1, "2"]), "malformed"),
    (as_map(parent_block_hash="4"), "malformed"),
    (as_map(token_ids=[[1, 2], [2, 3], [3, 4], 4]), "token_form"),
    (as_map(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5, 6]]), "token_form"),
    (as_map(token_ids=[[1.5, 2], [2, 3], [3, 4], [4, 5]]), "token_form"),
    (as_map(token_ids=[[[1], 2], [2, 3], [3, 4], [4, 5]]), "token_form"),
    (as_map(token_ids=[1.0, 2, 3, 4]), "token_form"),
    (as_map(token_ids=[1, 2, 3, None]), "token_form"),
    (as_map(lookahead_token_ids=5), "malformed"),
    (as_map(lookahead_token_ids=[[5]]), "malformed"),
    (as_map(lookahead_token_ids=[[5], None]), "lookahead_form"),
    (as_map(lookahead_token_ids=[None, [5]]), "lookahead_form"),
    (as_map(lookahead_token_ids=[5, [5]]), "lookahead_form"),
    (as_map(lookahead_token_ids=[[5], [6, 7]]), "lookahead_form"),
    (as_map(lookahead_token_ids=[[5], ["x", 0.5]]), "lookahead_form"),
    (as_map(lookahead_token_ids=[[5], [0.5]]), "token_form"),
    (as_map(lookahead_token_ids=[[5] * 100] * 2), "lookahead_form"),
    (as_map(cache_salt=5, extra_keys=None), "malformed"),
    (as_map(cache_salt="s", extra_keys=[["t"], None]), "malformed"),
    (as_map(lora_id=3), "unnamed_adapter"),
    (as_array(6, lora_id=3), "unnamed_adapter"),
    # What else is in a block's identity is not known: without it the block would pass for another.
    (as_map(extra_keys=[None]), "malformed"),
    (as_map(extra_keys=5), "malformed"),
    (as_map(extra_keys=[5, None]), "malformed"),
    (as_map(extra_keys=["salt", None]), "malformed"),
    (as_map(extra_keys=[[{"salt": 1}], None]), "malformed"),
    (as_map(extra_keys=[[None], None]), "malformed"),
    (as_map(extra_keys=[[["image", [1]]], None]), "malformed"),
    (as_map(extra_keys=[0, None]), "malformed"),
]


@pytest.mark.parametrize(("event", "reason"), SKIPPED, ids=lambda value: value if isinstance(value, str) else None)
def test_what_is_not_understood_is_counted_and_its_siblings_are_kept(event: object, reason: str) -> None:
    batch = decode(as_map(block_hashes=[1, 2]), event, event, ["BlockRemoved", [1]])
    assert batch.skipped == {reason: 2}
    assert [comparable(kept)[0] for kept in batch.events] == ["stored", "removed"]


def test_reasons_are_counted_apart() -> None:
    assert decode(*(event for event, _ in SKIPPED)).skipped == {
        reason: sum(reason == other for _, other in SKIPPED) for _, reason in SKIPPED
    }


def test_unknown_fields_are_no_reason_to_skip() -> None:
    plain = stored(decode(as_map()))
    assert comparable(stored(decode(as_map(colour="red", extra={"a": [1]})))) == comparable(plain)
    assert comparable(stored(decode([*as_array(), "red", {"a": [1]}]))) == comparable(plain)
    assert decode({"type": "AllBlocksCleared", "medium": "CPU"}).events == (Cleared(),)


@pytest.mark.parametrize("kind", [None, "full_attention", "mla_attention", "sink_full_attention"])
def test_groups_that_attend_to_everything_are_kept(kind: str | None) -> None:
    assert stored(decode(as_map(kv_cache_spec_kind=kind, group_idx=2))).group == 2


@pytest.mark.parametrize(
    ("lora_name", "raw", "keys"),
    [
        (None, None, None),
        (None, [None, None], None),
        (None, [[], None], None),
        (None, [["salt"], None], (("salt",), ())),
        ("ada", None, None),
        ("ada", [["ada"], ["ada"]], None),
        ("ada", [["ada", "salt"], ["ada"]], (("salt",), ())),
        ("ada", [["salt"], None], (("salt",), ())),
        # The caller's salt may be any text, the adapter's name too.
        ("ada", [["ada", "ada"], ["ada"]], (("ada",), ())),
        (
            "ada",
            [["ada", ["image", -3]], ["ada", ["image", 13], b"\x00"]],
            ((("image", -3),), (("image", 13), b"\x00")),
        ),
        (None, [["ada"], ["ada"]], (("ada",), ("ada",))),
    ],
)
def test_extra_keys_are_per_block_and_without_the_adapters_name(
    lora_name: str | None, raw: object, keys: tuple[tuple[object, ...], ...] | None
) -> None:
    event = stored(decode(as_map(lora_name=lora_name, lora_id=None if lora_name is None else 1, extra_keys=raw)))
    assert (event.lora_name, event.extra_keys) == (lora_name, keys)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93",
        b"\xa1\xff",
        b"\x91" * 100_000,
        b"\x92\x01\x91\x81\x81\x01\x02\x03",
        encode(as_map())[:-1],
        encode(as_map()) + b"\x00",
        *map(msgspec.msgpack.encode, [None, 5, "text", {}, {"ts": 1}, [], [1], [1, None], [1, {}], [[], 1]]),
    ],
    ids=lambda payload: payload[:8].hex(),
)
def test_a_payload_of_which_nothing_can_be_read_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode_batch(payload)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=40)
    | st.datetimes(timezones=st.just(UTC))
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127).filter(lambda code: code != -1), st.binary(max_size=12))
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "full_attention"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
damaged_maps = st.dictionaries(st.sampled_from(list(FULL)), values, max_size=4).map(lambda changes: as_map(**changes))
damaged_arrays = st.builds(
    lambda array, at, value: [*array[:at], value, *array[at + 1 :]],
    st.sampled_from([as_array(count) for count in FIELD_COUNTS]),
    st.integers(0, 15),
    values,
)


@given(st.lists(damaged_maps | damaged_arrays | values, max_size=3), values, values)
def test_whatever_stands_in_a_batch_each_event_is_read_or_counted(
    events: list[object], timestamp: object, rank: object
) -> None:
    payload = msgspec.msgpack.encode([timestamp, events, rank])
    batch = decode_batch(payload)
    # Neighbouring removals are told as one.
    others = sum(not isinstance(event, Removed) for event in batch.events)
    assert len(batch.events) + sum(batch.skipped.values()) <= len(events)
    assert others == len(events) - sum(batch.skipped.values()) - sum(map(is_removal, events))
    for event in batch.events:
        if isinstance(event, Stored):
            assert len(event.tokens) == len(event.hashes) * event.block_size > 0
            assert event.extra_keys is None or len(event.extra_keys) == len(event.hashes)
            hash(event.extra_keys)  # the index looks digests up by them
            assert event.ahead is None or event.ahead.shape == (len(event.hashes), event.lookahead)
        if not isinstance(event, Cleared):
            assert all(0 <= one < 2**64 for one in event.hashes)


plain_maps = st.builds(
    lambda hashes, parent, changes: {
        **as_map(block_hashes=hashes, parent_block_hash=parent, token_ids=[7] * (2 * len(hashes)), extra_keys=None),
        **changes,
    },
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3),
    st.none() | st.integers(-(2**63), 2**64 - 1),
    st.dictionaries(st.sampled_from(list(FULL)), values, max_size=2),
)
removal_maps = st.builds(
    lambda hashes, changes: {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": "GPU",
        "group_idx": 0,
        **changes,
    },
    st.lists(st.integers(-(2**63), 2**64 - 1), max_size=3),
    st.dictionaries(st.sampled_from(["block_hashes", "medium", "group_idx", "kv_cache_spec_kind"]), values, max_size=1),
)
many_kinds = plain_maps | plain_maps | damaged_maps | removal_maps | st.just({"type": "AllBlocksCleared"}) | values


@given(st.lists(many_kinds, max_size=4), st.booleans())
def test_what_is_read_at_a_glance_is_what_a_closer_look_says(events: list[object], long: bool) -> None:
    payload = encode(*events)
    closely = kv_events._read(*kv_events._unpack_anything(payload))
    with pytest.MonkeyPatch.context() as patch:
        if long:
            patch.setattr(kv_events, "_PIECE_BYTES", 1)  # every payload is a long one
        pieces = list(decode_pieces(payload, 1)) if long else [decode_batch(payload)]
    told = [comparable(event) for piece in pieces for event in piece.events]
    if long:  # neighbouring removals that came in pieces
        told = [one for event in told for one in one_by_one(event)]
        assert told == [one for event in closely.events for one in one_by_one(comparable(event))]
    else:
        assert told == list(map(comparable, closely.events))
    assert sum((Counter(piece.skipped) for piece in pieces), Counter()) == Counter(closely.skipped)
    assert all((piece.timestamp_s, piece.rank) == (12.5, 3) for piece in pieces)


def one_by_one(event: tuple[object, ...]) -> list[tuple[object, ...]]:
    if event[0] != "removed":
        return [event]
    assert isinstance(event[1], tuple)
    return [("removed", name, *event[2:]) for name in event[1]]


def test_of_a_long_payload_an_event_that_cannot_be_read_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = encode({"type": "AllBlocksCleared"}, {"type": "BlockRemoved", "block_hashes": [1], "medium": "abcd"})
    damaged = payload.replace(b"abcd", b"\xff\xff\xff\xff")
    monkeypatch.setattr(kv_events, "_PIECE_BYTES", 1)
    first, second = decode_pieces(damaged, 8)
    assert (first.events, second.events, dict(second.skipped)) == ((Cleared(),), (), {"malformed": 1})


@given(st.lists(many_kinds, max_size=12), st.integers(2, 12))
def test_bundles_say_the_same_as_what_is_in_them(events: list[object], most: int) -> None:
    payload = encode(*(event for event in events for _ in range(2)))
    closely, pieces = decode_batch(payload), list(decode_pieces(payload, most))
    told = list(apart(event for piece in pieces for event in piece.events))
    for kind in (Stored, Named, Cleared):
        alike = [comparable(event) for event in closely.events if isinstance(event, kind)]
        assert [comparable(event) for event in told if isinstance(event, kind)] == alike
    removals = [one for event in closely.events for one in one_by_one(comparable(event)) if one[0] == "removed"]
    assert [one for event in told for one in one_by_one(comparable(event)) if one[0] == "removed"] == removals
    assert sum((Counter(piece.skipped) for piece in pieces), Counter()) == Counter(closely.skipped)
    for piece in pieces:
        for event in piece.events:
            if isinstance(event, Bundle):
                assert not set(event.hashes) & set(event.removed)
                assert len(event.lengths) == len(event.parents) >= 4


def test_decoded_blocks_and_the_evictions_between_them_are_one_bundle() -> None:
    events: list[object] = []
    for number in range(1, 9):
        events += [removal_map(100 + number), as_map(block_hashes=[number], token_ids=[7, number], extra_keys=[None])]
    (batch,) = decode_pieces(encode(*events), 100)
    (bundle,) = batch.events
    assert isinstance(bundle, Bundle)
    assert (bundle.removed, bundle.hashes) == ([*range(101, 109)], [*range(1, 9)])
    # What is removed after it was stored is told in that order.
    (batch,) = decode_pieces(encode(*events, removal_map(3)), 100)
    assert list(map(comparable, batch.events)) == list(
        map(comparable, decode_batch(encode(*events, removal_map(3))).events)
    )


def joined(events: Iterable[KvEvent]) -> list[tuple[object, ...]]:
    """With stores that go on from the one before put together again."""
    whole: list[Any] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Stored) and isinstance(last, Stored) and event.parent == last.hashes[-1]:
            tokens = np.concatenate([last.tokens, event.tokens])
            keys = None if last.extra_keys is None else (*last.extra_keys, *[()] * len(event.hashes))
            together = last.hashes + event.hashes
            whole[-1] = msgspec.structs.replace(last, hashes=together, tokens=tokens, extra_keys=keys)
        else:
            whole.append(event)
    return list(map(comparable, whole))


long_lists = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 200), min_size=2, max_size=40)
some_ids = long_lists | long_lists | st.lists(st.integers(0, 300) | st.just("image"), min_size=2, max_size=40)


@given(
    some_ids,
    st.integers(1, 3),
    st.integers(1, 12),
    st.sampled_from([-1, 1]),
    st.dictionaries(
        st.sampled_from(
            ["lora_name", "cache_salt", "extra_keys", "lookahead_token_ids", "medium", "parent_block_hash"]
        ),
        st.none() | st.just("CPU") | st.integers(1, 3) | st.just([["salt"]]),
        max_size=2,
    ),
)
def test_a_long_event_is_read_in_parts_that_say_the_same(
    ids: list[object], size: int, at_once: int, sign: int, changes: dict[str, object]
) -> None:
    blocks = len(ids) // size
    names = [sign * (1 << number % 63) + number for number in range(1, blocks + 1)]
    plain = {
        "block_hashes": names,
        "token_ids": ids[: blocks * size],
        "block_size": size,
        "extra_keys": [None] * blocks,
    }
    told = {"type": "BlockStored", "parent_block_hash": None, "medium": "GPU", **plain, **changes}
    payload = encode(removal_map(77), told, removal_map(78))
    whole = decode_batch(payload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "_PIECE_BYTES", 1)
        patch.setattr(kv_events, "_PART_TOKENS", at_once)
        pieces = list(decode_pieces(payload, 100))
    assert joined(event for piece in pieces for event in piece.events) == list(map(comparable, whole.events))
    assert sum((Counter(piece.skipped) for piece in pieces), Counter()) == Counter(whole.skipped)
    if not changes and "image" not in ids and blocks * size > at_once:
        assert len(pieces) == 2 + -(-blocks // max(1, at_once // size)), "read at once"


def test_no_part_of_a_long_event_takes_long() -> None:
    blocks = 50_000
    ids = np.random.default_rng(1).integers(0, 150_000, blocks * 16).tolist()
    told = {"type": "BlockStored", "block_hashes": list(range(1, blocks + 1)), "parent_block_hash": None}
    payload = encode({**told, "token_ids": ids, "block_size": 16, "medium": "GPU", "extra_keys": [None] * blocks})
    sizes = [len(event.hashes) for piece in decode_pieces(payload, 100) for event in piece.events if is_stored(event)]
    assert (sum(sizes), max(sizes)) == (blocks, 512)


def test_what_a_prompt_has_evicted_before_it_is_told_as_one_and_the_prompt_by_itself() -> None:
    removals: list[object] = [removal_map(100 + number) for number in range(32)]
    (batch,) = decode_pieces(encode(*removals, as_map(extra_keys=None), removal_map(7)), 100)
    gone, prompt, last = batch.events
    assert gone == Removed(tuple(range(100, 132)), Tier.DEVICE, 0)
    assert isinstance(prompt, Stored)
    assert last == Removed((7,), Tier.DEVICE, 0)


def is_stored(event: KvEvent) -> TypeGuard[Stored]:
    return isinstance(event, Stored)


def removal_map(name: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def is_removal(event: object) -> bool:
    (decoded,) = decode(event).events or (None,)
    return isinstance(decoded, Removed)


@given(values)
def test_any_value_is_a_batch_or_malformed(value: object) -> None:
    with contextlib.suppress(MalformedBatch):
        decode_batch(msgspec.msgpack.encode(value))


# As engines themselves encoded them (tests/engine/captures.py), by engine and version.
CAPTURES: dict[str, list[bytes]] = msgspec.msgpack.decode((Path(__file__).parent / "kv_captures.msgpack").read_bytes())
REAL = [payload for payloads in CAPTURES.values() for payload in payloads]


@pytest.mark.parametrize("name", CAPTURES)
def test_whatever_an_engine_has_published_is_understood(name: str) -> None:
    skipped: Counter[str] = Counter()
    kinds: set[type[KvEvent]] = set()
    for payload in CAPTURES[name]:
        batch = decode_batch(payload)
        skipped.update(batch.skipped)
        kinds.update(map(type, batch.events))
    # Of hybrid models other groups are left out, and a window's or a state's blocks may be told without all tokens.
    assert all(reason.startswith("group_") for reason in skipped), skipped
    assert bool(skipped) == ("window" in name or "mamba" in name)
    assert Stored in kinds
    assert (Named in kinds) == ("by name" in name)
    assert (Removed in kinds) == (name != "lmcache 0.5.6 in vllm")


@given(st.sampled_from(REAL), st.data())
def test_one_damaged_event_of_a_captured_batch_costs_its_siblings_nothing(payload: bytes, data: st.DataObject) -> None:
    raw = msgspec.msgpack.decode(payload)
    at = data.draw(st.integers(0, len(raw[1]) - 1))
    fields = dict(raw[1][at])
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=2)):
        fields[name] = data.draw(values)
    raw[1][at] = fields
    damaged = decode_batch(msgspec.msgpack.encode(raw))
    told = [one for event in damaged.events for one in one_by_one(comparable(event))]
    for place, event in enumerate(raw[1]):
        if place != at:
            for sibling in decode(event).events:
                assert all(one in told for one in one_by_one(comparable(sibling)))


@given(st.sampled_from(REAL), st.integers(1, 5))
def test_pieces_of_a_batch_are_the_batch(payload: bytes, most: int) -> None:
    whole, pieces = decode_batch(payload), list(decode_pieces(payload, most))
    assert [len(piece.events) <= most for piece in pieces] == [True] * len(pieces)
    told = [comparable(event) for event in apart(event for piece in pieces for event in piece.events)]
    for is_removed in (False, True):  # which among each other, neighbours together or not, keep their order
        of_a_kind = [
            [one for event in events for one in one_by_one(event) if (one[0] == "removed") == is_removed]
            for events in (told, map(comparable, whole.events))
        ]
        assert of_a_kind[0] == of_a_kind[1]
    assert {(piece.timestamp_s, piece.rank) for piece in pieces} == {(whole.timestamp_s, whole.rank)}
    assert sum((Counter(piece.skipped) for piece in pieces), Counter()) == Counter(whole.skipped)


@given(st.sampled_from(REAL), st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=6))
def test_a_batch_damaged_anywhere_is_read_or_malformed(payload: bytes, damages: list[tuple[int, bytes]]) -> None:
    for at, replacement in damages:
        payload = payload[:at] + replacement + payload[at + 1 :]
    with contextlib.suppress(MalformedBatch):
        decode_batch(payload)


# Captured from SGLang 0.5.19 (arrays of full length) and 0.5.23 (maps), shapes as in engines.md A.2.
def sglang_map(**changes: object) -> dict[str, object]:
    fields = {"block_hashes": [-5, 6], "parent_block_hash": -4, "token_ids": [1, 2, 3, 4], "block_size": 2}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", **changes}


def test_sglang_says_the_same_in_arrays_and_maps_with_signed_hashes() -> None:
    array_form = ["BlockStored", [-5, 6], -4, [1, 2, 3, 4], 2, None, "GPU"]
    for event in (sglang_map(), array_form, array_form[:6], array_form[:5]):
        one = stored(decode(event))
        assert (one.hashes, one.parent) == ((2**64 - 5, 6), 2**64 - 4)
        assert (one.tokens.tolist(), one.block_size, one.tier, one.lookahead) == ([1, 2, 3, 4], 2, Tier.DEVICE, 0)
    removal = ["BlockRemoved", [-5], "CPU_PINNED"]
    assert decode(removal).events == (Removed((2**64 - 5,), Tier.HOST),)


def test_sglang_repeats_the_salt_with_every_event_and_it_is_in_a_prompts_first_block_only() -> None:
    first = stored(decode(sglang_map(parent_block_hash=None, cache_salt="s", session_id="x")))
    later = stored(decode(sglang_map(cache_salt="s")))
    assert (first.extra_keys, later.extra_keys) == ((("s",), ()), None)
    assert stored(decode(sglang_map(parent_block_hash=None, cache_salt=None))).extra_keys is None
    assert stored(decode(sglang_map(parent_block_hash=None, cache_salt=""))).extra_keys is None
    assert stored(decode(sglang_map(lora_name="ada"))).lora_name == "ada"


def test_pairs_of_neighbours_are_tokens_and_one_token_of_look_ahead_a_block() -> None:
    event = stored(decode(sglang_map(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]])))
    assert (event.tokens.tolist(), event.lookahead, event.pairs) == ([1, 2, 3, 4], 1, True)
    assert event.ahead is not None
    assert event.ahead.tolist() == [[3], [5]]
    by_one = stored(decode(sglang_map(token_ids=[[1, 2], [2, 9]], block_size=1)))
    assert by_one.ahead is not None
    assert (by_one.tokens.tolist(), by_one.ahead.tolist()) == ([1, 2], [[2], [9]])


def test_look_ahead_tokens_of_vllm_are_one_row_a_block() -> None:
    event = stored(decode(as_map(lookahead_token_ids=[[3, 4], [5, 6]])))
    assert event.ahead is not None
    assert (event.ahead.tolist(), event.lookahead, event.pairs) == ([[3, 4], [5, 6]], 2, False)
    nothings: list[object] = [None, [None, None], [[], []]]
    for nothing in nothings:
        assert stored(decode(as_map(lookahead_token_ids=nothing))).ahead is None


@pytest.mark.parametrize("one", [-1, 2**32, 2**63, "image:3", ""])
def test_a_multimodal_items_own_value_stands_for_an_id_that_no_vocabulary_reaches(one: object) -> None:
    tokens = stored(decode(as_map(token_ids=[1, 2, 3, one]))).tokens.tolist()
    assert tokens[:3] == [1, 2, 3]
    assert 2**31 <= tokens[3] < 2**32
    assert tokens == stored(decode(as_map(token_ids=[1, 2, 3, one]))).tokens.tolist()
    assert tokens != stored(decode(as_map(token_ids=[1, 2, 3, "another"]))).tokens.tolist()


@pytest.mark.parametrize("changes", [{"block_size": 0}, {"block_size": 16}, {"token_ids": None}, {"block_size": 256}])
@pytest.mark.parametrize("medium", ["CPU", "cpu", "STORAGE"])
def test_blocks_of_another_medium_without_tokens_are_known_by_their_names(
    medium: str, changes: dict[str, object]
) -> None:
    event = as_map(token_ids=[], parent_block_hash=None, block_hashes=[6, HIGH], medium=medium, extra_keys=None)
    (named,) = decode(event | changes).events
    assert named == Named((6, HIGH), Tier.STORAGE if medium == "STORAGE" else Tier.HOST, 0)


def test_a_chunk_of_lmcache_is_a_block_of_its_own_size() -> None:
    chunk = as_map(
        block_hashes=[b"\x01" * 32], parent_block_hash=None, token_ids=list(range(256)), block_size=256, medium="cpu",
        extra_keys=None, group_idx=None, kv_cache_spec_kind=None,
    )  # fmt: skip
    event = stored(decode(chunk))
    assert (event.block_size, event.tier, len(event.tokens)) == (256, Tier.HOST, 256)
    assert event.hashes == (int.from_bytes(b"\x01" * 8, "big"),)
    # The first chunk of a prompt has no parent; a hash that only ends in zeros is one.
    assert stored(decode(chunk | {"parent_block_hash": 1 << 32})).parent == 1 << 32
    assert stored(decode(as_map(parent_block_hash=0))).parent == 0


def test_a_chunk_whose_predecessor_was_stored_by_another_call_is_adrift() -> None:
    # LMCache's in-process engine.
    event = stored(decode(as_map(parent_block_hash=0, medium="cpu", extra_keys=None)))
    assert (event.parent, event.adrift) == (None, True)
    assert not stored(decode(as_map(parent_block_hash=None, medium="cpu", extra_keys=None))).adrift
    on_device = stored(decode(as_map(parent_block_hash=0)))
    assert (on_device.parent, on_device.adrift) == (0, False)


def test_a_chunk_of_lmcache_is_told_with_the_next_chunks_first_token() -> None:
    # As LMCache 0.5.6's own cache engine told it, with chunks of 4 tokens, of a prompt of 9.
    prompt = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    first = as_map(
        block_hashes=[-5], parent_block_hash=None, token_ids=prompt[:5], block_size=4, medium="cpu", extra_keys=None
    )
    second = as_map(
        block_hashes=[9], parent_block_hash=-5, token_ids=prompt[4:9], block_size=4, medium="cpu", extra_keys=None
    )
    batch = decode(first, second)
    assert batch.skipped == {}
    told = [(event.tokens.tolist(), event.parent) for event in batch.events if isinstance(event, Stored)]
    assert told == [(prompt[:4], None), (prompt[4:8], 2**64 - 5)]
    # On a device one token too many is a group with holes.
    assert decode({**first, "medium": "GPU"}).skipped == {"masked": 1}


def test_a_store_of_tensorrt_llm_is_read_with_the_strings_of_its_multimodal_tokens() -> None:
    event = as_map(mm_keys=[{"hash": "ab", "start": 1}], token_ids=[1, "mm-ab-0", "mm-ab-1", 4], extra_keys=None)
    assert len(stored(decode(event)).tokens) == 4


def test_neighbouring_removals_are_told_as_one_and_others_stay_where_they_are() -> None:
    gone = [{"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"} for number in (1, 2, 3)]
    batch = decode(*gone, as_map(), gone[0], gone[1] | {"medium": "CPU"}, gone[2] | {"group_idx": 1}, *gone[:2])
    assert [event for event in batch.events if isinstance(event, Removed)] == [
        Removed((1, 2, 3), Tier.DEVICE),
        Removed((1,), Tier.DEVICE),
        Removed((2,), Tier.HOST),
        Removed((3,), Tier.DEVICE, 1),
        Removed((1, 2), Tier.DEVICE),
    ]
    assert [isinstance(event, Stored) for event in batch.events].index(True) == 1


NEXT, GAP, RESTARTED = Arrival.NEXT, Arrival.GAP, Arrival.RESTARTED


def applied(*seqs: int) -> list[Arrival]:
    cursor = FeedCursor()
    return [cursor.applied(seq) for seq in seqs]


def test_batches_in_order_are_next_and_a_missing_one_is_a_gap() -> None:
    assert applied(0, 1, 2, 5, 6) == [NEXT, NEXT, NEXT, GAP, NEXT]


def test_a_number_that_goes_backwards_is_a_restart_wherever_the_new_count_stands() -> None:
    assert applied(0, 1, 2, 0, 1) == [NEXT, NEXT, NEXT, RESTARTED, NEXT]
    assert applied(0, 1, 2, 1, 2, 2) == [NEXT, NEXT, NEXT, RESTARTED, NEXT, RESTARTED]


@given(st.lists(st.integers(0, 30), max_size=60))
def test_each_number_is_judged_by_the_one_before_it(seqs: list[int]) -> None:
    for before, seq, arrival in zip([-1, *seqs], seqs, applied(*seqs), strict=False):
        assert (arrival is RESTARTED) == (seq <= before)
        assert (arrival is NEXT) == (seq == before + 1)
