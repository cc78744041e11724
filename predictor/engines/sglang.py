"""SGLang: its step rule, first come first served. What it reuses is in `reuse`.

Mirrors `get_next_batch_to_run` and `update_running_batch` in `sglang/srt/managers/scheduler.py` and `PrefillAdder` in
`sglang/srt/managers/schedule_policy.py` of SGLang 0.5.23. Prefill goes strictly before decode, one request at a time is
cut into chunks, and a request is admitted where its output is likely to fit as well.

SGLang's names for the shared settings: `block_size` is its page_size, `max_num_batched_tokens` its
chunked_prefill_size, `max_num_seqs` its max_running_requests, `async_scheduling` its overlap schedule.
"""

from __future__ import annotations

from collections.abc import Iterable

from predictor.engines.vllm import Lookup, Queue, Sequence, Settings, Step

# Nobody reserves more for a request's output than this (CLIP_MAX_NEW_TOKENS).
RESERVED_MOST_TOKENS = 4096
# new_token_ratio: what of an output not yet there is reserved while a request runs. It begins at the first, and loses a
# step's worth with each decode step down to the last (0.7 and 0.14 of it after 600 steps, by the global defaults).
FIRST_RATIO, LAST_RATIO = 0.7, 0.7 * 0.14
RATIO_STEP = (FIRST_RATIO - LAST_RATIO) / 600
# What a retraction adds to it.
_RATIO_AFTER_RETRACTION = 0.1


def reserved_tokens(seq: Sequence) -> int:
    """Room that its output may yet take, as the engine counts it. Without a `max_tokens` it counts the most."""
    if seq.max_output is None:
        return RESERVED_MOST_TOKENS
    return min(max(0, seq.max_output - seq.generated), RESERVED_MOST_TOKENS)


def ratio_after(ratio: float, decode_steps: int) -> float:
    """What new_token_ratio has come down to."""
    return max(LAST_RATIO, ratio - decode_steps * RATIO_STEP)


def promised_tokens(running: Iterable[Sequence], ratio: float) -> float:
    """Of the free space, what is spoken for: a part of the outputs of who decodes, all of who is in mid-prefill."""
    total = 0.0
    for seq in running:
        total += seq.left + reserved_tokens(seq) if seq.prefilling else ratio * reserved_tokens(seq)
    return total


def schedule(queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step:
    """Composes the next step: a prefill batch if there is one, else a decode step.

    Moves `computed` and `generated` to where they are after it. `lookup` is asked for each request whose admission is
    tried. With `newcomers` imagined behind the queue, what could be left to them is the step's `room`.
    """
    step = _prefill(queue, settings, newcomers, lookup)
    return step if step.chunks else _decode(queue, settings, step.room)


def _prefill(queue: Queue, settings: Settings, newcomers: int, lookup: Lookup | None) -> Step:
    size, running, waiting = settings.block_size, queue.running, queue.waiting
    left, input_left = settings.max_num_batched_tokens, settings.max_prefill_tokens
    free = queue.free_blocks
    chunks: list[tuple[Sequence, int, int]] = []
    cut = next((seq for seq in running if seq.prefilling), None)
    promised = 0.0 if free is None else promised_tokens((s for s in running if s is not cut), queue.reserve_ratio)
    if cut is not None:
        want = min(left, cut.left)
        promised += cut.left - want + reserved_tokens(cut)
        left -= want
        input_left -= want
        free = _chunk(cut, want, free, size, chunks)
    admitted = 0
    blocked = cut is not None and cut.prefilling
    while waiting and left >= size and input_left > 0 and not blocked:
        seq = waiting[0]
        if len(running) >= settings.max_num_seqs:
            break
        if lookup is not None:
            seq.computed, seq.shared_blocks = lookup(seq)
        want = seq.left
        if free is not None:
            hits = max(0, -(-seq.computed // size) - seq.shared_blocks)
            need = want + reserved_tokens(seq) + size
            if promised + need > (free - hits) * size:
                blocked = True
                break
            promised += need - want
        if want > left:
            want = left // size * size
        padded = -(-want // size) * size
        left -= padded
        input_left -= padded
        waiting.popleft()
        running.append(seq)
        admitted += 1
        free = _chunk(seq, want, free, size, chunks)
        blocked = seq.prefilling
        if blocked and free is not None:
            promised += seq.left
    queue.free_blocks = free
    is_open = not blocked and not waiting and len(running) < settings.max_num_seqs and left >= size
    room = left // size * size if is_open and (chunks or newcomers) else 0
    return Step(tuple(chunks), (), room if input_left > 0 else 0, (), admitted)


def _chunk(
    seq: Sequence, want: int, free: int | None, size: int, chunks: list[tuple[Sequence, int, int]]
) -> int | None:
    start = seq.computed
    seq.computed = start + want
    if want == seq.prompt_tokens + seq.generated - start:
        seq.generated += 1
    chunks.append((seq, start, seq.computed))
    if free is None:
        return None
    new = max(0, -(-seq.computed // size) - seq.blocks - seq.shared_blocks)
    seq.blocks += new
    return free - new


def _decode(queue: Queue, settings: Settings, room: int) -> Step:
    size, free = settings.block_size, queue.free_blocks
    retracted: list[Sequence] = []
    # Whose last token is on its way (overlap) takes no further part.
    decodes = [seq for seq in queue.running if seq.max_output is None or seq.generated < seq.max_output]
    if free is not None:
        while len(decodes) > 1 and free < sum(1 for seq in decodes if seq.computed % size == 0):
            victim = min(decodes, key=lambda seq: (seq.generated, -seq.prompt_tokens))
            decodes.remove(victim)
            queue.running.remove(victim)
            free += victim.blocks
            victim.computed = victim.blocks = victim.shared_blocks = 0
            queue.waiting.appendleft(victim)
            retracted.append(victim)
        if retracted:
            queue.reserve_ratio = min(1.0, queue.reserve_ratio + _RATIO_AFTER_RETRACTION)
    for seq in decodes:
        seq.computed += 1
        seq.generated += 1
        if free is not None:
            new = -(-seq.computed // size) - seq.blocks - seq.shared_blocks
            if new > 0:
                seq.blocks += new
                free -= new
    queue.free_blocks = free
    queue.reserve_ratio = ratio_after(queue.reserve_ratio, 1)
    return Step((), tuple(decodes), room, tuple(retracted), 0)
