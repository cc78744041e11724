"""What a request asks an engine to prefill: token ids, and the chained hashes of their blocks.

Engines hash blocks each in a way of their own, so their hashes are opaque to us (see `cache_index`). We compare
prompts with caches by hashes of our own, computed alike from a prompt's tokens and from the tokens that a KV event
carries. The hashes are private to a process: their constants are drawn at start, so that nobody who can choose tokens
can aim for a collision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MAX_BLOCK_SIZE = 4096  # tokens

Tokens = npt.NDArray[np.uint32]
BlockHashes = npt.NDArray[np.uint64]

_FMIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_FMIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_MIX = np.uint64(0x9FB21C651E98DF25)
_S32, _S33 = np.uint64(32), np.uint64(33)
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides tokens tells two cached blocks apart: the LoRA adapter and the caller's `cache_salt`.

    vLLM puts the adapter into every block's hash and the salt into block 0's only; the chain carries it on.
    """

    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as an engine will see it.

    `token_count` is exact when `exact`; otherwise it is an estimate from bytes, and `hashes` is empty.
    `hashes` maps a block size (tokens) to the chained hashes of the prompt's full blocks, first block first.
    """

    token_count: int
    exact: bool
    hashes: dict[int, list[int]] = field(default_factory=dict)
    tokens: Tokens | None = None  # kept only where somebody records them

    @classmethod
    def estimated(cls, token_count: int) -> Prompt:
        return cls(token_count=max(1, token_count), exact=False)


class BlockHasher:
    """Chained 64-bit hashes of token blocks, without a Python loop per block.

    A block's content hash c_i mixes its tokens; the chained hash is S_i = S_(i-1) * P + c_i (mod 2^64), which numpy
    evaluates for all blocks at once by a cumulative sum. S_i is both the identity of the prefix and the state from
    which a later event continues it, so a child block can be hashed knowing nothing but its parent's hash.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        odd = rng.integers(0, 1 << 63, size=2 + MAX_BLOCK_SIZE, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._factor = int(odd[0])
        self._root = int(odd[1])
        self._word_factors = odd[2:]
        # Powers of the factor and of its inverse. One attribute, replaced whole: threads share a hasher.
        self._powers = (np.ones(1, np.uint64), np.ones(1, np.uint64))
        self._digest_key = rng.bytes(16)
        self._digests: dict[tuple[str | None, tuple[object, ...]], int] = {}

    @property
    def root(self) -> int:
        """The hash that stands before a prompt's first block."""
        return self._root

    def prompt_hashes(self, tokens: Tokens, block_size: int, namespace: Namespace) -> list[int]:
        """Chained hashes of the full blocks of a prompt (a partial last block is never shared)."""
        blocks = len(tokens) // block_size
        extras = None
        if namespace.lora_name is not None or namespace.cache_salt is not None:
            extras = np.full(blocks, self.extra_digest(namespace.lora_name, ()), np.uint64)
            if blocks and namespace.cache_salt is not None:
                extras[0] = self.extra_digest(namespace.lora_name, (namespace.cache_salt,))
        hashes: list[int] = self.chain(self._root, tokens[: blocks * block_size], block_size, extras).tolist()
        return hashes

    def chain(self, parent: int, tokens: Tokens, block_size: int, extras: BlockHashes | None = None) -> BlockHashes:
        """Hashes of consecutive blocks that follow `parent`; `len(tokens)` must be a multiple of `block_size`.

        `extras` has one digest a block (see `extra_digest`).
        """
        count = len(tokens) // block_size
        if count == 0:
            return np.empty(0, np.uint64)
        powers, inverse_powers = self._powers_up_to(count + 1)
        content = self._content(tokens, block_size)
        if extras is not None:
            # A digest of 0 must leave a block as it is without extras: later events of a salted prompt carry none.
            content ^= extras
        chained = np.cumsum(content * inverse_powers[:count], dtype=np.uint64) * powers[:count]
        chained += powers[1 : count + 1] * np.uint64(parent)
        return chained

    def extra_digest(self, lora_name: str | None, keys: tuple[object, ...]) -> int:
        """64 bits that stand for what besides tokens is in a block's identity; 0 when there is nothing."""
        if lora_name is None and not keys:
            return 0
        known = self._digests.get((lora_name, keys))
        if known is None:
            text = repr((lora_name, keys)).encode("utf-8", "surrogatepass")
            known = int.from_bytes(hashlib.blake2b(text, digest_size=8, key=self._digest_key).digest(), "big") or 1
            if len(self._digests) >= 4096:
                self._digests.clear()
            self._digests[(lora_name, keys)] = known
        return known

    def _content(self, tokens: Tokens, block_size: int) -> BlockHashes:
        if block_size % 2 == 0:
            words = np.ascontiguousarray(tokens, np.uint32).view(np.uint64).reshape(-1, block_size // 2)
        else:
            words = tokens.astype(np.uint64).reshape(-1, block_size)
        # All words at once, each mixed with a factor of its place: numpy's calls are what a small prompt, or an event
        # of one block, costs most. The first shift lets a word's highest bits reach all of the product.
        mixed = words ^ (words >> _S32)
        mixed *= self._word_factors[: words.shape[1]]
        mixed ^= mixed >> _S32
        mixed *= _MIX
        total: BlockHashes = mixed.sum(axis=1, dtype=np.uint64)
        total ^= np.uint64(self._root ^ block_size)
        return _fmix(total)

    def _powers_up_to(self, count: int) -> tuple[BlockHashes, BlockHashes]:
        known = self._powers
        if len(known[0]) >= count:
            return known
        size = 1 << (count - 1).bit_length()
        grown = _powers(self._factor, size), _powers(pow(self._factor, -1, 1 << 64), size)
        self._powers = grown
        return grown


def as_tokens(ids: Sequence[int] | Tokens) -> Tokens:
    return np.ascontiguousarray(ids, dtype=np.uint32)


def _powers(base: int, size: int) -> BlockHashes:
    table = np.full(size, base & _MASK, np.uint64)
    table[0] = 1
    return np.multiply.accumulate(table)


def _fmix(values: BlockHashes) -> BlockHashes:
    """MurmurHash3's 64-bit finaliser (public domain), in place."""
    values ^= values >> _S33
    values *= _FMIX_1
    values ^= values >> _S33
    values *= _FMIX_2
    values ^= values >> _S33
    return values
