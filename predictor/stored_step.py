"""A step composed once more when it has ended, by the blocks that it stored.

Who is in an engine's step hangs on requests that nobody told us of. What it has stored says who was in it, in the order
in which it was composed, and up to which block each has got; by that the rule composes it, whatever the queue was taken
to be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadOnly
from itertools import takewhile
from typing import NamedTuple

import msgspec

from predictor.engines.vllm import Queue, Sequence, Settings, Step, undo

Compose = Callable[[Queue], Step]


class StoredChunk(NamedTuple):
    """What a step has prefilled of one sequence, in tokens; up to less than a block more of it is computed than stored.

    `known`: how long its prompt is, is known.
    """

    seq: Sequence
    start: int
    stored: int
    known: bool


def compose_as_stored(queue: Queue, settings: Settings, chunks: ReadOnly[StoredChunk], compose: Compose) -> Step:
    """The step that has stored these chunks, composed from the state before it. Prompts of unknown length are cut where
    there was room for more; whoever waits and would have stored a block is not let in."""
    size = settings.block_size
    for seq, start, stored, known in chunks:
        if not start <= seq.computed < start + size or (seq.generated and not seq.prefilling):
            seq.computed, seq.generated = start, 0
        if not known:
            seq.prompt_tokens = max(seq.prompt_tokens, stored + 2 * size)
    running = {id(seq) for seq in queue.running}
    let_in = list({id(chunk.seq): chunk.seq for chunk in chunks if id(chunk.seq) not in running}.values())
    ids = {id(seq) for seq in let_in}
    behind = [seq for seq in queue.waiting if id(seq) not in ids]
    tiny = list(takewhile(lambda seq: seq.left < size, behind))
    queue.waiting = deque([*let_in, *tiny])
    step = compose(queue)
    cut: StoredChunk | None = None
    for chunk in chunks:
        seq = chunk.seq
        end = _end_of(step, seq)
        if end is None and not step.preempted and any(seq is other for other in queue.waiting):
            # It was let in, whatever the rule says.
            undo(queue, step)
            queue.waiting = deque(other for other in queue.waiting if other is not seq)
            queue.running.append(seq)
            step = compose(queue)
            end = _end_of(step, seq)
        if end is None or step.preempted:
            continue
        if not chunk.known and end >= chunk.stored + size:
            undo(queue, step)
            seq.prompt_tokens = max(seq.computed + 1, chunk.stored + size // 2)
            step = compose(queue)
            cut = chunk
        elif end < chunk.stored and cut is not None and cut.seq.prompt_tokens - cut.stored >= chunk.stored - end:
            # What was guessed of the last block of one before it was too much.
            undo(queue, step)
            cut.seq.prompt_tokens -= chunk.stored - end
            step = compose(queue)
    for chunk in chunks:
        step = _fitted(queue, step, chunk, size)
    queue.waiting.extend(behind[len(tiny) :])
    return step


def _end_of(step: Step, seq: Sequence) -> int | None:
    return next((end for other, _, end in step.chunks if other is seq), None)


def _fitted(queue: Queue, step: Step, chunk: StoredChunk, size: int) -> Step:
    """The same with as much of the chunk as its blocks say."""
    seq, stored = chunk.seq, chunk.stored
    for place, (other, start, end) in enumerate(step.chunks):
        if other is not seq or stored <= end < stored + size or stored > seq.prompt_tokens:
            continue
        seq.computed = stored
        seq.generated = int(stored >= seq.prompt_tokens)
        blocks = max(0, -(-stored // size) - seq.shared_blocks)
        if queue.free_blocks is not None:
            queue.free_blocks -= blocks - seq.blocks
        seq.blocks = blocks
        chunks = (*step.chunks[:place], (seq, start, stored), *step.chunks[place + 1 :])
        return msgspec.structs.replace(step, chunks=chunks)
    return step


def would_store(step: Step, size: int) -> Iterator[Sequence]:
    """Those of whose prompts it completes a block."""
    return (seq for seq, start, end in step.chunks if end // size > start // size)
