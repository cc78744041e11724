"""SGLang's own word on its load, pushed over ZMQ: frames and times as of its `load_publisher.py`, 0.5.23."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import astuple, dataclass

import msgspec
import zmq

from enginesim.kv_publisher import bind

TOPIC = b"load"
DECODE_STEPS = 15  # between two while only decoding goes on (--load-snapshot-publish-interval)
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadStat:
    """In the order of the wire. The last two only grow, and are the engine's own prefill cost."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    dp_rank: int
    num_waiting_uncached_tokens: int
    num_total_tokens: int
    max_running_requests: int
    total_prefill_uncached_tokens: int
    total_prefill_busy_us: int


class LoadPublisher:
    """Publishes `look()` after every prefill, now and then while decoding, and once a second in any case.

    Port 0 takes a free one; `endpoint` tells which. zmq.ZMQError if the port is taken.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        try:
            self.endpoint = bind(self._socket, host, port)
        except zmq.ZMQError:
            self.close()
            raise
        self._sequence = 0
        self._decode_steps = 0

    def step(self, prefill: bool, look: Callable[[], LoadStat]) -> None:
        """A step has ended."""
        self._decode_steps = 0 if prefill else self._decode_steps + 1
        if prefill or self._decode_steps % DECODE_STEPS == 0:
            self.publish(look())

    def publish(self, stat: LoadStat) -> None:
        """Nobody listening is no error."""
        payload = msgspec.msgpack.encode(("LoadStat", *astuple(stat)))
        self._socket.send_multipart((TOPIC, self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1

    async def beat(self, look: Callable[[], LoadStat]) -> None:
        """Until cancelled: a load that does not change is told all the same."""
        while True:
            self.publish(look())
            await asyncio.sleep(HEARTBEAT_S)

    def close(self) -> None:
        """Unsent messages are dropped."""
        self._context.destroy(linger=0)
