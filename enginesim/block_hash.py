"""Chained hashes of token blocks: what a block holds and everything before it, in 64 bits.

As in vLLM the hash of a block covers its parent's hash, its own tokens and, in block 0 only, the cache salt; and what
goes on the wire is the low 64 bits of a sha256. The bytes hashed are our own choice: nobody outside may rely on them.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

ROOT = 0x48_65_61_64_77_61_79_00


def hash_block(parent: int, token_ids: Sequence[int], salt: str | None = None) -> int:
    """The unsigned 64-bit hash of one full block. `parent` is the hash of the block before, or `ROOT`."""
    return extend_chain(parent, token_ids, len(token_ids), salt)[0]


def extend_chain(
    parent: int, token_ids: Sequence[int], block_size: int, salt: str | None = None, lookahead: int = 0
) -> list[int]:
    """Hashes of the full blocks in `token_ids`, following on `parent`; a rest shorter than a block is left out.

    `lookahead` tokens behind a block are hashed with it: without them it is not full.

    About 1 us a block, so callers on an event loop hand in a few thousand tokens at a time.
    """
    content = memoryview(array("I", token_ids)).cast("B")
    block_bytes = 4 * block_size
    hashes = []
    for start in range(0, len(content) - block_bytes - 4 * lookahead + 1, block_bytes):
        digest = sha256(parent.to_bytes(8, "big"))
        digest.update(content[start : start + block_bytes + 4 * lookahead])
        if salt is not None and start == 0:
            digest.update(salt.encode())
        parent = int.from_bytes(digest.digest()[-8:], "big")
        hashes.append(parent)
    return hashes
