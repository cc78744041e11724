"""SGLang: its step rule, first come first served. What it reuses is in `reuse`.

Mirrors `get_next_batch_to_run` and `update_running_batch` in `sglang/srt/managers/scheduler.py`, `PrefillAdder` in
`sglang/srt/managers/schedule_policy.py` and `retract_decode` in `sglang/srt/managers/schedule_batch.py` of SGLang
0.5.23. Prefill goes strictly before decode, one request at a time is cut into chunks, and a request is admitted where
its output is likely to fit as well. Who does not fit shuts the door: nobody is tried again before somebody has left.

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
# A retraction sets it to what the others have generated and will in so many steps, of all that they may.
_STEPS_AFTER_RETRACTION = 20
_MOST_OUTPUT = 1 << 30  # without a `max_tokens`


def reserved_tokens(max_output: int | None, generated: int) -> int:
    """Room that an output may yet take, as the engine counts it. Without a `max_tokens` it counts the most."""
    if max_output is None:
        return RESERVED_MOST_TOKENS
    return min(max(0, max_output - generated), RESERVED_MOST_TOKENS)


def ratio_after(ratio: float, decode_steps: int) -> float:
    """What new_token_ratio has come down to."""
    return max(LAST_RATIO, ratio - decode_steps * RATIO_STEP)


def ratio_after_retraction(staying: Iterable[tuple[int, int | None]]) -> float:
    """What it is once somebody was retracted. Of each who stays: the tokens it has generated, and the most it may."""
    count = generated = most = 0
    for tokens, max_output in staying:
        count += 1
        generated += tokens
        most += _MOST_OUTPUT if max_output is None else max_output
    return min(1.0, (generated + _STEPS_AFTER_RETRACTION * count) / (most + 1))


def schedule(queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step:
    """Composes the next step: a prefill batch if there is one, else a decode step.

    Moves `computed` and `generated` to where they are after it. `lookup` is asked for each request whose admission is
    tried. With `newcomers` imagined behind the queue, what could be left to them is the step's `room`. With overlap the
    step may be empty although there is work: the next one is composed when the one under way has ended.
    """
    step = _prefill(queue, settings, newcomers, lookup)
    if not step.chunks:
        step = _decode(queue, settings, step.room)
    if settings.async_scheduling:
        queue.unseen = frozenset([seq.id for seq in step.decodes] + [seq.id for seq, _, _ in step.chunks])
    return step


def _prefill(queue: Queue, settings: Settings, newcomers: int, lookup: Lookup | None) -> Step:
    size, running, waiting, free = settings.block_size, queue.running, queue.waiting, queue.free_blocks
    cut = next((seq for seq in running if seq.prefilling), None)
    decoders = len(running) - (cut is not None)
    if cut is not None or not decoders:
        queue.shut = False
    if cut is None and (queue.shut or not (waiting or newcomers)):
        return Step((), (), 0)
    left, input_left = settings.max_num_batched_tokens, settings.max_prefill_tokens
    chunks: list[tuple[Sequence, int, int]] = []
    promised = 0.0
    if free is not None:
        promised = queue.reserve_ratio * sum(
            reserved_tokens(seq.max_output, seq.generated - (seq.id in queue.unseen))
            for seq in running
            if seq is not cut
        )
    if cut is not None:
        want = min(left, cut.left)
        if free is not None and (space := free * size - int(promised)) > 0:
            want = min(want, space)
        promised += size + (0 if want < cut.left else reserved_tokens(cut.max_output, 0))
        padded = -(-want // size) * size
        left -= padded
        input_left -= padded
        free = _chunk(cut, want, free, size, chunks)
    admitted = 0
    while waiting and not queue.shut and left > 0 and input_left > 0:
        seq = waiting[0]
        if len(running) >= settings.max_num_seqs:
            queue.shut = True
            break
        if lookup is not None:
            seq.computed, seq.shared_blocks = lookup(seq)
        want = seq.left
        if free is not None:
            hits = max(0, -(-seq.computed // size) - seq.shared_blocks)
            need = want + reserved_tokens(seq.max_output, seq.generated) + size
            if need >= (free - hits) * size - promised:
                queue.shut = bool(running)
                break
        padded, is_cut = -(-want // size) * size, False
        if padded > left:
            want = padded = left // size * size
            is_cut = True
            if not want:
                break
        promised += size + (0 if is_cut else reserved_tokens(seq.max_output, 0))
        left -= padded
        input_left -= padded
        waiting.popleft()
        running.append(seq)
        admitted += 1
        free = _chunk(seq, want, free, size, chunks)
        if free is not None and free * size - promised <= 0:
            queue.shut = True
        if is_cut:
            break
    queue.free_blocks = free
    blocked = queue.shut or bool(waiting) or any(seq.prefilling for seq, _, _ in chunks[-1:])
    is_open = not blocked and len(running) < settings.max_num_seqs and left >= size and input_left > 0
    return Step(tuple(chunks), (), left // size * size if is_open and (chunks or newcomers) else 0, (), admitted)


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
    # Whose last token is on its way (overlap) takes no further part.
    decodes = [seq for seq in queue.running if seq.max_output is None or seq.generated < seq.max_output]
    if not decodes:
        queue.shut = False
        return Step((), (), room)
    retracted: list[Sequence] = []
    if free is not None and free < _pages_needed(decodes, size):
        if len(decodes) < len(queue.running):
            return Step((), (), 0)  # what they leave is waited for
        while len(decodes) > 1 and free < _pages_needed(decodes, size):
            victim = min(decodes, key=lambda seq: (seq.generated, -seq.prompt_tokens))
            decodes.remove(victim)
            queue.running.remove(victim)
            free += victim.blocks
            victim.computed = victim.blocks = victim.shared_blocks = 0
            queue.waiting.append(victim)
            retracted.append(victim)
        queue.reserve_ratio = ratio_after_retraction(
            (seq.generated - (seq.id in queue.unseen), seq.max_output) for seq in decodes
        )
        queue.shut = False
    else:
        queue.reserve_ratio = ratio_after(queue.reserve_ratio, 1)
    for seq in decodes:
        seq.computed += 1
        seq.generated += 1
        if free is not None:
            new = -(-seq.computed // size) - seq.blocks - seq.shared_blocks
            if new > 0:
                seq.blocks += new
                free -= new
    queue.free_blocks = free
    return Step((), tuple(decodes), room, tuple(retracted), 0)


def _pages_needed(decodes: list[Sequence], size: int) -> int:
    """New pages of the next decode step."""
    return sum(1 for seq in decodes if seq.computed % size == 0)
