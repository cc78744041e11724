"""A step composed once more, by what its engine announces of it.

Which requests a step admits is known from outside by when they were sent, and hangs on some that nobody told us of. The
blocks that it stores say who was in it, and up to which one each has got. There are two ways to compose it by that:

* `recompose` asks only *who* was let in, and leaves to the rule how far each has got; what the rule cannot have so
  stays as it was. It is for steps that have not ended yet (an asynchronous engine announces a step when it begins), and
  for prompts that were all booked: their lengths are known.
* `compose_as_stored` takes the blocks at their word, *how far* as well, whatever the queue was taken to be and whatever
  the rule would say. It is for a step that has just ended, in which somebody was whom nobody booked: of him there is
  nothing but his blocks, and who was booked has what was left by him.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Set
from collections.abc import Sequence as ReadOnly
from itertools import takewhile
from typing import NamedTuple

import msgspec

from predictor.engines.vllm import Queue, Sequence, Settings, Step, schedule, undo

Compose = Callable[[Queue], Step]

_ANY_SPACE = 1 << 40


class Participant(NamedTuple):
    """One of whom a step has prefilled a chunk, as its blocks say. In tokens.

    Of who was not booked (`seq.booked`) it is not known how long the prompt is.
    """

    seq: Sequence
    start: int  # where the first of its blocks begins
    stored: int  # where the last of them ends; less than a block more of it is computed


def storing(step: Step, block_size: int) -> Iterator[tuple[Sequence, int]]:
    """Those of whom it prefills a chunk that completes a block, each with the block that its chunk begins in."""
    for seq, start, end in step.chunks:
        block = start // block_size
        if end // block_size > block:
            yield seq, block


# By who was let in


def recompose(
    queue: Queue,
    settings: Settings,
    step: Step,
    announced: Collection[Sequence],
    begins: Collection[tuple[Sequence, int]],
) -> Step:
    """Composes the newest step anew, so that of those who waited before it only `announced` and those in `begins` are
    admitted, the latter with so many tokens cached, and those of whom it stores nothing. Where the engine's rule cannot
    have it so, or somebody in it has left since, it stays as it was.
    """
    size, wanted = settings.block_size, {id(seq) for seq in (*announced, *(seq for seq, _ in begins))}
    if step.preempted or (not begins and _fits(step, size, wanted)):
        return step
    newcomers = {id(seq) for seq, _, _ in step.chunks[len(step.chunks) - step.admitted :]}
    stored = _told_of(step, size)
    running = {id(seq) for seq in queue.running}
    if not stored - newcomers <= wanted or any(id(seq) not in running for seq, _, _ in step.chunks):
        return step
    undo(queue, step)
    before = [(seq, seq.computed, seq.shared_blocks) for seq, _ in begins]
    for seq, cached_tokens in begins:
        seq.computed = cached_tokens
        seq.shared_blocks = min(seq.shared_blocks, cached_tokens // size)
    # Whom the engine has let in there was space for: what is free is known from outside only nearly.
    for room in 0, _ANY_SPACE:
        found = compose_of(queue, settings, wanted | (newcomers - stored), room)
        if found.preempted or _fits(found, size, wanted):
            return found
        undo(queue, found)
    for seq, computed, shared_blocks in before:
        seq.computed, seq.shared_blocks = computed, shared_blocks
    return compose_of(queue, settings, newcomers)


def compose_of(queue: Queue, settings: Settings, admits: Set[int], room_blocks: int = 0) -> Step:
    """As if nobody else waited, and so many more blocks were free for now.

    What is cached of them is as it was: by now the cache has what they store themselves.
    """
    everybody = queue.waiting
    queue.waiting = deque(seq for seq in everybody if id(seq) in admits)
    if queue.free_blocks is not None:
        queue.free_blocks += room_blocks
    step = schedule(queue, settings)
    if queue.free_blocks is not None:
        queue.free_blocks -= room_blocks
    admitted = {id(seq) for seq, _, _ in step.chunks[len(step.chunks) - step.admitted :]}
    queue.waiting = deque([*step.preempted, *(seq for seq in everybody if id(seq) not in admitted)])
    return step


def _fits(step: Step, block_size: int, announced: Set[int]) -> bool:
    """Whether its chunks would be announced like this."""
    prefilled = {id(seq) for seq, _, _ in step.chunks}
    return _told_of(step, block_size) <= announced <= prefilled


def _told_of(step: Step, block_size: int) -> set[int]:
    """Those of whom it stores a block that is known to be theirs: of what is computed again of an output that was
    preempted not all are."""
    return {id(seq) for seq, block in storing(step, block_size) if block < len(seq.hashes)}


# By how far each has got


def compose_as_stored(queue: Queue, settings: Settings, parts: ReadOnly[Participant], compose: Compose) -> Step:
    """The step that has stored this, composed from the state before it. Prompts of unknown length are cut where there
    was room for more; whoever waits and would have stored a block is not let in."""
    size = settings.block_size
    for seq, start, stored in parts:
        if not start <= seq.computed < start + size or (seq.generated and not seq.prefilling):
            seq.computed, seq.generated = start, 0
        if not seq.booked:
            seq.prompt_tokens = max(seq.prompt_tokens, stored + 2 * size)
    running = {id(seq) for seq in queue.running}
    let_in = list({id(part.seq): part.seq for part in parts if id(part.seq) not in running}.values())
    ids = {id(seq) for seq in let_in}
    behind = [seq for seq in queue.waiting if id(seq) not in ids]
    tiny = list(takewhile(lambda seq: seq.left < size, behind))
    queue.waiting = deque([*let_in, *tiny])
    step = _with_lengths(queue, parts, compose, size)
    for part in parts:
        step = _fitted(queue, step, part, size)
    queue.waiting.extend(behind[len(tiny) :])
    return step


def _with_lengths(queue: Queue, parts: ReadOnly[Participant], compose: Compose, size: int) -> Step:
    """Composes it, and anew where that shows that somebody was let in, or how long a prompt is that nobody booked."""
    step = compose(queue)
    cut: Participant | None = None
    for part in parts:
        seq = part.seq
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
        if not seq.booked and end >= part.stored + size:
            undo(queue, step)
            seq.prompt_tokens = max(seq.computed + 1, part.stored + size // 2)
            step = compose(queue)
            cut = part
        elif end < part.stored and cut is not None and cut.seq.prompt_tokens - cut.stored >= part.stored - end:
            # What was guessed of the last block of one before it was too much.
            undo(queue, step)
            cut.seq.prompt_tokens -= part.stored - end
            step = compose(queue)
    return step


def _end_of(step: Step, seq: Sequence) -> int | None:
    return next((end for other, _, end in step.chunks if other is seq), None)


def _fitted(queue: Queue, step: Step, part: Participant, size: int) -> Step:
    """The same with as much of the chunk as its blocks say."""
    seq, stored = part.seq, part.stored
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
