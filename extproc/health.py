"""gRPC's health service (grpc.health.v1): what is served, and watchers of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from extproc.rpc import Call, Handler, RpcError, Status

_SERVICE = "grpc.health.v1.Health"


class Health:
    """Of services by name: until told otherwise, none of `names` is serving."""

    def __init__(self, names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()

    @property
    def methods(self) -> Mapping[str, Handler]:
        return {f"/{_SERVICE}/Check": self._check, f"/{_SERVICE}/Watch": self._watch}

    def set(self, name: str, serving: bool) -> None:
        self._serving[name] = serving
        # Whoever waits for a change waits on this one; the next has an event of its own.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, call: Call) -> None:
        name = await _asked(call)
        if name not in self._serving:
            raise RpcError(Status.NOT_FOUND, "no such service")
        await call.write(self._answer(name))

    async def _watch(self, call: Call) -> None:
        name = await _asked(call)
        told = None
        while True:
            changed = self._changed
            answer = self._answer(name)
            if answer != told:
                await call.write(answer)
                told = answer
            await changed.wait()

    def _answer(self, name: str) -> bytes:
        serving = self._serving.get(name)
        if serving is None:
            status = HealthCheckResponse.SERVICE_UNKNOWN
        else:
            status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        return bytes(HealthCheckResponse(status=status).SerializeToString())


async def _asked(call: Call) -> str:
    async for message in call:
        try:
            return str(HealthCheckRequest.FromString(message).service)
        except DecodeError:
            break
    raise RpcError(Status.INTERNAL, "no request")
