"""One server over HTTP, on either event loop: what every HTTP adapter has in common.

Invariants:

- A server is believed nothing: the answer's size is bounded, its coding refused, its redirects not followed, its
  certificate verified, and its silence limited.
- Every failure is an `HttpError` that says whether it may pass, and whether the server may have acted.
- The key is in no message, no repr and no log, also where a server sends it back.
- Nothing is retried here, and nothing waits for a connection unless `max_connections` says so.

Two clients for one server have their own connections each, so that control calls don't queue behind generation.

It sits on the connection pool that httpx2 is made of: a policy's server needs no cookies, redirects and encodings, and
httpx2's own layer leaves generators behind where an answer is not read to its end, which trio rightly complains about.
"""

from __future__ import annotations

import math
import socket
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import anyio
import httpcore2
import httpx2
import msgspec
from attrs import frozen

from rollnest.errors import InferenceError

__all__ = ["HttpClient", "HttpError", "Silence", "check_api_key", "check_base_url"]

_KEEP_IDLE = 4.0  # seconds; uvicorn closes an idle connection after 5, and may do so while a request is under way
_TEXT = 500  # characters of a server's own words that go into an error
_TIDIED = 2  # idle connections at most that a request closes on its way
_OPENING = 64  # connections at once
_READING = 32  # answers that are worked on at once, of those that have come
_BEGINNING = 4096  # bytes of an error that are read

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class HttpError(InferenceError):
    """A server failed a request.

    Attributes:
        status: The answer's status; `None` if there was none.
        retry_after: Seconds that the server asked to wait before the next try; `None` if it didn't.
    """

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = False,
        maybe_executed: bool = True,
        status: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, retryable=retryable, maybe_executed=maybe_executed)
        self.status: int | None = status
        self.retry_after: float | None = retry_after


def check_base_url(value: Any, *, name: str = "base_url") -> str:
    """Returns a server's root URL without a slash at its end.

    Raises:
        TypeError, ValueError: It is no http(s) URL, or has parts that a root can't have. A password is not shown.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {value!r}")
    if "@" in value.partition("//")[2].partition("/")[0]:
        raise ValueError(f"{name} must not hold a user or a password; use api_key")
    try:
        url = httpx2.URL(value)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{name} is no URL: {value!r} ({error})") from None
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 1) < 65536:
        raise ValueError(f"{name} must look like http://host:port, got {value!r}")
    if url.query or url.fragment:
        raise ValueError(f"{name} must have no query and no fragment, got {value!r}")
    return str(url).rstrip("/")


def check_api_key(value: Any) -> str | None:
    """Returns the key.

    Raises:
        TypeError, ValueError: It can't be sent in a header. It is not shown.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"api_key must be a str or None, got a {type(value).__name__}")
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError("api_key must be printable ASCII without spaces, and not empty")
    return value


class Silence:
    """How long a server may say nothing; stands still while it is known to be frozen.

    Args:
        limit: Seconds; `None` is no limit.
    """

    def __init__(self, limit: float | None) -> None:
        self.limit: float | None = limit
        self._scopes: set[anyio.CancelScope] = set()
        self._suspended = False

    @contextmanager
    def watch(self) -> Generator[Heard]:
        """Ends the block if the server says nothing for too long; see `Heard.nothing`."""
        heard = Heard(self)
        with heard.scope:
            heard()
            self._scopes.add(heard.scope)
            try:
                yield heard
            finally:
                self._scopes.discard(heard.scope)

    def suspend(self) -> None:
        """The server is frozen from now on."""
        self._suspended = True
        for scope in self._scopes:
            scope.deadline = math.inf

    def resume(self) -> None:
        """It goes on."""
        self._suspended = False
        deadline = self.deadline()
        for scope in self._scopes:
            scope.deadline = deadline

    def deadline(self) -> float:
        """By when it has to say something, if it has just done so."""
        if self.limit is None or self._suspended:
            return math.inf
        return anyio.current_time() + self.limit


class Heard:
    """Called whenever the server has said something."""

    __slots__ = ("_silence", "scope")

    def __init__(self, silence: Silence) -> None:
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self._silence = silence

    def __call__(self) -> None:
        self.scope.deadline = self._silence.deadline()

    @property
    def nothing(self) -> bool:
        """Whether the block was ended because the server said nothing for too long."""
        return self.scope.cancelled_caught


