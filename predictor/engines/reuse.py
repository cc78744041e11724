"""How much of a cached run an engine reuses, by family.

Mirrors `vllm/v1/core/kv_cache_manager.py` (get_computed_blocks) of vLLM 0.32 and 0.33, and `_compute_max_prefix_len` in
`sglang/srt/managers/schedule_batch.py` of SGLang 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from predictor.kv_events import Tier


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """One engine's rule. Lengths are tokens."""

    computed_at_least: int = 1  # at a prompt's end, however much of it is cached
    alignment: int = 0  # reuse ends at a multiple of it; 0: of a block
    drops_last_unit: bool = False  # one more block (or alignment) is computed again
    shares_in_flight: bool = True  # what a request ahead is about to compute can be reused
    cleared: frozenset[Tier] = frozenset({Tier.DEVICE})  # the tiers that AllBlocksCleared empties

    def reusable_tokens(self, run_tokens: int, block_size: int, prompt_tokens: int) -> int:
        """Tokens that need no prefill, of a prompt whose first `run_tokens` are cached in blocks of `block_size`.

        A fully cached prompt whose length is a multiple of the block size loses its whole last block, since its last
        token is always computed.
        """
        unit = max(self.alignment, block_size)
        reusable = min(run_tokens, prompt_tokens - self.computed_at_least) // unit * unit
        if self.drops_last_unit:
            reusable -= unit
        return max(0, reusable)

    def with_blocks_seen(self, lookahead: int, pairs: bool) -> ReuseRule:
        """The rule of an engine whose events show look-ahead tokens in its blocks' identities.

        SGLang's EAGLE counts pairs of neighbours, of which a prompt has one less than tokens. vLLM 0.33 drops no block
        where its hashes look ahead, and still does where it had to turn that off.
        """
        if pairs:
            return replace(self, computed_at_least=2, drops_last_unit=False)
        return replace(self, drops_last_unit=False) if lookahead else self


def vllm(speculative: bool = False, cache_hit_alignment: int = 0) -> ReuseRule:
    """`speculative`: EAGLE or MTP. `cache_hit_alignment`: `cache_hit_alignment_tokens` of a hybrid model, else 0."""
    return ReuseRule(alignment=cache_hit_alignment, drops_last_unit=speculative)


def sglang() -> ReuseRule:
    """A prompt enters SGLang's tree with its result, so requests of one batch share nothing.

    `flush_cache` resets the tree with its host copies; what storage holds survives.
    """
    return ReuseRule(shares_in_flight=False, cleared=frozenset({Tier.DEVICE, Tier.HOST}))
