"""The gRPC services that Envoy calls: the filter itself and the access log, with the one border for faults of ours.

Behind that border nothing may raise to Envoy: a bug is counted, the stream ends with OK, and Envoy sends the request
on by its own load balancing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Protocol, TypeVar

from extproc import wire
from extproc.health import Health
from extproc.judge import Exchange, Judge
from extproc.ledger import USAGE_NAMESPACE, Ledger
from extproc.log import JsonLog
from extproc.metrics import Metrics
from extproc.replies import NAMESPACE
from extproc.rpc import Call, RpcServer
from extproc.session import Answered, Close, Decide, Note, Passed, Patience, Send, Session

_Result = TypeVar("_Result")

HEALTH_NAMES = ("", "liveness", "readiness", wire.PROCESSOR_SERVICE)
# Ready means that requests should come; a draining server is still alive.
_READINESS_NAMES = ("", "readiness", wire.PROCESSOR_SERVICE)
_NAMESPACES = (NAMESPACE, USAGE_NAMESPACE)

# Of the access log, before others have their turn.
_ENTRIES_A_TURN = 50

# Above Envoy's largest body (envoy/envoy.yaml: 64 MiB), with room for framing; gRPC's own default is 4 MiB, and a body
# above it would end the stream with an error.
MAX_MESSAGE_BYTES = (64 << 20) + (1 << 20)


class Writer(Protocol):
    """Where the answers of an exchange go. They come and go as bytes: what fails to parse fails behind the border."""

    async def write(self, message: bytes, /) -> None: ...


class _Inbox:
    """What Envoy sends on one stream, with a look ahead for its end: when its client has gone, Envoy 1.40 ends its side
    of the stream, and waits for ours; nothing is cancelled before 5 s have passed."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self._messages = messages
        self._ahead: asyncio.Future[bytes | None] | None = None

    async def next(self) -> bytes | None:
        """None at the end."""
        ahead, self._ahead = self._ahead, None
        return await (anext(self._messages, None) if ahead is None else ahead)

    async def unless_ended(self, work: Coroutine[None, None, _Result]) -> _Result | None:
        """What comes of the work; None if the stream has ended before: then the work is cancelled."""
        if self._ahead is None:
            self._ahead = asyncio.ensure_future(anext(self._messages, None))
        ahead, doing = self._ahead, asyncio.ensure_future(work)
        try:
            await asyncio.wait((doing, ahead), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done() and (ahead.exception() is not None or ahead.result() is None):
                return None
            return await doing
        finally:
            # Where it is done, this does nothing. Where it is not, what it holds is given back before we go on.
            doing.cancel()
            await asyncio.wait((doing,))

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()


class Processor:
    """Runs a session per stream: reads an event, does what the session says."""

    def __init__(
        self,
        judge: Judge,
        ledger: Ledger,
        metrics: Metrics,
        log: JsonLog,
        clock: Callable[[], float],
        ask_for_body: bool = False,
        patience: Patience | None = None,
        holds: bool = False,
    ) -> None:
        """`holds`: a decision may take long, so that callers may leave meanwhile."""
        self._holds = holds
        self._ask_for_body = ask_for_body
        self._patience = patience
        self._judge = judge
        self._ledger = ledger
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self.open_streams = 0
        self._empty = asyncio.Event()

    async def process(self, requests: AsyncIterator[bytes], answers: Writer) -> None:
        exchange = Exchange(received_at_s=self._clock())
        session = Session(self._ask_for_body, self._patience)
        answered = False
        self.open_streams += 1
        inbox = _Inbox(requests)
        try:
            while (message := await inbox.next()) is not None:
                actions = session.on_event(wire.read(wire.parse_request(message)))
                done = 0
                while done < len(actions):
                    action = actions[done]
                    done += 1
                    match action:
                        case Send(reply):
                            await answers.write(wire.encode(reply))
                        case Decide():
                            deciding = self._judge.decide(action, exchange)
                            verdict = await (inbox.unless_ended(deciding) if self._holds else deciding)
                            if verdict is None:
                                return
                            actions += session.decided(verdict)
                        case Answered(kind, status, served_endpoint, details):
                            answered = True
                            if exchange.ticket_id is not None:
                                self._ledger.answered(exchange.ticket_id, kind, status, served_endpoint, details)
                        case Note(reason):
                            self._metrics.passed.labels(reason.value).inc()
                        case Close():
                            return
        except Exception:
            # The one border. Returning closes the stream with OK, and the request goes on unrouted.
            self._metrics.passed.labels(Passed.BUG.value).inc()
            self._bug("stream", exchange)
        finally:
            inbox.close()
            self.open_streams -= 1
            if not self.open_streams:
                self._empty.set()
            self._release(exchange, answered)

    async def drained(self) -> None:
        """Returns when no exchange is open."""
        while self.open_streams:
            self._empty.clear()
            await self._empty.wait()

    def _release(self, exchange: Exchange, answered: bool) -> None:
        if exchange.ticket_id is None:
            return
        try:
            self._ledger.stream_closed(exchange.ticket_id, answered)
        except Exception:
            self._bug("release", exchange)

    def _bug(self, where: str, exchange: Exchange) -> None:
        self._metrics.bugs.labels(where).inc()
        self._log("bug", where=where, id=exchange.ticket_id, trace=traceback.format_exc())


class AccessLog:
    """Envoy's access log: how requests ended."""

    def __init__(self, ledger: Ledger, metrics: Metrics, log: JsonLog) -> None:
        self._ledger = ledger
        self._metrics = metrics
        self._log = log
        self._tell_again_s = 0.0

    async def stream(self, messages: AsyncIterator[bytes]) -> None:
        entries = 0
        async for message in messages:
            entries += 1
            try:
                for end in wire.read_access_log(wire.parse_access_log(message), _NAMESPACES):
                    self._ledger.request_ended(end)
                    entries += 1
                    if entries >= _ENTRIES_A_TURN:
                        entries = await _next_turn()
            except Exception:
                self._metrics.bugs.labels("access_log").inc()
                self._tell()
            if entries >= _ENTRIES_A_TURN:
                entries = await _next_turn()

    def _tell(self) -> None:
        """Of a peer that sends nothing but nonsense once a second is enough."""
        now_s = time.monotonic()
        if now_s >= self._tell_again_s:
            self._tell_again_s = now_s + 1.0
            self._log("bug", where="access_log", trace=traceback.format_exc())


async def _next_turn() -> int:
    """Lets others run; how many entries have been taken in this turn."""
    await asyncio.sleep(0)
    return 0


class _RpcWatcher:
    """Counts what goes wrong below the calls."""

    def __init__(self, metrics: Metrics, log: JsonLog) -> None:
        self._metrics = metrics
        self._log = log

    def peer_fault(self, what: str, /) -> None:
        self._metrics.peer_faults.labels(what).inc()

    def bug(self, fault: BaseException, /) -> None:
        self._metrics.bugs.labels("rpc").inc()
        self._log("bug", where="rpc", trace="".join(traceback.format_exception(fault)))


class Server:
    """Both services and gRPC health on one port."""

    def __init__(self, processor: Processor, access_log: AccessLog, metrics: Metrics, log: JsonLog) -> None:
        self._processor = processor
        self._health = Health(HEALTH_NAMES)

        async def process(call: Call) -> None:
            await processor.process(call, call)

        async def stream_logs(call: Call) -> None:
            await access_log.stream(call)
            await call.write(wire.ACCESS_LOG_RESPONSE)

        methods = {
            f"/{wire.PROCESSOR_SERVICE}/{wire.PROCESS_METHOD}": process,
            f"/{wire.ACCESS_LOG_SERVICE}/{wire.ACCESS_LOG_METHOD}": stream_logs,
            **self._health.methods,
        }
        self._server = RpcServer(methods, MAX_MESSAGE_BYTES, _RpcWatcher(metrics, log))

    async def start(self, address: str) -> int:
        """Listens and says that it is healthy; returns the port. OSError if the address cannot be had."""
        host, _, port = address.rpartition(":")
        try:
            bound = await self._server.start(host.strip("[]"), int(port))
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        for name in HEALTH_NAMES:
            self._health.set(name, serving=True)
        return bound

    async def stop(self, notice_s: float, grace_s: float) -> None:
        """Says that it is going, gives Envoy `notice_s` to hear it, and open exchanges `grace_s` to see their end."""
        for name in _READINESS_NAMES:
            self._health.set(name, serving=False)
        # Not every mesh asks for our health, and who goes on opening streams would be cut off at the end.
        self._server.retire()
        await asyncio.sleep(notice_s)
        self._server.retire()  # who has come back meanwhile
        # Not the server's own grace: the access log's stream never ends by itself.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._processor.drained(), grace_s)
        await self._server.stop(0.1)
