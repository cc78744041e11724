"""What a request asks an engine to prefill: token ids, and the chained hashes of their blocks.

Engines hash blocks each in a way of their own, so their hashes are opaque to us (see `cache_index`). We compare
prompts with caches by hashes of our own, computed alike from a prompt's tokens and from the tokens that a KV event
carries. The hashes are private to a process: their constants are drawn at start, so that nobody who can choose tokens
can aim for a collision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

MAX_BLOCK_SIZE = 4096  # tokens
MAX_LOOKAHEAD = 64  # tokens
# Of the places in prompts that begin and end as blocks that are looked for, so many are compared block by block.
_COMPARED_AT_MOST = 8

Tokens = npt.NDArray[np.uint32]
BlockHashes = npt.NDArray[np.uint64]

# Arrays without a dimension: numpy makes one of every scalar that it is given.
_FMIX_1 = np.array(0xFF51AFD7ED558CCD, np.uint64)
_FMIX_2 = np.array(0xC4CEB9FE1A85EC53, np.uint64)
_S33 = np.array(33, np.uint64)
_MASK = (1 << 64) - 1


class HashFamily(NamedTuple):
    """How an engine cuts prompts into blocks, and what of a prompt a block's identity covers.

    `lookahead` tokens behind a block are part of it: 1 for SGLang's EAGLE, whose keys are pairs of neighbours, and as
    many as vLLM 0.33 says for EAGLE and MTP. Such a block exists only once these tokens are known.
    """

    block_size: int  # tokens
    lookahead: int = 0  # tokens

    def blocks_of(self, tokens: int) -> int:
        """How many blocks of a prompt of so many tokens have an identity."""
        return max(0, (tokens - self.lookahead) // self.block_size)


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """What besides tokens tells two cached blocks apart: the LoRA adapter and the caller's `cache_salt`.

    vLLM puts the adapter into every block's hash and the salt into block 0's only; the chain carries it on.
    """

    lora_name: str | None = None
    cache_salt: str | None = None


class Prompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt as an engine will see it.

    `token_count` is exact when `exact`; otherwise it is an estimate from bytes, and `hashes` is empty.
    `hashes` maps a hash family to the chained hashes of the prompt's full blocks, first block first.
    """

    token_count: int
    exact: bool
    hashes: dict[HashFamily, BlockHashes] = msgspec.field(default_factory=dict)
    tokens: Tokens | None = None  # kept only where somebody records them

    @classmethod
    def estimated(cls, token_count: int) -> Prompt:
        return cls(token_count=max(1, token_count), exact=False)