class HttpClient:
    """Requests to one server. Enter it with `async with`; leaving closes every connection.

    Args:
        base_url: The server's root, such as `http://127.0.0.1:8000`. Paths are put after it.
        api_key: Sent as a bearer token; `None` sends none.
        silence: Seconds that the server may say nothing after a request was sent, or in the middle of an answer;
            `None` is no limit.
        connect_timeout: Seconds to connect.
        max_connections: Most connections; further requests wait for one, without a limit of their own. `None` is no
            bound: as many as there are requests at once.
        max_response_bytes: Most bytes of one answer.
        tls: For a server with a certificate of one's own authority; `None` trusts the system's. Verification can't be
            switched off otherwise than by such a context.

    Attributes:
        base_url: The server's root.
        silence: The limit on the server's silence; suspend it while the server is frozen.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        silence: float | None = None,
        connect_timeout: float = 10.0,
        max_connections: int | None = None,
        max_response_bytes: int = 256 * 1024 * 1024,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.base_url: str = check_base_url(base_url)
        self._api_key = check_api_key(api_key)
        for option, seconds in (("silence", silence), ("connect_timeout", connect_timeout)):
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"{option} must be > 0 and finite, got {seconds!r}")
        for option, number in (
            ("max_connections", max_connections),
            ("max_response_bytes", max_response_bytes),
        ):
            if number is not None and number < 1:
                raise ValueError(f"{option} must be >= 1, got {number!r}")
        if tls is not None and not isinstance(tls, ssl.SSLContext):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"tls must be an ssl.SSLContext or None, got {tls!r}")
        self.silence: Silence = Silence(silence)
        self._max_connections = max_connections
        self._max_bytes = max_response_bytes
        self._tls = tls
        self._root = httpcore2.URL(self.base_url)
        self._fields = [(b"accept-encoding", b"identity"), (b"user-agent", b"rollnest")]
        if self._api_key is not None:
            self._fields.append((b"authorization", b"Bearer " + self._api_key.encode("ascii")))
        # Silence is watched here: one clock for all waiting, that can stand still.
        self._extensions = {"timeout": {"connect": connect_timeout}}
        self._pools: _Pools | None = None
        self._slots: anyio.Semaphore | None = None

    def __repr__(self) -> str:
        return f"<HttpClient {self.base_url}{'' if self._pools else ', closed'}>"

    async def __aenter__(self) -> HttpClient:
        if self._pools is not None:
            raise RuntimeError("the client is open already")
        # Semaphore, not the pool's own limit: its queue is walked for every request.
        if self._max_connections is not None:
            self._slots = anyio.Semaphore(self._max_connections, fast_acquire=True)
        tls = None
        if self.base_url.startswith("https"):
            tls = self._tls or httpx2.create_ssl_context()
        self._pools = _Pools(tls)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pools, self._pools = self._pools, None
        if pools is not None:
            await pools.aclose()

    async def get(self, path: str, *, params: Mapping[str, str] | None = None) -> bytes:
        """Returns the body of the answer to a GET; see `post`."""
        return await self._whole("GET", path, None, params, None)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Posts JSON and returns the whole body of the answer.

        Args:
            path: After the server's root, beginning with a slash.
            body: What JSON can hold, or bytes that are JSON already; `None` sends no body.
            params: The query.
            headers: Further ones.

        Raises:
            HttpError: The server could not be reached, failed, or answered with something else than success.

        Cancellation: the connection is closed, which many servers take as an abort.
        """
        content = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._whole("POST", path, content, params, headers)

    @asynccontextmanager
    async def stream(
        self, path: str, body: Any, *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Posts JSON and yields the data of the server-sent events of the answer, as they come.

        A request that fails raises when the block is entered or in the iteration; see `post`. Leaving the block early
        closes the connection.
        """
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with (
            self._open("POST", path, content, None, headers) as answer,
            aclosing(self._events(answer)) as events,
        ):
            yield events

    def plain(self, text: str) -> str:
        """Returns a server's or a library's words: without the key, on one line, and not too many."""
        if self._api_key is not None:
            text = text.replace(self._api_key, "***")
        words = " ".join(text.split())
        return words if len(words) <= _TEXT else words[:_TEXT] + "..."

    async def _whole(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
    ) -> bytes:
        async with self._open(method, path, content, params, headers) as answer:
            return await self._read(answer)
        raise AssertionError("unreachable")  # silence raises when the block is left

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
    ) -> AsyncGenerator[_Answer]:
        pools, call = self._pools, f"{method} {self.base_url}{path}"
        if pools is None:
            raise HttpError(f"{call}: the client is not open", maybe_executed=False)
        target = self._root.target.rstrip(b"/") + path.encode("ascii")
        if params:
            target += b"?" + urlencode(params).encode("ascii")
        root = self._root
        url = httpcore2.URL(scheme=root.scheme, host=root.host, port=root.port, target=target)
        fields = self._fields if content is None else [*self._fields, _JSON]
        if headers:
            fields = [
                *fields,
                *((k.encode("ascii"), v.encode("ascii")) for k, v in headers.items()),
            ]
        if self._slots is not None:
            await self._slots.acquire()
        try:
            with self.silence.watch() as heard:
                async with (
                    pools.one() as pool,
                    pool.stream(
                        method, url, headers=fields, content=content, extensions=self._extensions
                    ) as response,
                ):
                    heard()
                    answer = _Answer(call, response, heard)
                    await self._check(answer)
                    yield answer
        except _HTTP_ERRORS as error:
            raise self._failure(call, error) from error
        finally:
            if self._slots is not None:
                self._slots.release()
        if heard.nothing:
            raise HttpError(
                f"{call}: the server said nothing for {self.silence.limit} s", retryable=True
            )

    def _failure(self, call: str, error: Exception) -> HttpError:
        unsent = isinstance(error, httpcore2.ConnectError | httpcore2.ConnectTimeout)
        causes = list(_causes(error))
        # A certificate that is wrong now is wrong the next time; a name that can't be looked up may be there again.
        for_good = isinstance(error, httpcore2.LocalProtocolError) or any(
            isinstance(cause, ssl.SSLCertVerificationError) for cause in causes
        )
        what = self.plain(next((str(cause) for cause in causes if str(cause)), "it broke"))
        return HttpError(
            f"{call}: {type(error).__name__}: {what}",
            retryable=not for_good,
            maybe_executed=not unsent,
        )

    async def _check(self, answer: _Answer) -> None:
        response = answer.response
        status = response.status
        if 200 <= status < 300:
            coding = answer.header("content-encoding", "identity").lower()
            if coding != "identity":
                raise HttpError(f"{answer.call}: the answer is coded, {self.plain(coding)!r}")
            return
        text = self.plain((await self._beginning(answer)).decode("utf-8", "replace"))
        raise HttpError(
            f"{answer.call}: status {status}: {text or 'no reason given'}",
            retryable=status in _TRANSIENT,
            maybe_executed=status >= 500 and status != 501,
            status=status,
            retry_after=_retry_after(answer.header("retry-after")),
        )

    async def _beginning(self, answer: _Answer) -> bytes:
        """Of an error's body; what comes after it is of no use."""
        beginning = b""
        async with answer.chunks() as chunks:
            async for chunk in chunks:
                answer.heard()
                beginning += chunk
                if len(beginning) >= _BEGINNING:
                    break
        return beginning[:_BEGINNING]

    async def _read(self, answer: _Answer) -> bytes:
        declared = answer.header("content-length")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_long(answer, f"{declared} bytes")
        parts: list[bytes] = []
        size = 0
        async with answer.chunks() as chunks:
            async for chunk in chunks:
                answer.heard()
                size += len(chunk)
                if size > self._max_bytes:
                    raise self._too_long(answer, "more bytes")
                parts.append(chunk)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _events(self, answer: _Answer) -> AsyncGenerator[bytes]:
        kind = answer.header("content-type").partition(";")[0].strip().lower()
        if kind != "text/event-stream":
            raise HttpError(f"{answer.call}: the answer is {self.plain(kind)!r}, not events")
        held: list[bytes] = []  # of a line that has not ended
        size = 0
        async with answer.chunks() as chunks:
            async for chunk in chunks:
                answer.heard()
                size += len(chunk)
                if size > self._max_bytes:
                    raise self._too_long(answer, "more bytes")
                held.append(chunk)
                if b"\n" not in chunk:
                    continue
                *lines, rest = b"".join(held).split(b"\n")
                held = [rest]
                for line in lines:
                    # Every server of the field puts one event's data on one line.
                    if line.startswith(b"data:"):
                        yield line[5:].strip()

    def _too_long(self, answer: _Answer, size: str) -> HttpError:
        return HttpError(
            f"{answer.call}: the answer has {size}; max_response_bytes is {self._max_bytes}"
        )


class _Answer:
    """An answer whose head has come.

    Attributes:
        call: What was asked, for errors.
        response: The answer.
        heard: To be called for each part of its body.
    """

    __slots__ = ("call", "heard", "response")

    def __init__(self, call: str, response: httpcore2.Response, heard: Heard) -> None:
        self.call: str = call
        self.response: httpcore2.Response = response
        self.heard: Heard = heard

    def header(self, name: str, default: str = "") -> str:
        """The first header of that name."""
        wanted = name.encode("ascii")
        for field, value in self.response.headers:
            if field.lower() == wanted:
                return value.decode("latin-1")
        return default

    def chunks(self) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The parts of the body, as they come; to be closed if they are not read to their end."""
        body: Any = self.response.stream
        return aclosing(aiter(body))


class _Turn:
    """One request's turn to work on what has come.

    A server that is told to abort answers thousands of requests at once. If each worked on its answer as soon as it is
    there, one turn of the event loop would take a second, and nobody else would hear anything meanwhile: not the call
    that pauses the server, nor the user's own tasks.
    """

    __slots__ = ("_has", "_turns")

    def __init__(self, turns: anyio.Semaphore) -> None:
        self._turns = turns
        self._has = False

    async def take(self) -> None:
        """Waits for it, if it isn't on."""
        if not self._has:
            await self._turns.acquire()
            self._has = True

    def give_up(self) -> None:
        """Ends it, if it is on."""
        if self._has:
            self._has = False
            self._turns.release()


class _InTurn(httpcore2.AsyncNetworkStream):
    """A connection that waits for its turn before it hands on what has come."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, turn: _Turn) -> None:
        self._stream = stream
        self._turn = turn

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore2's
    ) -> bytes:
        self._turn.give_up()
        data = await self._stream.read(max_bytes, timeout)
        await self._turn.take()
        return data

    async def write(
        self,
        buffer: bytes,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore2's
    ) -> None:
        self._turn.give_up()
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        self._turn.give_up()
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore2's
    ) -> httpcore2.AsyncNetworkStream:
        stream = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _InTurn(stream, self._turn)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class _Backend(httpcore2.AsyncNetworkBackend):
    """Connects for one request at a time, which has its turns.

    Args:
        opening: Bounds how many connect at once: thousands would overflow the server's queue, and be dropped silently.
        turn: That of the request.
    """

    def __init__(self, opening: anyio.Semaphore, turn: _Turn) -> None:
        backend: Any = httpcore2.AnyIOBackend
        self._backend: httpcore2.AsyncNetworkBackend = backend()
        self._opening = opening
        self._turn = turn

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore2's
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        async with self._opening:
            stream = await self._backend.connect_tcp(
                host, port, timeout, local_address, socket_options
            )
        return _InTurn(stream, self._turn)


@frozen(eq=False)
class _Pool:
    connections: httpcore2.AsyncConnectionPool
    turn: _Turn


class _Pools:
    """A connection pool for each request at once, since a pool walks over all of its connections for every request.

    The pool that was used last is used next. So those that are not needed any more grow old, and are closed.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._opening = anyio.Semaphore(_OPENING, fast_acquire=True)
        # Not `fast_acquire`: who has a turn keeps it until the loop's next turn, or all would have one in the same.
        self._turns = anyio.Semaphore(_READING)
        self._idle: deque[tuple[_Pool, float]] = deque()  # oldest first
        self._busy: set[_Pool] = set()

    @asynccontextmanager
    async def one(self) -> AsyncGenerator[httpcore2.AsyncConnectionPool]:
        """A pool for one request.

        Cancellation: on the way in, nothing happened.
        """
        pool = self._idle.pop()[0] if self._idle else self._new()
        self._busy.add(pool)
        try:
            await self._tidy()
            yield pool.connections
        finally:
            pool.turn.give_up()
            if pool in self._busy:
                self._busy.remove(pool)
                self._idle.append((pool, anyio.current_time()))
            else:  # all were closed meanwhile; this one may have connected after that
                await pool.connections.aclose()

    async def aclose(self) -> None:
        """Closes every connection, those of requests in flight too."""
        while self._idle:
            await self._idle.popleft()[0].connections.aclose()
        while self._busy:
            await self._busy.pop().connections.aclose()

    async def _tidy(self) -> None:
        old = anyio.current_time() - _KEEP_IDLE
        for _ in range(_TIDIED):
            if not self._idle or self._idle[0][1] >= old:
                return
            await self._idle.popleft()[0].connections.aclose()

    def _new(self) -> _Pool:
        turn = _Turn(self._turns)
        connections = httpcore2.AsyncConnectionPool(
            ssl_context=self._tls,
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=_KEEP_IDLE,
            socket_options=_socket_options(),
            network_backend=_Backend(self._opening, turn),
        )
        return _Pool(connections, turn)


_JSON = (b"content-type", b"application/json")
_HTTP_ERRORS = (
    httpcore2.NetworkError,
    httpcore2.ProtocolError,
    httpcore2.TimeoutException,
)


def _socket_options() -> list[tuple[int, int, int]]:
    """Has the system notice a peer that is gone without a word, also while nothing is expected of it."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error itself, and what it came from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _retry_after(value: str | None) -> float | None:
    """Seconds of a `Retry-After`: a number, or a date. `None` for what is neither."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (then - datetime.now(UTC)).total_seconds()) if then.tzinfo else None
