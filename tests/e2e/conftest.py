from collections.abc import Iterator

import pytest

from tests.e2e.harness import RawClient


@pytest.fixture(autouse=True)
def connections_end_with_their_test() -> Iterator[None]:
    """Left open by a test that failed, a socket would fail whichever test it is collected in."""
    yield
    for client in tuple(RawClient.open):
        client.close()
