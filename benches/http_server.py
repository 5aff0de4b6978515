"""A server that answers as vLLM does, as fast as Python can: for the bench `http`, in a process of its own.

python -m benches.http_server            prints its port, and serves until its input is closed

It reads no more of a request than its route and `max_tokens`, and sends answers that were made before. A pause is
answered after `PAUSE` seconds, as by a server that finishes a forward pass. Requests for `HELD` tokens are held, until
a pause that aborts, or a resume. Its metrics say how many are held, and how many connections were opened.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from functools import cache
from typing import Any

__all__ = ["HELD", "OPENED", "PAUSE", "RUNNING", "VOCABULARY"]

PAUSE = 0.1
HELD = 99
"""Requests for so many tokens are answered by the next `/resume`, or by a pause that aborts them."""

RUNNING, OPENED = "vllm:num_requests_running", "bench:connections_opened"
"""Figures in its metrics."""

VOCABULARY = 49_152
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')


@cache
def answer(tokens: int, finish: str = "length") -> bytes:
    """A whole answer of so many tokens, with its head."""
    content = [
        {"token_id": 1000 + i, "logprob": -1.2345678, "rank": 3,
         "top_logprobs": [{"token_id": 1000 + i, "logprob": -1.2345678, "rank": 3}]}
        for i in range(tokens)
    ]  # fmt: skip
    choice = {
        "index": 0,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": [1000 + i for i in range(tokens)],
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}],
        "logprobs": {"content": content},
    }
    return reply({"request_id": "x", "model": "fake", "usage": None, "choices": [choice]})


def reply(body: Any, status: str = "200 OK") -> bytes:
    """An answer with its head; of JSON, unless it is a text."""
    content, kind = json.dumps(body).encode(), "application/json"
    if isinstance(body, str):
        content, kind = body.encode(), "text/plain"
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


MODEL = {"max_model_len": 65_536, "logprobs_mode": "processed_logprobs"}
ROUTES = {
    b"/server_info": reply({"vllm_config": {"model_config": MODEL}}),
    b"/weight_info": reply({"weight_version": "default"}),
    b"/pause": reply({"status": "paused"}),
    b"/resume": reply({"status": "resumed"}),
    b"/abort_requests": reply({"status": "aborted", "aborted": 0}),
}
PROBED = reply({"error": {"message": f"Vocabulary size: {VOCABULARY}"}}, "400 Bad Request")


held: list[Any] = []
opened = 0


class Connection(asyncio.Protocol):
    """One connection: a request, an answer, and again."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        global opened
        opened += 1
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while True:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            found = _LENGTH.search(self._data, 0, end)
            whole = end + 4 + (int(found[1]) if found else 0)
            if len(self._data) < whole:
                return
            target = bytes(self._data[: self._data.find(b"\r\n")].split(b" ")[1])
            self._answer(target, bytes(self._data[end + 4 : whole]))
            del self._data[:whole]

    def _answer(self, target: bytes, body: bytes) -> None:
        path, _, query = target.partition(b"?")
        if path == b"/inference/v1/generate":
            tokens = _TOKENS.search(body)
            probe = b"logit_bias" in body[-200:]
            if tokens is not None and int(tokens[1]) == HELD:
                held.append(self._transport)
                return
            sent = PROBED if probe or tokens is None else answer(int(tokens[1]))
        elif path == b"/metrics":
            sent = reply(f"{RUNNING} {len(held)}\n{OPENED} {opened}\n")
        else:
            sent = ROUTES[path]
        if path == b"/pause":
            asyncio.get_running_loop().call_later(PAUSE, self._paused, sent, b"mode=abort" in query)
            return
        if path == b"/resume":
            let_go("length")
        self._transport.write(sent)

    def _paused(self, sent: bytes, aborts: bool) -> None:
        self._transport.write(sent)
        if aborts:
            let_go("abort")


def let_go(finish: str) -> None:
    """Answers what is held."""
    for transport in held:
        transport.write(answer(HELD, finish))
    held.clear()


async def serve() -> None:
    """Serves until the input is closed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
