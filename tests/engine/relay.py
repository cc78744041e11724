"""A network between an engine's event sockets and whoever follows them, that loses what it is told to lose."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from extproc.stack import free_ports
from tests.engine.hindsight import Hindsight


class EventRelay:
    """Passes an engine's live batches on, and replays, byte for byte. `async with`.

    `lose_batches` is how many of the next live ones are lost. While `answers_replays` is False, requests for a replay
    are lost. `hindsight` sees every live batch, lost or not; `missing` are those lost that no replay has brought since.
    """

    def __init__(self, events: str, replay: str) -> None:
        live_port, replay_port = free_ports(2)
        self.endpoint, self.replay_endpoint = f"tcp://127.0.0.1:{live_port}", f"tcp://127.0.0.1:{replay_port}"
        self.lose_batches = 0
        self.lost = 0
        self.missing: set[int] = set()  # sequence numbers
        self.answers_replays = True
        self.hindsight = Hindsight()
        self._engine_events, self._engine_replay = events, replay
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._live_in = self._socket(zmq.SUB)
        self._live_in.subscribe(b"")
        self._live_in.connect(self._engine_events)
        self._live_out = self._socket(zmq.PUB)
        self._live_out.bind(self.endpoint)
        # A DEALER hands on what a ROUTER got, the asker's name in front; the engine's answers bring it back.
        self._asked = self._socket(zmq.ROUTER)
        self._asked.bind(self.replay_endpoint)
        self._tasks = [asyncio.create_task(work) for work in (self._pass_live(), self._pass_replays())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(0)

    async def _pass_live(self) -> None:
        while True:
            frames = await self._live_in.recv_multipart()
            if int.from_bytes(frames[-2], "big") == 0:
                self.hindsight.emptied(time.monotonic())  # another engine, on the same ports
            self.hindsight.saw(time.monotonic(), frames[-1])
            if self.lose_batches:
                self.lose_batches -= 1
                self.lost += 1
                self.missing.add(int.from_bytes(frames[-2], "big"))
            else:
                await self._live_out.send_multipart(frames)

    async def _pass_replays(self) -> None:
        """One asker at a time, as the engine's publisher has it, each over a connection of its own."""
        while True:
            identity, *request = await self._asked.recv_multipart()
            if not self.answers_replays:
                continue
            with self._socket(zmq.DEALER) as engine:
                engine.connect(self._engine_replay)
                await engine.send_multipart(request)
                ended = False
                while not ended and await engine.poll(2000):
                    frames = await engine.recv_multipart()
                    ended = frames[-2] == b"\xff" * 8
                    self.missing.discard(int.from_bytes(frames[-2], "big"))
                    await self._asked.send_multipart([identity, *frames])

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVHWM, 0)
        made.set(zmq.SNDHWM, 0)
        return made
