"""Waiting for something to come true."""

import asyncio
import time
from collections.abc import Callable


async def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Returns as soon as `true`; an AssertionError after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s, "it has not come true"
        await asyncio.sleep(0.005)
