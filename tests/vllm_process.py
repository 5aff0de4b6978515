"""A server that plays vLLM in a process of its own, so that it can be killed as real ones are.

python -m tests.vllm_process LOG    prints its root, and serves until its input is closed

Every request for tokens is written to LOG, as its token ids, before anything is made for it. Requests stand still after
`STALLED` tokens until it reads a line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from rollnest.testing.servers import VllmServer

__all__ = ["STALLED"]

STALLED = 12


class Logging(VllmServer):
    """Writes down what it is asked for."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log.open("a", encoding="utf-8", buffering=1)

    def begin(self, exchange: Any, body: dict[str, Any]) -> Any:
        """Checks a request, and writes it down."""
        decoding = super().begin(exchange, body)
        self._log.write(json.dumps(body["token_ids"]) + "\n")
        return decoding


async def serve(log: Path) -> None:
    """Serves until the input is closed."""
    server = Logging(log)
    async with server.serve():
        with server.stalled(after=STALLED):
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            await anyio.to_thread.run_sync(sys.stdin.readline)
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(serve, Path(sys.argv[1]))
