"""What the fault servers of all dialects have in common: routes, faults, streams, clients that leave."""

from __future__ import annotations

import json
import ssl
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, ClassVar, Literal

import anyio
from attrs import field, frozen

from ._fake_policy import Decoding, FakePolicy
from ._loopback import Dropped, Exchange, LoopbackServer
from ._scripted import Stall

__all__ = ["Fault", "PolicyServer", "Refused", "Route", "check_fields"]


@frozen(kw_only=True)
class Fault:
    """How a server answers one request for tokens wrongly; what is not set is as it should be.

    Attributes:
        status: Answers with it and `body`, and generates nothing.
        body: Of that answer; bytes are sent as they are.
        headers: Of that answer.
        raw: Sent past HTTP, and then the connection is closed.
        drop: Closes the connection: at once, in the middle of the head or of the body, or (a stream) after so many
            tokens.
        reset: Whether a drop is one of a process that was killed.
        silent: Never answers.
        deaf: How many aborts of it are not heard; -1 is all.
        slow: Whether an abort of it takes one more token.
        admitted: Until it is set the server has accepted the request and does not know it: aborts miss it.
        overrun: How many tokens are made beyond the cap.
        edit: Changes what is sent: the answer, or each part of a stream. What it returns is sent; bytes as they are.
        done: Whether a stream ends with its `[DONE]`.
    """

    status: int | None = None
    body: Any = None
    headers: dict[str, str] = field(factory=dict[str, str])
    raw: bytes | None = None
    drop: Literal["at once", "head", "body"] | int | None = None
    reset: bool = False
    silent: bool = False
    deaf: int = 0
    slow: bool = False
    admitted: anyio.Event | None = None
    overrun: int = 0
    edit: Callable[[Any], Any] | None = None
    done: bool = True


