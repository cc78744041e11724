"""vLLM V1: its step rule, for one full-attention group, fcfs, synchronous. What it reuses is in `reuse`.

Mirrors `vllm/v1/core/sched/scheduler.py` (schedule) as read in vLLM 0.32.0.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from predictor.engines import reuse


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's own settings that decide what a step holds. Defaults are vLLM's on a GPU of 70 GiB or more."""

    block_size: int = 16
    num_gpu_blocks: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    long_prefill_token_threshold: int = 0  # tokens; 0 = no cap
    max_model_len: int | None = None


@dataclass(slots=True)
class Sequence:
    """One request inside the engine. All counts are tokens."""

    id: str
    prompt_tokens: int
    computed: int  # prompt tokens whose KV exists: what was cached, and what was prefilled since
    expected_output: int
    watched: bool = True  # its first token will be seen, so the shadow can wait for it
    generated: int = 0

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_tokens

    @property
    def prefill_left(self) -> int:
        return self.prompt_tokens - self.computed

    def copy(self) -> Sequence:
        return Sequence(self.id, self.prompt_tokens, self.computed, self.expected_output, self.watched, self.generated)


@dataclass(slots=True)
class Queue:
    """The scheduler's two lists: `running` in order of admission, `waiting` in order of arrival."""

    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def copy(self) -> Queue:
        return Queue([seq.copy() for seq in self.running], deque(seq.copy() for seq in self.waiting))


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computes, and what it leaves: `room` tokens for a request queued behind all others."""

    chunks: tuple[tuple[Sequence, int], ...]  # prefill: a sequence and how many of its tokens
    decodes: tuple[Sequence, ...]
    room: int

    @property
    def new_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)

    @property
    def squares(self) -> int:
        """Sum over the chunks of end^2 - start^2, positions in tokens: attention's work."""
        return sum((seq.computed + tokens) ** 2 - seq.computed**2 for seq, tokens in self.chunks)

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.decodes


def reusable_tokens(run_blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Tokens that need no prefill, of a prompt whose first `run_blocks` blocks are cached; see `reuse.ReuseRule`."""
    return reuse.vllm().reusable_tokens(run_blocks * block_size, block_size, prompt_tokens)


def room_beside(decodes: int, settings: Settings) -> int:
    """Tokens that the only prefill gets in a step, beside so many decodes."""
    left = max(1, settings.max_num_batched_tokens - decodes)
    cap = settings.long_prefill_token_threshold
    return min(cap, left) if decodes and cap > 0 else left


def schedule(queue: Queue, settings: Settings, newcomers: int = 0) -> Step:
    """Composes the next step and moves the admitted from waiting to running; computes nothing yet.

    `newcomers` requests are imagined behind the queue: they count where the engine counts requests (the threshold
    spares a request that is alone, since 0.31), and `room` is what they could take.
    """
    budget = settings.max_num_batched_tokens
    cap = settings.long_prefill_token_threshold
    if cap <= 0 or len(queue) + newcomers <= 1:
        cap = budget
    chunks: list[tuple[Sequence, int]] = []
    decodes: list[Sequence] = []
    for seq in queue.running:
        if budget <= 0:
            break
        if seq.prefilling:
            tokens = min(seq.prefill_left, cap, budget)
            chunks.append((seq, tokens))
            budget -= tokens
        else:
            decodes.append(seq)
            budget -= 1
    while queue.waiting and budget > 0 and len(queue.running) < settings.max_num_seqs:
        seq = queue.waiting.popleft()
        queue.running.append(seq)
        tokens = min(seq.prefill_left, cap, budget)
        chunks.append((seq, tokens))
        budget -= tokens
    open_to_newcomers = not queue.waiting and len(queue.running) < settings.max_num_seqs
    return Step(tuple(chunks), tuple(decodes), min(budget, cap) if open_to_newcomers else 0)
