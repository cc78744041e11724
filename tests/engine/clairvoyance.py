"""What a shadow would predict if it knew the future: true costs, true output lengths, the true later arrivals.

The queue is stepped forward one engine step at a time, with the step rule itself: what is left of the error is the
shadow's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from predictor.engines.vllm import Queue, Sequence, schedule
from predictor.shadow import Shadow
from tests.engine.workloads import Arrival, Costs


def first_token_s(
    shadow: Shadow,
    number: int,
    names: Mapping[int, str],
    arrivals: tuple[Arrival, ...],
    cached: Mapping[int, int],
    costs: Costs,
    offset_s: float,
) -> float:
    """When the request `number`, which has just been booked, gets its first token; seconds of the recording."""
    settings = shadow._settings
    lengths = {names[n] if n in names else str(n): arrivals[n].output_tokens for n in range(len(arrivals))}
    copies = {id(seq): seq.copy() for seq in (*shadow._queue.running, *shadow._queue.waiting)}
    queue = Queue(
        [copies[id(seq)] for seq in shadow._queue.running],
        deque(copies[id(seq)] for seq in shadow._queue.waiting),
        shadow._queue.free_blocks,
    )
    by_id = {seq.id: seq for seq in copies.values()}
    for n, name in names.items():
        if name in by_id and any(by_id[name] is seq for seq in queue.waiting):
            by_id[name].computed = cached[n]
    target = by_id[names[number]]
    # Steps under way: what they yield when they end, and how long they take.
    under_way: deque[tuple[float, list[Sequence]]] = deque()
    for item in shadow._under_way:
        step = item.step
        chunks = [(copies[id(s)], a, b) for s, a, b in step.chunks if id(s) in copies]
        seconds = costs.step_s + costs.per_decode_s * len(step.decodes)
        seconds += sum(costs.chunk_s(start, end) for _, start, end in step.chunks)
        yields = [copies[id(s)] for s in step.decodes if id(s) in copies]
        yields += [seq for seq, _, end in chunks if end >= seq.prompt_tokens]
        under_way.append((seconds, yields))
    clock_s = shadow._began_s if under_way else (shadow._composes_s or 0.0)
    clock_s -= offset_s
    emitted = {
        seq.id: shadow._emitted(original) for original in shadow._sequences.values() for seq in [copies[id(original)]]
    }
    coming = deque(range(number + 1, len(arrivals)))
    depth = 2 if settings.async_scheduling else 1
    for _ in range(200_000):
        while coming and arrivals[coming[0]].at_s <= clock_s:
            n = coming.popleft()
            arrival = arrivals[n]
            seq = Sequence(str(n), arrival.prompt_tokens, cached[n], arrival.output_tokens)
            seq.max_output = arrival.output_tokens if settings.async_scheduling else None
            queue.waiting.append(seq)
            emitted[seq.id] = 0
        while len(under_way) < depth:
            step = schedule(queue, settings)
            if step.empty:
                break
            seconds = costs.step_s + costs.per_decode_s * len(step.decodes)
            seconds += sum(costs.chunk_s(start, end) for _, start, end in step.chunks)
            yields = [
                *step.decodes,
                *(seq for seq, _, end in step.chunks if end >= seq.prompt_tokens + max(0, seq.generated - 1)),
            ]
            under_way.append((seconds, yields))
        if not under_way:
            if not coming:
                break
            clock_s = max(clock_s, arrivals[coming[0]].at_s)
            continue
        seconds, yields = under_way.popleft()
        clock_s += seconds
        for seq in yields:
            emitted[seq.id] += 1
            if seq is target:
                return clock_s
            if emitted[seq.id] >= lengths[seq.id] and any(seq is other for other in queue.running):
                queue.running = [other for other in queue.running if other is not seq]
                if queue.free_blocks is not None:
                    queue.free_blocks += seq.blocks
    return clock_s
