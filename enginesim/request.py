"""One engine request: its tokens, how far they are computed, and the blocks that hold them."""

from dataclasses import dataclass, field
from enum import Enum

from enginesim.block_hash import ROOT, extend_chain


class Phase(Enum):
    """Where a request stands. A preempted request is WAITING again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the scheduler.

    `token_ids` is the prompt and, behind it, what was generated. `block_hashes` has one hash per full block of them; it
    must be complete (`hash_more` returned True) before the request is added to a scheduler.
    `cached_tokens` is the hit at the first scheduling, as vLLM reports it; None before.
    """

    id: int
    token_ids: list[int]
    max_tokens: int
    block_size: int
    cache_salt: str | None = None
    seed: int = 0
    lookahead: int = 0  # tokens behind a block that are part of its identity
    ends_by_itself_after: int | None = None  # tokens; what a model's own end of sequence is

    prompt_tokens: int = field(init=False)
    phase: Phase = field(init=False, default=Phase.WAITING)
    computed_tokens: int = field(init=False, default=0)
    cached_tokens: int | None = field(init=False, default=None)
    preemptions: int = field(init=False, default=0)
    block_hashes: list[int] = field(init=False, default_factory=list)
    block_ids: list[int] = field(init=False, default_factory=list)
    registered_blocks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("token_ids must hold at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        self.prompt_tokens = len(self.token_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Everything but the token sampled last is computed."""
        return self.output_tokens > 0 and self.computed_tokens >= len(self.token_ids) - 1

    def append(self, token_id: int) -> None:
        """Take in a sampled token, and hash the block that it fills."""
        self.token_ids.append(token_id)
        if (len(self.token_ids) - self.lookahead) % self.block_size == 0:
            self.hash_more(1)

    def hash_more(self, blocks: int | None = None) -> bool:
        """Hash up to `blocks` further full blocks (None: all); True when none is left. About 1 us a block."""
        full = max(0, len(self.token_ids) - self.lookahead) // self.block_size
        first = len(self.block_hashes)
        last = full if blocks is None else min(full, first + blocks)
        if first < last:
            parent = self.block_hashes[-1] if first else ROOT
            tokens = self.token_ids[first * self.block_size : last * self.block_size + self.lookahead]
            salt = self.cache_salt if first == 0 else None
            self.block_hashes += extend_chain(parent, tokens, self.block_size, salt, self.lookahead)
        return last == full
