"""A server that streams and does nothing else: what uvicorn and starlette take for a chunk.

python benchmarks/peers/plain_stream.py [--tokens 64] [--interval-ms 20]

Every request gets the same chunk, of the size that an answer's has, each interval (0 = at once), all in the same turn
of the loop. `benchmarks/front_end.py` measures it beside the front end.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

CHUNK = b"data: {" + b" " * 240 + b"}\n\n"


def make_app(num_tokens: int, interval_s: float) -> Starlette:
    async def chunks() -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        for _ in range(num_tokens):
            await asyncio.sleep(interval_s - loop.time() % interval_s if interval_s else 0)
            yield CHUNK
        yield b"data: [DONE]\n\n"

    async def answer(request: Request) -> StreamingResponse:
        await request.body()
        return StreamingResponse(chunks(), media_type="text/event-stream")

    return Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    args = parser.parse_args()
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)
    app = make_app(args.tokens, args.interval_ms / 1e3)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", server_header=False))
    print(f"streaming at http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr)
    asyncio.run(server.serve([listening]))


if __name__ == "__main__":
    main()
