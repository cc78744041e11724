"""The step that an engine has computed, by the prompts whose blocks it announces with it.

Which requests a step admits is known from outside by when they were sent, and they are on their way for longer or
shorter than is thought: of many that come at once to an idle engine the first step has one, or three. What it stores
says which.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Set

from predictor.engines.vllm import Queue, Sequence, Settings, Step, schedule, undo
from predictor.stored_run import StoredRun

# Who waits further back has not been admitted.
_WAITING_LOOKED_AT = 256
_ANY_SPACE = 1 << 40


def stores(step: Step, block_size: int) -> list[Sequence]:
    """Those of whose prompt it completes a block, which is announced. (Of what is computed again of an output that was
    preempted not all blocks are known.)"""
    return [seq for seq, start, end in step.chunks if start // block_size < min(end // block_size, len(seq.hashes))]


def admitted_instead(queue: Queue, runs: Collection[StoredRun], block_size: int) -> list[Sequence]:
    """Those who are taken to wait, and of whom one of these runs is what their first step stores."""
    firsts = {run.first for run in runs if run.first is not None}
    found = []
    for seq in itertools.islice(queue.waiting, _WAITING_LOOKED_AT) if firsts else ():
        place = seq.computed // block_size
        if place < len(seq.hashes) and int(seq.hashes[place]) in firsts:
            found.append(seq)
    return found


def recompose(queue: Queue, settings: Settings, step: Step, announced: Collection[Sequence]) -> Step:
    """Composes the newest step anew, so that of those who waited before it only `announced` are admitted, and those of
    whom it stores nothing. Where the engine's rule cannot have it so, or somebody in it has left since, it stays as it
    was.
    """
    size, wanted = settings.block_size, {id(seq) for seq in announced}
    if step.preempted or _fits(step, size, wanted):
        return step
    newcomers = {id(seq) for seq, _, _ in step.chunks[len(step.chunks) - step.admitted :]}
    stored = {id(seq) for seq in stores(step, size)}
    running = {id(seq) for seq in queue.running}
    if not stored - newcomers <= wanted or any(id(seq) not in running for seq, _, _ in step.chunks):
        return step
    undo(queue, step)
    # Whom the engine has let in there was space for: what is free is known from outside only nearly.
    for room in 0, _ANY_SPACE:
        found = compose_of(queue, settings, wanted | (newcomers - stored), room)
        if found.preempted or _fits(found, size, wanted):
            return found
        undo(queue, found)
    return compose_of(queue, settings, newcomers)


def _fits(step: Step, block_size: int, announced: Set[int]) -> bool:
    """Whether its chunks would be announced like this."""
    prefilled = {id(seq) for seq, _, _ in step.chunks}
    return {id(seq) for seq in stores(step, block_size)} <= announced <= prefilled


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
