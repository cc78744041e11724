"""TensorRT-LLM: its step rule in the documented basics. What it reuses is taken to be as in vLLM.

Reads like the C++ `GuaranteedNoEvictScheduler` (`cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp`, as of commit
02a10fe) followed by the micro batch scheduler (`tensorrt_llm/_torch/pyexecutor/scheduler.py`, as of 034fffb). No such
engine was run. Whoever is let in has space for all that it may generate, so nobody ever gives way; who generates comes
first in a step, then prompts in order, and unless they may be cut one that does not fit stops those behind it.

TensorRT-LLM's names for the shared settings: `block_size` is its tokens_per_block, `max_num_batched_tokens` its
max_num_tokens, `max_num_seqs` its max_batch_size, `max_model_len` its max_seq_len, `async_scheduling` its overlap
scheduler. Not followed: other capacity policies, chunks of equal progress, and waiting for a prompt ahead that begins
alike.
"""

from __future__ import annotations

from collections import deque

from predictor.engines.vllm import Lookup, Queue, Sequence, Settings, Step

# The LLM API's defaults.
MAX_NUM_TOKENS, MAX_BATCH_SIZE = 8192, 2048


def output_room(prompt_tokens: int, max_output: int | None, settings: Settings) -> int:
    """Tokens of space that must be there for an output; without a `max_tokens` that is all up to the context's end."""
    if max_output is not None:
        return max_output
    return max(0, settings.max_model_len - prompt_tokens) if settings.max_model_len is not None else 0


def reserved_blocks(seq: Sequence, settings: Settings) -> int:
    """What it holds from its admission to its end, less what others hold as well."""
    tokens = seq.prompt_tokens + output_room(seq.prompt_tokens, seq.max_output, settings)
    return max(0, -(-tokens // settings.block_size) - seq.shared_blocks)


def schedule(queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step:
    """Composes the next step, and moves `computed` and `generated` to where they are after it.

    `lookup` is asked for each request whose admission is tried. `room` is what a request behind all others could take.
    """
    del newcomers
    budget = settings.max_num_batched_tokens
    decodes = []
    for seq in queue.running:
        is_done = seq.max_output is not None and seq.generated >= seq.max_output  # its last token is on its way
        if not seq.prefilling and not is_done and budget > 0:
            decodes.append(seq)
            budget -= 1
    chunks: list[tuple[Sequence, int, int]] = []
    for seq in queue.running:
        if seq.prefilling and (want := _chunk(seq, budget, settings)):
            budget -= want
            _add(seq, want, chunks)
    admitted, kept_out, blocked = 0, deque[Sequence](), False
    while queue.waiting and not blocked and budget > 0 and len(queue.running) < settings.max_num_seqs:
        seq = queue.waiting[0]
        if lookup is not None:
            seq.computed, seq.shared_blocks = lookup(seq)
        need = reserved_blocks(seq, settings)
        want = _chunk(seq, budget, settings)
        blocked = queue.free_blocks is not None and need > queue.free_blocks
        blocked = blocked or not (want or settings.enable_chunked_prefill)
        if blocked:
            break
        queue.waiting.popleft()
        if not want:
            kept_out.append(seq)  # not even a block of it fits; a shorter one behind it may fit whole
            continue
        if queue.free_blocks is not None:
            seq.blocks = need
            queue.free_blocks -= need
        queue.running.append(seq)
        admitted += 1
        budget -= want
        _add(seq, want, chunks)
    queue.waiting.extendleft(reversed(kept_out))
    for seq in decodes:
        seq.computed += 1
        seq.generated += 1
    is_open = not blocked and not queue.waiting and len(queue.running) < settings.max_num_seqs
    return Step(tuple(chunks), tuple(decodes), budget if is_open else 0, (), admitted)


def _chunk(seq: Sequence, budget: int, settings: Settings) -> int:
    """The tokens of its prompt that fit into the step; one that is cut gets whole blocks."""
    if seq.left <= budget:
        return seq.left
    return budget // settings.block_size * settings.block_size if settings.enable_chunked_prefill else 0


def _add(seq: Sequence, want: int, chunks: list[tuple[Sequence, int, int]]) -> None:
    start, left = seq.computed, seq.left
    seq.computed = start + want
    if want == left:
        seq.generated += 1
    chunks.append((seq, start, seq.computed))