class Refused(Exception):
    """Ends a request with a status and a body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status: int = status
        self.body: Any = body


Route = Callable[[Exchange], Awaitable[Any]]


class PolicyServer(ABC):
    """A policy's server that plays its part by the book, unless a fault says otherwise.

    Attributes:
        policy: What makes the tokens.
        faults: For the next requests for tokens, in order; `None` is none.
        fault: For every request, when there is none in `faults`.
        broken: Answers every request, control calls too, with this status; `None` is none.
        overrides: Routes that answer otherwise, by method and path (`"POST /pause"`); `None` is one that isn't there.
        bodies: What was asked for, of every request for tokens that was accepted.
        aborts: Ids of every abort, in order, as they came; `None` is all.
        calls: Method and path of every request.
    """

    generates: ClassVar[str]
    """Path of requests for tokens."""

    says_done: ClassVar[bool] = True
    """Whether its streams end with `[DONE]`."""

    models: ClassVar[dict[str, int]] = {"/models/base": 0, "/models/other": 1}

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        max_context: int = 4096,
        stop_every: int = 10**9,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        keep_alive: bool = True,
    ) -> None:
        self.policy: FakePolicy = FakePolicy(
            self.models, vocab_size=vocab_size, max_context=max_context, stop_every=stop_every
        )
        self.faults: deque[Fault | None] = deque()
        self.fault: Fault | None = None
        self.broken: int | None = None
        self.overrides: dict[str, Route | None] = {}
        self.bodies: list[dict[str, Any]] = []
        self.aborts: list[list[str] | None] = []
        self._api_key = api_key
        self.http: LoopbackServer = LoopbackServer(self._handle, tls=tls, keep_alive=keep_alive)

    @property
    def url(self) -> str:
        """The server's root, while it serves."""
        return self.http.url

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Method and path of every request."""
        return [(request.method, request.path) for request in self.http.requests]

    def serve(self, port: int = 0) -> AbstractAsyncContextManager[LoopbackServer]:
        """Serves until the block is left, which is as if the process had been killed."""
        return self._serve(port)

    @asynccontextmanager
    async def _serve(self, port: int) -> AsyncGenerator[LoopbackServer]:
        async with self.http.serve(port) as http:
            yield http

    def stalled(self, *, after: int) -> AbstractContextManager[Stall]:
        """Requests stand still after so many tokens, until the block is left."""
        return self.policy.stalled(after=after)

    # What dialects say

    @abstractmethod
    def routes(self) -> dict[str, Route]:
        """Control calls, by method and path; what one returns is sent."""

    @abstractmethod
    def begin(self, exchange: Exchange, body: dict[str, Any]) -> Decoding:
        """Checks a request for tokens; raises `Refused`."""

    @abstractmethod
    def whole(self, decoding: Decoding) -> Any:
        """A whole answer."""

    @abstractmethod
    def part(self, decoding: Decoding, start: int) -> Any:
        """A part of a stream, with what is new since `start`."""

    def protected(self, path: str) -> bool:
        """Whether a route asks for the key."""
        return True

    def every(self, body: dict[str, Any]) -> int:
        """How many tokens a part of the stream has at least."""
        return 1

    async def admit(self, decoding: Decoding) -> None:  # noqa: B027 - most servers do at once
        """Returns when the policy may know of it."""

    # How it serves

    async def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        if self.broken is not None:
            await exchange.reply({"error": "out of order"}, status=self.broken)
            return
        given = request.headers.get("authorization")
        wanted = f"Bearer {self._api_key}"
        if self._api_key is not None and self.protected(request.path) and given != wanted:
            await exchange.reply({"error": "Unauthorized"}, status=401)
            return
        try:
            if (request.method, request.path) == ("POST", self.generates):
                await self._generate(exchange)
                return
            name = f"{request.method} {request.path}"
            route = {**self.routes(), **self.overrides}.get(name)
            if route is None:
                raise Refused(404, {"detail": "Not Found"})
            await exchange.reply(await route(exchange))
        except Refused as refused:
            await exchange.reply(refused.body, status=refused.status)

    async def _generate(self, exchange: Exchange) -> None:
        try:
            body = exchange.request.json()
        except ValueError:
            raise Refused(400, {"error": "no JSON"}) from None
        decoding = self.begin(exchange, body)
        self.bodies.append(body)
        fault = self.faults.popleft() if self.faults else self.fault
        fault = fault or Fault()
        decoding.deaf, decoding.slow = fault.deaf, fault.slow
        decoding.max_tokens += fault.overrun
        if await self._fails(exchange, fault):
            return
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                await exchange.gone.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            if fault.silent:
                await anyio.sleep_forever()
            if fault.admitted is not None:
                await fault.admitted.wait()
            await self.admit(decoding)
            self.policy.add(decoding)
            if body.get("stream"):
                await self._stream(exchange, decoding, fault, self.every(body))
            else:
                await self.policy.decode(decoding)
                await self._send(exchange, decoding, fault)
            tasks.cancel_scope.cancel()
        if exchange.gone.is_set():
            raise Dropped

    async def _fails(self, exchange: Exchange, fault: Fault) -> bool:
        """Whether it is over before anything was generated."""
        if fault.status is not None:
            await exchange.reply(fault.body, status=fault.status, headers=fault.headers)
            return True
        if fault.raw is not None:
            await exchange.raw(fault.raw)
            await exchange.drop()
        if fault.drop == "at once":
            await exchange.drop(reset=fault.reset)
        return False

    async def _send(self, exchange: Exchange, decoding: Decoding, fault: Fault) -> None:
        answer = self.whole(decoding)
        if fault.edit is not None:
            answer = fault.edit(answer)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if fault.drop == "head":
            await exchange.raw(b"HTTP/1.1 200 O")
            await exchange.drop(reset=fault.reset)
        if fault.drop == "body":
            await exchange.start(headers={"content-length": str(len(content))})
            await exchange.send(content[: len(content) // 2])
            await exchange.drop(reset=fault.reset)
        await exchange.reply(content)

    async def _stream(
        self, exchange: Exchange, decoding: Decoding, fault: Fault, every: int
    ) -> None:
        await exchange.events()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.policy.decode, decoding)
            sent = 0
            while True:
                changed, count, ended = decoding.changed, len(decoding.ids), decoding.finish
                if isinstance(fault.drop, int) and count >= fault.drop:
                    tasks.cancel_scope.cancel()
                    await exchange.drop(reset=fault.reset)
                if ended is not None or count - sent >= every or (count and not sent):
                    part = self.part(decoding, sent)
                    sent = count
                    await exchange.event(part if fault.edit is None else fault.edit(part))
                if ended is not None:
                    break
                await changed.wait()
        if fault.done and self.says_done:
            await exchange.event("[DONE]")
        await exchange.end()


def check_fields(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Refuses what a real server would ignore silently: a client that sends it means something by it."""
    unknown = set(given) - set(known)
    if unknown:
        raise Refused(400, {"error": f"unknown fields in {where}: {sorted(unknown)}"})
