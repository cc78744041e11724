"""The yardstick: an ext_proc server that exchanges the same messages with Envoy as the filter, and decides nothing.

It answers headers, names a fixed endpoint with the body, closes at the first chunk of the answer, and receives the
same access log. `python -m bench.do_nothing ADDRESS ENDPOINT`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from extproc import replies, wire
from extproc.exchange import Continue, Phase
from extproc.pb.access_log_pb2 import StreamAccessLogsResponse
from extproc.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse


async def serve(address: str, endpoint: str) -> None:
    headers = wire.write(Continue(Phase.REQUEST_HEADERS))
    chunk = wire.write(Continue(Phase.RESPONSE_BODY))
    routed = wire.write(
        Continue(
            Phase.REQUEST_BODY,
            set_headers=((replies.DESTINATION, endpoint),),
            dynamic_metadata={
                replies.LB_NAMESPACE: {replies.DESTINATION: endpoint},
                replies.NAMESPACE: {"ticket": "0", "worker": "w", "predicted_ttft_ms": "0", "cached_tokens": "0"},
            },
        )
    )

    async def process(requests: AsyncIterator[ProcessingRequest], context: object) -> AsyncIterator[ProcessingResponse]:
        del context
        async for message in requests:
            match message.WhichOneof("request"):
                case "request_headers":
                    yield headers
                case "request_body":
                    yield routed
                case _:
                    yield chunk
                    return

    async def logs(messages: AsyncIterator[object], context: object) -> StreamAccessLogsResponse:
        del context
        async for _ in messages:
            pass
        return StreamAccessLogsResponse()

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 66 << 20)])
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    process_handler: grpc.RpcMethodHandler[ProcessingRequest, ProcessingResponse] = (
        grpc.stream_stream_rpc_method_handler(
            process, request_deserializer=wire.parse_request, response_serializer=wire.serialize_response
        )
    )
    logs_handler: grpc.RpcMethodHandler[object, StreamAccessLogsResponse] = grpc.stream_unary_rpc_method_handler(
        logs, request_deserializer=wire.parse_access_log, response_serializer=wire.serialize_access_log_response
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(wire.PROCESSOR_SERVICE, {wire.PROCESS_METHOD: process_handler}),
            grpc.method_handlers_generic_handler(wire.ACCESS_LOG_SERVICE, {wire.ACCESS_LOG_METHOD: logs_handler}),
        )
    )
    server.add_insecure_port(address)
    await server.start()
    await health.set(wire.PROCESSOR_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], sys.argv[2]))
