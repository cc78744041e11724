"""What a batch of events looks like on the wire, in both forms."""

import msgspec
import pytest

from enginesim.block_hash import ROOT, extend_chain, hash_block
from enginesim.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, encode_batch

HIGH = 2**63 + 5
STORED = BlockStored([HIGH, 6], None, [1, 2, 3, 4], 2, [["salt"], None])


def test_new_events_are_maps_that_omit_optional_fields_at_their_default() -> None:
    ts, events, rank = msgspec.msgpack.decode(
        encode_batch([STORED, BlockRemoved(HIGH), AllBlocksCleared()], 12.5, "map")
    )
    assert (ts, rank) == (12.5, 0)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [HIGH, 6],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["salt"], None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        },
        {"type": "BlockRemoved", "block_hashes": [HIGH], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]


def test_old_events_are_arrays_that_keep_trailing_nulls() -> None:
    _, events, _ = msgspec.msgpack.decode(encode_batch([STORED, BlockRemoved(7), AllBlocksCleared()], 1.0, "array"))
    assert events == [
        [
            "BlockStored",
            [HIGH, 6],
            None,
            [1, 2, 3, 4],
            2,
            None,
            "GPU",
            None,
            [["salt"], None],
            0,
            "full_attention",
            None,
        ],
        ["BlockRemoved", [7], "GPU", 0],
        ["AllBlocksCleared"],
    ]


def test_a_block_hash_depends_on_everything_before_it_and_a_rest_has_none() -> None:
    chain = extend_chain(ROOT, range(10), 4)
    assert len(chain) == 2
    assert chain[1] == hash_block(chain[0], range(4, 8))
    assert extend_chain(ROOT, [9, *range(1, 8)], 4)[1] != chain[1]
    assert all(0 <= block_hash < 2**64 for block_hash in chain)


@pytest.mark.parametrize("salt", ["a", "b"])
def test_a_salt_changes_every_hash_of_the_chain(salt: str) -> None:
    plain, salted = extend_chain(ROOT, range(8), 4), extend_chain(ROOT, range(8), 4, salt)
    assert not set(plain) & set(salted)
