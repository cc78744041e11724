"""The step that an engine has computed, by the prompts whose blocks it announces with it.

Which requests a step admits is known from outside by when they were sent, and they are on their way for longer or
shorter than is thought: of many that come at once to an idle engine the first step has one, or three. What it stores
says which.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Set

import numpy as np

from predictor.engines.vllm import Queue, Sequence, Settings, Step, schedule, undo
from predictor.stored_run import StoredRun

# Who waits further back has not been admitted.
_WAITING_LOOKED_AT, _HASHES_LOOKED_AT = 256, 100_000
_ANY_SPACE = 1 << 40


def stores(step: Step, block_size: int) -> list[Sequence]:
    """Those of whose prompt it completes a block, which is announced. (Of what is computed again of an output that was
    preempted not all blocks are known.)"""
    return [seq for seq, start, end in step.chunks if start // block_size < min(end // block_size, len(seq.hashes))]


def begun(queue: Queue, step: Step, runs: Collection[StoredRun], block_size: int) -> list[tuple[Sequence, int]]:
    """Of those who are taken to wait, or to be admitted with `step`, whom one of these runs tells otherwise: each with
    the tokens that it was found to have cached, since there its first chunk begins."""
    firsts = {run.first for run in runs if run.first is not None}
    newcomers = (seq for seq, _, _ in step.chunks[len(step.chunks) - step.admitted :])
    found, looked_at = [], 0
    for seq in itertools.chain(newcomers, itertools.islice(queue.waiting, _WAITING_LOOKED_AT)):
        looked_at += len(seq.hashes)
        if not firsts or looked_at > _HASHES_LOOKED_AT:
            break
        hashes = np.asarray(seq.hashes, np.uint64)
        places = np.flatnonzero(np.isin(hashes, np.array(list(firsts), np.uint64)))
        if len(places):
            found.append((seq, int(places[0]) * block_size))
            # Of several who begin alike it is the foremost.
            firsts.remove(int(hashes[places[0]]))
    return found


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
    stored = {id(seq) for seq in stores(step, size)}
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
