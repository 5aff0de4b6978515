"""A real HTTP server on the loopback interface, in the test's own event loop, that can misbehave at will.

It speaks HTTP/1.1 by h11 (which every httpx has), so that what clients do with it is what they do with real servers.
Its one owner is the `async with` block that it is entered with: leaving that closes every connection.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute, TaskGroup
from anyio.streams.tls import TLSStream
from attrs import field, frozen

from rollnest.errors import leaves

__all__ = ["Dropped", "Exchange", "Handler", "LoopbackServer", "Request"]

_MAX_HEAD = 65_536


@frozen
class Request:
    """What a client sent.

    Attributes:
        method: `GET` or `POST`, usually.
        path: Without the query.
        query: The query's parameters; the last one of a name.
        headers: By lower-case name.
        body: Whole.
        connection: Number of the connection it came on, from 0.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = field(repr=False)
    connection: int

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Dropped(Exception):
    """Ends a handler whose connection is gone."""


class Exchange:
    """One request, and the means to answer it, or not to.

    Attributes:
        request: What the client sent.
        gone: Set once the client has closed its side.
    """

    def __init__(
        self, request: Request, stream: ByteStream, protocol: h11.Connection, keep_alive: bool
    ) -> None:
        self.request: Request = request
        self.gone: anyio.Event = anyio.Event()
        self._stream = stream
        self._protocol = protocol
        self._keep_alive = keep_alive

    async def reply(
        self, body: Any = None, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answers at once: bytes as they are, `None` with nothing, everything else as JSON."""
        content = b"" if body is None else body if isinstance(body, bytes) else _json(body)
        await self.start(
            status=status,
            headers={
                "content-type": "application/json",
                "content-length": str(len(content)),
                **(headers or {}),
            },
        )
        await self.send(content)
        await self.end()

    async def start(self, *, status: int = 200, headers: Mapping[str, str]) -> None:
        """Sends the head of an answer; without a content-length the body is sent in chunks."""
        close = {} if self._keep_alive else {"connection": "close"}
        fields = list((dict(headers) | close).items())
        await self._write(h11.Response(status_code=status, headers=fields))

    async def events(self) -> None:
        """Begins a stream of server-sent events."""
        await self.start(headers={"content-type": "text/event-stream"})

    async def event(self, data: Any) -> None:
        """Sends one event; a string or bytes as they are, everything else as JSON."""
        text = data if isinstance(data, bytes) else data.encode() if isinstance(data, str) else None
        await self.send(b"data: " + (_json(data) if text is None else text) + b"\n\n")

    async def send(self, data: bytes) -> None:
        """Sends a part of the body."""
        if data:
            await self._write(h11.Data(data=data))

    async def end(self) -> None:
        """Ends the body."""
        await self._write(h11.EndOfMessage())

    async def raw(self, data: bytes) -> None:
        """Sends bytes past HTTP."""
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise Dropped from None

    async def drop(self, *, reset: bool = False) -> None:
        """Closes the connection in the middle of whatever it was; with `reset` as a process that was killed."""
        if reset:
            raw = self._stream.extra(SocketAttribute.raw_socket)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await anyio.aclose_forcefully(self._stream)
        raise Dropped

    async def _write(self, event: h11.Event) -> None:
        data = self._protocol.send(event)
        if data:
            await self.raw(data)


Handler: TypeAlias = "Callable[[Exchange], Awaitable[None]]"
"""Answers one request. Raising `Dropped` ends the connection; every other error is the test's."""


class LoopbackServer:
    """Serves a handler on a free port of 127.0.0.1.

    Args:
        handler: Answers each request, in a task of its connection.
        tls: Serves https with it.
        keep_alive: Whether a connection takes more than one request.

    Attributes:
        requests: Every request, in order of arrival.
        connections: How many were opened so far.
        open: How many are open now.
        most_open: Most that were open at once.
    """

    def __init__(
        self, handler: Handler, *, tls: ssl.SSLContext | None = None, keep_alive: bool = True
    ) -> None:
        self._handler = handler
        self._tls = tls
        self._keep_alive = keep_alive
        self.requests: list[Request] = []
        self.connections: int = 0
        self.open: int = 0
        self.most_open: int = 0
        self._port = 0
        self._streams: set[ByteStream] = set()

    @property
    def url(self) -> str:
        """The server's root, while it is entered."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncGenerator[LoopbackServer]:
        """Serves until the block is left; then every connection is closed.

        Args:
            port: 0 is a free one.

        Raises:
            Exception: What a handler raised, when the block is left.
        """
        listener = await anyio.create_tcp_listener(
            local_host="127.0.0.1", local_port=port, backlog=1024, reuse_port=False
        )
        self._port = listener.extra(SocketAttribute.local_port)
        try:
            async with listener, anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, self._connected)
                yield self
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            errors = list(leaves(group))
            if len(errors) == 1:
                raise errors[0] from None
            raise

    async def _connected(self, stream: ByteStream) -> None:
        number, self.connections = self.connections, self.connections + 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            async with stream:
                await self._talk(stream, number)
        except (Dropped, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
            pass
        finally:
            self.open -= 1

    async def _talk(self, stream: ByteStream, number: int) -> None:
        if self._tls is not None:
            stream = await TLSStream.wrap(stream, ssl_context=self._tls, standard_compatible=False)
        protocol = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        while (request := await self._read(stream, protocol, number)) is not None:
            self.requests.append(request)
            exchange = Exchange(request, stream, protocol, self._keep_alive)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, exchange, stream, protocol)
                    await self._answer(exchange, tasks)
            except BaseExceptionGroup as group:
                if any(isinstance(error, Dropped) for error in leaves(group)):
                    raise Dropped from None
                raise
            if protocol.our_state is not h11.DONE:
                return
            protocol.start_next_cycle()

    async def _answer(self, exchange: Exchange, tasks: TaskGroup) -> None:
        await self._handler(exchange)
        tasks.cancel_scope.cancel()

    async def _watch(
        self, exchange: Exchange, stream: ByteStream, protocol: h11.Connection
    ) -> None:
        """Notices that the client leaves while its request is worked on."""
        try:
            while data := await stream.receive():
                protocol.receive_data(data)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            exchange.gone.set()

    async def _read(
        self, stream: ByteStream, protocol: h11.Connection, number: int
    ) -> Request | None:
        head: h11.Request | None = None
        body: list[bytes] = []
        while True:
            event = protocol.next_event()
            if event is h11.NEED_DATA:
                try:
                    protocol.receive_data(await stream.receive())
                except anyio.EndOfStream:
                    return None
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                path, _, query = head.target.decode("ascii").partition("?")
                return Request(
                    head.method.decode("ascii"),
                    path,
                    dict(parse_qsl(query, keep_blank_values=True)),
                    {name.decode(): value.decode("latin-1") for name, value in head.headers},
                    b"".join(body),
                    number,
                )
            else:
                return None


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
