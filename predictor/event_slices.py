"""Long events cut into short ones that say the same: what applies them lets others have their turn in between.

Bundles are short already, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from predictor.kv_events import Bundle, Cleared, KvEvent, Named, Removed, Stored


def slices(events: Iterable[KvEvent], most_blocks: int) -> Iterator[KvEvent]:
    """The same events in the same order, none with more than `most_blocks` hashes; a stored run stays one chain."""
    for event in events:
        if isinstance(event, Stored) and len(event.hashes) > most_blocks:
            yield from _stored(event, most_blocks)
        elif isinstance(event, Removed | Named) and len(event.hashes) > most_blocks:
            for start in range(0, len(event.hashes), most_blocks):
                yield replace(event, hashes=event.hashes[start : start + most_blocks])
        else:
            yield event


def groups_of(events: Iterable[KvEvent], most_blocks: int) -> Iterator[tuple[KvEvent, ...]]:
    """The same events, as many together as have no more than `most_blocks` hashes."""
    group: list[KvEvent] = []
    blocks = 0
    for event in events:
        size = 1 if isinstance(event, Cleared) else len(event.hashes)
        if isinstance(event, Bundle):
            size += len(event.removed)
        if group and blocks + size > most_blocks:
            yield tuple(group)
            group, blocks = [], 0
        group.append(event)
        blocks += size
    if group:
        yield tuple(group)


def _stored(event: Stored, most_blocks: int) -> Iterator[Stored]:
    for start in range(0, len(event.hashes), most_blocks):
        end = start + most_blocks
        yield replace(
            event,
            hashes=event.hashes[start:end],
            parent=event.hashes[start - 1] if start else event.parent,
            tokens=event.tokens[start * event.block_size : end * event.block_size],
            extra_keys=None if event.extra_keys is None else event.extra_keys[start:end],
            ahead=None if event.ahead is None else event.ahead[start:end],
            adrift=event.adrift and not start,
        )
