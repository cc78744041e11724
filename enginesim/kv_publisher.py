"""The KV event stream of one engine: a ZMQ PUB socket, and a ROUTER that replays what was sent.

Frames and limits are those of vLLM's ZmqEventPublisher: `[topic, sequence, payload]`, the sequence 8 bytes big-endian,
from 0.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Sequence

import zmq
import zmq.asyncio

from enginesim.faults import Faults
from enginesim.kv_events import EventForm, KvEvent, encode_batch

SEND_HIGH_WATER_BATCHES = 100_000
REPLAY_END = (-1).to_bytes(8, "big", signed=True)
# A long replay must not hold up the engine that shares the event loop; also, a ROUTER drops what its pipe cannot take.
REPLAYED_BEFORE_A_PAUSE = 100

logger = logging.getLogger(__name__)


class KvPublisher:
    """Publishes batches of events and keeps the last `buffer_steps` of them for replay.

    Port 0 takes a free one; `endpoint` and `replay_endpoint` tell which. zmq.ZMQError if a port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        topic: str = "",
        form: EventForm = "map",
        buffer_steps: int = 10_000,
        faults: Faults | None = None,
    ) -> None:
        self.next_sequence = 0
        self.topic = topic
        self.buffer_steps = buffer_steps
        self._form = form
        self._faults = faults or Faults()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._replay_context = zmq.asyncio.Context()
        self._publish_socket = self._context.socket(zmq.PUB)
        self._publish_socket.set_hwm(SEND_HIGH_WATER_BATCHES)
        self._replay_socket = self._replay_context.socket(zmq.ROUTER)
        try:
            self.endpoint = bind(self._publish_socket, host, port)
            self.replay_endpoint = bind(self._replay_socket, host, replay_port)
        except zmq.ZMQError:
            self.close()
            raise

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send one batch. Nobody listening is no error."""
        faults = self._faults.now
        sequence = self.next_sequence + faults.skip_sequences
        self.next_sequence = sequence + 1
        faults.skip_sequences = 0
        payload = encode_batch(events, time.time(), self._form)
        times = 1
        if faults.drop_batches:
            faults.drop_batches -= 1
            times = 0
        elif faults.duplicate_batches:
            faults.duplicate_batches -= 1
            times = 2
        for _ in range(times):
            self._publish_socket.send_multipart((self.topic.encode(), sequence.to_bytes(8, "big"), payload))
        self._kept.append((sequence, payload))

    def restart(self) -> None:
        """Number from 0 and have nothing to replay, like the publisher of a new process. The sockets stay."""
        self.next_sequence = 0
        self._kept.clear()

    async def serve_replays(self) -> None:
        """Answer replay requests, one at a time, until cancelled. A request that is not three frames gets no answer."""
        while True:
            frames = await self._replay_socket.recv_multipart()
            match frames:
                case [identity, b"", first] if len(first) == 8:
                    await self._replay(identity, int.from_bytes(first, "big"))
                case _:
                    logger.warning(
                        "replay request with %d frames ignored; it takes 3: identity, empty, sequence", len(frames)
                    )

    def close(self) -> None:
        """Close both sockets at once; unsent messages are dropped."""
        self._context.destroy(linger=0)
        self._replay_context.destroy(linger=0)

    async def _replay(self, identity: bytes, first: int) -> None:
        kept = [(sequence, payload) for sequence, payload in self._kept if sequence >= first]
        for count, (sequence, payload) in enumerate(kept, start=1):
            await self._reply(identity, sequence.to_bytes(8, "big"), payload)
            if count % REPLAYED_BEFORE_A_PAUSE == 0:
                await asyncio.sleep(0)
        await self._reply(identity, REPLAY_END, b"")

    async def _reply(self, identity: bytes, sequence: bytes, payload: bytes) -> None:
        """With the topic since vLLM 0.26, without before, as goes with the array form. The end has an empty topic."""
        topic = b"" if sequence == REPLAY_END else self.topic.encode()
        frames = [topic, sequence, payload] if self._form == "map" else [sequence, payload]
        await self._replay_socket.send_multipart([identity, b"", *frames])


def bind(endpoint_socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> str:
    """Bind and return an endpoint that a neighbour can connect to."""
    endpoint_socket.bind(f"tcp://{socket.gethostbyname(host)}:{port or '*'}")
    bound = endpoint_socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0").replace("//0.0.0.0:", "//127.0.0.1:")
