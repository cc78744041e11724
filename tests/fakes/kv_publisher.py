"""An engine's KV event publisher as a fake that can misbehave in every way that engines were seen to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Literal, Self

import msgspec
import zmq
import zmq.asyncio

END = b"\xff" * 8
BLOCK = 16


def stored(number: int, block_size: int = BLOCK) -> dict[str, object]:
    """A batch's event that stores one block, the only one with this number, at the beginning of a prompt."""
    return {
        "type": "BlockStored",
        "block_hashes": [number + 1],
        "parent_block_hash": None,
        "token_ids": [number] * block_size,
        "block_size": block_size,
        "medium": "GPU",
    }


def payload_of(events: Iterable[dict[str, object]]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


class FakePublisher:
    """PUB and ROUTER sockets on ports of their own; sequence numbers from 0; everything published is kept.

    `layout` is the replay's: "new" with the topic frame, "old" without. The switches below are read at each replay.
    """

    def __init__(self, layout: Literal["new", "old"] = "new") -> None:
        self.layout = layout
        self.next_seq = 0
        self.kept: list[tuple[int, bytes]] = []
        self.replays_asked: list[int] = []
        self.answers_replays = True
        self.sends_end = True
        self.skips_in_replay: frozenset[int] = frozenset()
        self.pause_before_each_s = 0.0
        self.during_replay: list[dict[str, object]] = []  # published live after the first replayed batch
        self._context = zmq.asyncio.Context()
        self._service: asyncio.Task[None] | None = None
        self.endpoint = self.replay_endpoint = "tcp://127.0.0.1:*"
        self._bind()

    def _bind(self) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for wire in (self._pub, self._router):
            wire.set(zmq.LINGER, 0)
            wire.set(zmq.SNDHWM, 0)
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay_endpoint)
        self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT)

    async def __aenter__(self) -> Self:
        self._service = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()
        self._context.destroy(linger=0)

    async def _end(self) -> None:
        assert self._service is not None
        self._service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._service
        self._pub.close()
        self._router.close()

    async def restart(self, next_seq: int = 0) -> None:
        """Another incarnation on the same ports: an empty cache, an empty buffer, numbers from `next_seq`."""
        async with self.away():
            self.next_seq = next_seq
            self.kept = []

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """Its sockets are gone for as long as the block runs; what it has kept stays."""
        await self._end()
        yield
        while True:
            try:
                self._bind()
                break
            except zmq.ZMQError:  # the port is not free yet
                self._pub.close()
                self._router.close()
                await asyncio.sleep(0.01)
        self._service = asyncio.create_task(self._serve())

    async def publish(self, *events: dict[str, object]) -> int:
        """One batch, kept and sent."""
        return await self.publish_raw(payload_of(events))

    async def publish_raw(self, payload: bytes) -> int:
        seq = self.drop_raw(payload)
        await self.send(seq, payload)
        return seq

    def drop(self, *events: dict[str, object]) -> int:
        """One batch that is kept for replay, but lost on its way."""
        return self.drop_raw(payload_of(events))

    def drop_raw(self, payload: bytes) -> int:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.kept.append((seq, payload))
        return seq

    async def send(self, seq: int, payload: bytes) -> None:
        await self.send_frames(b"", seq.to_bytes(8, "big"), payload)

    async def send_frames(self, *frames: bytes) -> None:
        await self._pub.send_multipart(list(frames))

    def forget_before(self, seq: int) -> None:
        """The buffer has lost its beginning."""
        self.kept = [(number, payload) for number, payload in self.kept if number >= seq]

    async def _serve(self) -> None:
        while True:
            identity, empty, first = await self._router.recv_multipart()
            assert empty == b""
            self.replays_asked.append(int.from_bytes(first, "big"))
            if self.answers_replays:
                await self._replay(identity, int.from_bytes(first, "big"))

    async def _replay(self, identity: bytes, first: int) -> None:
        for seq, payload in [batch for batch in self.kept if batch[0] >= first]:
            if seq in self.skips_in_replay:
                continue
            await asyncio.sleep(self.pause_before_each_s)
            await self._reply(identity, seq.to_bytes(8, "big"), payload)
            events, self.during_replay = self.during_replay, []
            for event in events:
                await self.publish(event)
        if self.sends_end:
            await self._reply(identity, END, b"")

    async def _reply(self, identity: bytes, seq: bytes, payload: bytes) -> None:
        topic = [b""] if self.layout == "new" else []
        await self._router.send_multipart([identity, b"", *topic, seq, payload])


class FrozenPublisher:
    """Stands before a publisher's PUB socket and passes bytes on both ways, until it is frozen."""

    def __init__(self, publisher: FakePublisher) -> None:
        self._port = int(publisher.endpoint.rpartition(":")[2])
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.freeze()
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()

    def freeze(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, inward = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, inward]
        for source, target in ((reader, inward), (beyond, writer)):
            self._tasks.add(asyncio.create_task(_pass_on(source, target)))


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