class BlockHasher:
    """Chained 64-bit hashes of token blocks, without a Python loop per block.

    A block's content hash c_i is a multilinear hash of its tokens (one secret odd factor a place), finally mixed; the
    chained hash is S_i = S_(i-1) * P + c_i (mod 2^64), which numpy evaluates for all blocks at once by a cumulative
    sum. S_i is both the identity of the prefix and the state from which a later event continues it, so a child block
    can be hashed knowing nothing but its parent's hash.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        odd = _odd_numbers(rng, 2 + MAX_BLOCK_SIZE)
        self._factor = int(odd[0])
        self._root = int(odd[1])
        self._factors = odd[2:]
        self._ahead_factors = _odd_numbers(rng.spawn(1)[0], MAX_LOOKAHEAD)
        # Powers of the factor and of its inverse. One attribute, replaced whole: threads share a hasher.
        self._powers = (np.ones(1, np.uint64), np.ones(1, np.uint64))
        self._digest_key = rng.bytes(16)
        self._digests: dict[tuple[str | None, tuple[object, ...]], int] = {}

    @property
    def root(self) -> int:
        """The hash that stands before a prompt's first block."""
        return self._root

    def prompt_hashes(self, tokens: Tokens, family: HashFamily, namespace: Namespace) -> BlockHashes:
        """Chained hashes of the full blocks of a prompt (a partial last block is never shared)."""
        size, lookahead = family
        blocks = family.blocks_of(len(tokens))
        if not blocks:
            return np.empty(0, np.uint64)
        extras = None
        if namespace.lora_name is not None or namespace.cache_salt is not None:
            extras = np.full(blocks, self.extra_digest(namespace.lora_name, ()), np.uint64)
            if namespace.cache_salt is not None:
                extras[0] = self.extra_digest(namespace.lora_name, (namespace.cache_salt,))
        ahead = None
        if lookahead:
            ahead = np.lib.stride_tricks.sliding_window_view(tokens[size:], lookahead)[::size][:blocks]
        return self.link(self._root, self.contents(tokens[: blocks * size], size, extras, ahead))

    def chain(
        self,
        parent: int,
        tokens: Tokens,
        block_size: int,
        extras: BlockHashes | None = None,
        ahead: Tokens | None = None,
    ) -> BlockHashes:
        """Hashes of consecutive blocks that follow `parent`; see `contents` for the rest."""
        return self.link(parent, self.contents(tokens, block_size, extras, ahead))

    def link(self, parent: int, contents: BlockHashes) -> BlockHashes:
        """Chained hashes of blocks with such contents that follow `parent`."""
        count = len(contents)
        if count < 2:
            return contents + np.uint64(parent * self._factor & _MASK)
        powers, inverse_powers = self._powers_up_to(count + 1)
        chained: BlockHashes = np.add.accumulate(contents * inverse_powers[:count])
        chained *= powers[:count]
        chained += powers[1 : count + 1] * np.uint64(parent)
        return chained

    def chain_few(
        self,
        parent: int,
        tokens: Tokens,
        block_size: int,
        digests: Sequence[int] | None = None,
        ahead: Tokens | None = None,
    ) -> list[int]:
        """The same as `chain`, faster for a handful of blocks: a numpy call costs as much as a hundred tokens."""
        totals: list[int] = (tokens.reshape(-1, block_size) @ self._factors[:block_size]).tolist()
        if ahead is not None:
            beyond = (ahead @ self._ahead_factors[: ahead.shape[1]]).tolist()
            totals = [
                ((total + more) & _MASK) ^ (ahead.shape[1] << 32) for total, more in zip(totals, beyond, strict=True)
            ]
        salt = self._root ^ block_size
        contents = [_fmix_one(total ^ salt) for total in totals]
        if digests is not None:
            contents = [content ^ digest for content, digest in zip(contents, digests, strict=True)]
        return self.link_few(parent, contents)

    def link_few(self, parent: int, contents: Sequence[int]) -> list[int]:
        """The same as `link`, faster for a handful of blocks."""
        factor = self._factor
        chained = []
        for content in contents:
            parent = (parent * factor + content) & _MASK
            chained.append(parent)
        return chained

    def link_one(self, parent: int, content: int) -> int:
        """The same for a single block."""
        return (parent * self._factor + content) & _MASK

    def before(self, contents: BlockHashes, hashes: BlockHashes) -> int | None:
        """What stands before blocks of such contents in a prompt with such chained hashes; None if they are not in it.

        They are looked for where chunks of so many blocks begin, but for the first.
        """
        step = len(contents)
        within = self._within(hashes)
        places = self._places_alike(contents, within, step)
        found = (at for at in places[:_COMPARED_AT_MOST].tolist() if self._are_at(at, contents, within))
        place = next(found, None)
        return None if place is None else int(hashes[place])

    def place(self, contents: BlockHashes, prompts: Sequence[BlockHashes]) -> BlockHashes | None:
        """The chained hashes of what stands before such blocks in the first of these prompts that has them.

        None if no prompt does, but for its very beginning; if that prompt has them in several places; or if they begin
        and end as so many others do that it would take long to tell which they are.
        """
        if not prompts:
            return None
        # Where one prompt's end meets the next one's beginning, there is a block that nobody has.
        joined = np.concatenate(prompts)
        within = self._within(joined)
        places = self._places_alike(contents, within, 1)
        if len(places) > _COMPARED_AT_MOST * len(prompts):
            return None
        # What prompts have in common, from their beginning on, is one place.
        places = places[np.sort(np.unique(joined[places], return_index=True)[1])]
        if len(places) > _COMPARED_AT_MOST:
            return None
        found = [at for at in places.tolist() if self._are_at(at, contents, within)]
        if not found:
            return None
        start = 0
        for prompt in prompts:
            if found[0] < start + len(prompt):
                break
            start += len(prompt)
        if len(found) > 1 and found[1] < start + len(prompt):
            return None
        return prompt[: found[0] - start + 1]

    def _within(self, hashes: BlockHashes) -> BlockHashes:
        """The contents of a prompt's blocks from its second on, by its chained hashes."""
        return hashes[1:] - hashes[:-1] * np.uint64(self._factor)

    @staticmethod
    def _places_alike(contents: BlockHashes, within: BlockHashes, every: int) -> npt.NDArray[np.int64]:
        """Where among these blocks there are some that begin and end as the given ones, of so many places each one."""
        first, behind = every - 1, len(within) - len(contents) + 1
        alike = within[first : max(first, behind) : every] == contents[0]
        if len(contents) > 1:
            alike &= within[first + len(contents) - 1 :: every][: len(alike)] == contents[-1]
        return np.flatnonzero(alike) * every + first

    @staticmethod
    def _are_at(at: int, contents: BlockHashes, within: BlockHashes) -> bool:
        return bool((within[at : at + len(contents)] == contents).all())

    def contents(
        self, tokens: Tokens, block_size: int, extras: BlockHashes | None = None, ahead: Tokens | None = None
    ) -> BlockHashes:
        """What is in each block, whatever stands before it; `len(tokens)` must be a multiple of `block_size`.

        `extras` has one digest a block (see `extra_digest`), `ahead` one row of look-ahead tokens a block.
        """
        # Two types at once would be converted piece by piece.
        total: BlockHashes = tokens.astype(np.uint64).reshape(-1, block_size).dot(self._factors[:block_size])
        if ahead is not None:
            total += ahead @ self._ahead_factors[: ahead.shape[1]]
            total ^= np.uint64(ahead.shape[1] << 32)
        total ^= np.uint64(self._root ^ block_size)
        content = _fmix(total)
        if extras is not None:
            # A digest of 0 must leave a block as it is without extras: later events of a salted prompt carry none.
            content ^= extras
        return content

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


def _odd_numbers(rng: np.random.Generator, count: int) -> BlockHashes:
    return rng.integers(0, 1 << 63, size=count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


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


def _fmix_one(value: int) -> int:
    value ^= value >> 33
    value = value * 0xFF51AFD7ED558CCD & _MASK
    value ^= value >> 33
    value = value * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33
