import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.e2e.harness import RawClient


@pytest.fixture(autouse=True)
def connections_end_with_their_test() -> Iterator[None]:
    """Left open by a test that failed, a socket would fail whichever test it is collected in."""
    yield
    for client in tuple(RawClient.open):
        client.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def tasks_end_with_their_test() -> AsyncIterator[None]:
    """Left by a test that failed, a client that comes back and back would keep the engines of all others busy."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
