"""Blocks of one request that an engine has announced: a sign of how far it has got."""

from __future__ import annotations

import msgspec


class StoredRun(msgspec.Struct, frozen=True):
    """Consecutive blocks that an engine announced as stored."""

    first: int | None  # our hash of the prefix that ends with the first of them, where it is known
    parent: int | None  # the engine's name of the block before them
    last: int  # the engine's name of the last
    blocks: int
