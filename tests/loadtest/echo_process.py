"""The least that a gRPC server can do, in a process of its own: what is measured with it is the load tester."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from beamline.protos import beamline_pb2 as pb

ANSWER = pb.TranslateResponse(
    translations=[pb.Translation(hypotheses=[pb.Hypothesis(text="x")], source_tokens=1, target_tokens=1)]
).SerializeToString()


async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return ANSWER


async def main() -> None:
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Translate": grpc.unary_unary_rpc_method_handler(answer)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("beamline.v1.Inference", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
