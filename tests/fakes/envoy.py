"""Envoy's side of the wire: the messages that it sends, in the order in which it sends them."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec

from extproc import wire
from extproc.pb.access_log_pb2 import AccessLogType, StreamAccessLogsMessage
from extproc.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.replies import DESTINATION, VIA_UPSTREAM

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROCESS = f"/{wire.PROCESSOR_SERVICE}/{wire.PROCESS_METHOD}"
LOGS = f"/{wire.ACCESS_LOG_SERVICE}/{wire.ACCESS_LOG_METHOD}"
FIRST_TOKEN = b'data: {"choices":[]}\n\n'

Stream = grpc.aio.StreamStreamCall[bytes, ProcessingResponse]


def request_headers(path: str = COMPLETIONS, method: str = "POST", **headers: str) -> bytes:
    message = ProcessingRequest()
    pairs = {":method": method, ":path": path} | {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in pairs.items():
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    return message.SerializeToString()


def request_body(**fields: object) -> bytes:
    return raw_body(msgspec.json.encode({"model": "m", "prompt": [1, 2, 3], "stream": True, **fields}))


def raw_body(body: bytes) -> bytes:
    message = ProcessingRequest()
    message.request_body.body = body
    message.request_body.end_of_stream = True
    return message.SerializeToString()


def response_body(chunk: bytes = FIRST_TOKEN, status: int = 200, end_of_stream: bool = False) -> bytes:
    message = ProcessingRequest()
    message.response_body.body = chunk
    message.response_body.end_of_stream = end_of_stream
    message.attributes["envoy.filters.http.ext_proc"].update({"response.code": status})
    return message.SerializeToString()


def log_entry(
    metadata: Mapping[str, dict[str, Any]],
    status: int | None = 200,
    final: bool = True,
    details: str = VIA_UPSTREAM,
    body_bytes: int = 0,
    left: bool = False,
) -> StreamAccessLogsMessage:
    message = StreamAccessLogsMessage()
    entry = message.http_logs.log_entry.add()
    if status is not None:
        entry.response.response_code.value = status
    entry.response.response_code_details = details
    entry.response.response_body_bytes = body_bytes
    entry.common_properties.response_flags.downstream_connection_termination = left
    entry.common_properties.access_log_type = AccessLogType.DownstreamEnd if final else AccessLogType.DownstreamPeriodic
    for namespace, values in metadata.items():
        entry.common_properties.metadata.filter_metadata[namespace].update(values)
    return message


def destination_header(reply: ProcessingResponse) -> str | None:
    for option in reply.request_body.response.header_mutation.set_headers:
        if option.header.key == DESTINATION:
            return option.header.raw_value.decode()
    return None


class Envoy:
    """A gRPC connection to the filter."""

    def __init__(self, port: int, options: Sequence[tuple[str, int]] = ()) -> None:
        own = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[*own, *options])
        self.channel = self._channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    def open(self) -> Stream:
        method: grpc.aio.StreamStreamMultiCallable[bytes, ProcessingResponse] = self._channel.stream_stream(
            PROCESS, response_deserializer=ProcessingResponse.FromString
        )
        return method()

    async def exchange(self, *messages: bytes) -> tuple[list[ProcessingResponse], grpc.StatusCode]:
        """Sends each message once the one before was answered; the answers, and how the stream ended."""
        stream = self.open()
        answers = []
        for message in messages:
            await stream.write(message)
            answer = await stream.read()
            if not isinstance(answer, ProcessingResponse):
                break
            answers.append(answer)
        await stream.done_writing()
        return answers, await stream.code()

    async def report(self, messages: Iterable[bytes]) -> None:
        """An access log stream, from its beginning to its end."""
        method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = self._channel.stream_unary(LOGS)
        await method(iter(messages))
