"""The HTTP client that all adapters share, against a real server that misbehaves."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import httpcore2
import pytest
import trustme

from rollnest.errors import InferenceError
from rollnest.testing.servers import Exchange, LoopbackServer
from rollnest_adapters._http import (
    HttpClient,
    HttpError,
    check_api_key,
    check_base_url,
)

from .hand_clock import advance, hand_backends

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_connection_ages")]

EMPTY: dict[str, Any] = {}

KEY = "sk-verysecret0123456789"


@pytest.fixture(params=hand_backends(), ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    make: Callable[[], tuple[str, dict[str, Any]]] = request.param
    return make()


async def echo(exchange: Exchange) -> None:
    await exchange.reply({"got": exchange.request.json() if exchange.request.body else None})


async def fails(server: LoopbackServer, **options: Any) -> HttpError:
    """Posts to a server, and returns what that failed with."""
    async with server.serve(), HttpClient(server.url, **options) as client:
        with pytest.raises(HttpError) as caught:
            await client.post("/x", {})
    return caught.value


# What it sends


async def test_a_post_sends_json_and_returns_the_body() -> None:
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url + "/root/", api_key=KEY) as client:
        body = await client.post(
            "/generate", {"ids": [1, 2]}, params={"a": "b c"}, headers={"x-request-id": "r1"}
        )
        assert body == b'{"got": {"ids": [1, 2]}}'
        assert await client.get("/health") == b'{"got": null}'
    post, get = server.requests
    assert (post.method, post.path, post.query) == ("POST", "/root/generate", {"a": "b c"})
    assert post.headers["authorization"] == f"Bearer {KEY}"
    assert post.headers["content-type"] == "application/json"
    assert post.headers["x-request-id"] == "r1"
    assert post.headers["accept-encoding"] == "identity"
    assert (get.method, get.path, get.body) == ("GET", "/root/health", b"")
    assert "content-type" not in get.headers
    assert server.connections == 1


async def test_without_a_key_none_is_sent() -> None:
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url) as client:
        await client.post("/x")
    assert "authorization" not in server.requests[0].headers
    assert server.requests[0].path == "/x"


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url) as client:
        await client.post("/x")
    assert server.connections == 1


async def test_a_closed_client_refuses() -> None:
    client = HttpClient("http://127.0.0.1:9")
    with pytest.raises(HttpError, match="not open") as caught:
        await client.post("/x", {})
    assert not caught.value.retryable
    assert not caught.value.maybe_executed
    async with client:
        with pytest.raises(RuntimeError, match="open already"):
            await client.__aenter__()
    with pytest.raises(HttpError, match="not open"):
        await client.get("/x")


# Failures, and whether they may pass


@pytest.mark.parametrize(
    ("status", "retryable", "maybe_executed"),
    [
        (400, False, False),
        (401, False, False),
        (403, False, False),
        (404, False, False),
        (408, True, False),
        (422, False, False),
        (429, True, False),
        (500, True, True),
        (501, False, False),
        (502, True, True),
        (503, True, True),
        (504, True, True),
        (302, False, False),
    ],
)
async def test_bug_085_a_status_says_whether_it_may_pass(
    status: int, retryable: bool, maybe_executed: bool
) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(
            {"error": "the cap\n is  bad"},
            status=status,
            headers={"location": "http://127.0.0.1:9/"},
        )

    server = LoopbackServer(refuse)
    error = await fails(server)
    assert (error.status, error.retryable, error.maybe_executed) == (
        status,
        retryable,
        maybe_executed,
    )
    assert f"status {status}" in str(error)
    assert '{"error": "the cap\\n is bad"}' in str(error)
    assert len(server.requests) == 1  # BUG-086: nothing is tried again here
    assert isinstance(error, InferenceError)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        ("soon", None),
        ("-3", None),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0),
        (None, None),
    ],
)
async def test_retry_after_is_read(value: str | None, seconds: float | None) -> None:
    async def busy(exchange: Exchange) -> None:
        headers: Mapping[str, str] = {} if value is None else {"retry-after": value}
        await exchange.reply(status=429, headers=headers)

    error = await fails(LoopbackServer(busy))
    assert error.retry_after == seconds
    assert "no reason given" in str(error)


async def test_a_server_that_is_not_there_has_executed_nothing() -> None:
    server = LoopbackServer(echo)
    async with server.serve():
        url = server.url
    async with HttpClient(url) as client:
        with pytest.raises(HttpError, match="ConnectError") as caught:
            await client.post("/x", {})
    assert caught.value.retryable
    assert not caught.value.maybe_executed


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("when", ["before the answer", "in the head", "in the body"])
async def test_a_connection_that_breaks_may_have_executed(when: str, reset: bool) -> None:
    async def drop(exchange: Exchange) -> None:
        if when == "in the head":
            await exchange.raw(b"HTTP/1.1 200 O")
        if when == "in the body":
            await exchange.start(headers={"content-length": "100"})
            await exchange.send(b"{")
        await exchange.drop(reset=reset)

    error = await fails(LoopbackServer(drop))
    assert error.retryable
    assert error.maybe_executed


async def test_garbage_is_a_failure_that_may_pass() -> None:
    async def garbage(exchange: Exchange) -> None:
        await exchange.raw(b"\x00\xff this is not HTTP\r\n\r\n")
        await exchange.drop()

    error = await fails(LoopbackServer(garbage))
    assert error.retryable
    assert "RemoteProtocolError" in str(error)


async def test_a_head_without_end_is_refused() -> None:
    async def head(exchange: Exchange) -> None:
        await exchange.raw(b"HTTP/1.1 200 OK\r\n")
        while True:
            await exchange.raw(b"x-filler: " + b"y" * 4000 + b"\r\n")

    error = await fails(LoopbackServer(head))
    assert "RemoteProtocolError" in str(error)


# Size and coding


@pytest.mark.parametrize("declared", [False, True])
async def test_an_answer_that_is_too_long_is_not_read(declared: bool) -> None:
    sent = 0

    async def long(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start(headers={"content-length": str(10**12)} if declared else {})
        while True:
            await exchange.send(b" " * 100_000)
            sent += 100_000

    error = await fails(LoopbackServer(long), max_response_bytes=1_000_000)
    assert not error.retryable
    assert "max_response_bytes is 1000000" in str(error)
    assert sent < 20_000_000  # what buffers of the system hold


async def test_the_text_of_an_error_is_bounded() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(b"x" * 10_000_000, status=400)

    error = await fails(LoopbackServer(refuse))
    assert len(str(error)) < 700


async def test_an_answer_that_is_coded_is_refused() -> None:
    async def coded(exchange: Exchange) -> None:
        await exchange.reply(b"\x1f\x8b" + b"\0" * 100, headers={"content-encoding": "gzip"})

    error = await fails(LoopbackServer(coded))
    assert "coded, 'gzip'" in str(error)
    assert not error.retryable


# Silence


async def test_a_silent_server_is_given_up() -> None:
    began, left = anyio.Event(), anyio.Event()

    async def silent(exchange: Exchange) -> None:
        began.set()
        await exchange.gone.wait()
        left.set()

    async def let_pass() -> None:
        await began.wait()
        await advance(9.9)
        assert not left.is_set()
        await advance(0.2)

    server = LoopbackServer(silent)
    async with server.serve(), HttpClient(server.url, silence=10.0) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_pass)
            with pytest.raises(HttpError, match=r"said nothing for 10\.0 s") as caught:
                await client.post("/x", {})
            assert caught.value.retryable
            assert caught.value.maybe_executed
        await left.wait()  # the connection is closed


async def test_silence_begins_anew_with_each_part_of_the_answer() -> None:
    heard = 0
    more = anyio.Event()

    async def drip(exchange: Exchange) -> None:
        nonlocal more
        await exchange.events()
        for number in range(5):
            await exchange.event(number)
            await more.wait()
            more = anyio.Event()
        await exchange.end()

    server = LoopbackServer(drip)
    async with server.serve(), HttpClient(server.url, silence=10.0) as client:
        async with client.stream("/x", {}) as events:
            async for _ in events:
                heard += 1
                await advance(9.0)
                more.set()
    assert heard == 5


async def test_silence_stands_still_while_the_server_is_frozen() -> None:
    began, go_on = anyio.Event(), anyio.Event()

    async def frozen(exchange: Exchange) -> None:
        began.set()
        await go_on.wait()
        await exchange.reply({})

    server = LoopbackServer(frozen)
    async with server.serve(), HttpClient(server.url, silence=10.0) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, "/x", EMPTY)
            await began.wait()
            await advance(9.0)
            client.silence.suspend()
            await advance(1000.0)
            client.silence.resume()
            await advance(9.0)
            go_on.set()


# Connections


async def test_bug_087_waiting_for_a_connection_is_no_failure() -> None:
    at_once, most = 0, 0
    full = anyio.Event()

    async def slow(exchange: Exchange) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 8:
            full.set()
        await full.wait()
        at_once -= 1
        await exchange.reply({})

    server = LoopbackServer(slow)
    async with server.serve(), HttpClient(server.url, max_connections=8, silence=10.0) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(client.post, "/x", EMPTY)
    assert len(server.requests) == 200
    assert most == 8
    assert server.connections <= 8


async def test_many_requests_keep_their_connections() -> None:
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url) as client:
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for _ in range(50):
                    tasks.start_soon(client.post, "/x", EMPTY)
    assert server.connections == server.most_open <= 50


async def answered_in_a_turn_of_the_loop(requests: int) -> int:
    """How many requests end in one turn of the event loop at most, if all are answered at once."""
    waiting = ended = before = most = 0
    all_here = anyio.Event()

    async def together(exchange: Exchange) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == requests:
            all_here.set()
        await all_here.wait()
        await exchange.reply({"answer": "x" * 1000})

    async def post(client: HttpClient) -> None:
        nonlocal ended
        await client.post("/x", {})
        ended += 1

    server = LoopbackServer(together)
    async with server.serve(), HttpClient(server.url) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(requests):
                tasks.start_soon(post, client)
            while before < requests:
                await anyio.lowlevel.checkpoint()
                most, before = max(most, ended - before), ended
    return most


async def test_answers_that_come_at_once_are_worked_on_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollnest_adapters._http._READING", 4)
    # On trio a look may come first in one turn and last in the next, so it may see what two of them did.
    assert await answered_in_a_turn_of_the_loop(100) <= 8
    monkeypatch.setattr("rollnest_adapters._http._READING", 400)
    assert await answered_in_a_turn_of_the_loop(100) > 8


async def test_whoever_has_given_up_has_no_turn() -> None:
    cases: list[Callable[[HttpClient], Awaitable[object]]] = [
        lambda client: client.post("/whole", {}),
        lambda client: client.post("/garbage", {}),
        lambda client: client.post("/dropped", {}),
        lambda client: client.post("/large", {}),
        first_event,
    ]
    server = LoopbackServer(misbehave)
    async with server.serve(), HttpClient(server.url, max_response_bytes=1000) as client:
        pools: Any = client._pools
        before = pools._turns.value
        for case in cases:
            for _ in range(3):
                with suppress(HttpError):
                    await case(client)
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await case(client)
                assert pools._turns.value == before


async def misbehave(exchange: Exchange) -> None:
    match exchange.request.path:
        case "/garbage":
            await exchange.raw(b"HTTP/1.1 200 OK\r\nno header\r\n\r\n")
        case "/dropped":
            await exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")
            await exchange.drop()
        case "/large":
            await exchange.reply({"answer": "x" * 5000})
        case "/events":
            await exchange.raw(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\ndata: 2\n\n"
            )
        case _:
            await exchange.reply({})


async def first_event(client: HttpClient) -> None:
    """Leaves a stream in the middle."""
    async with client.stream("/events", {}) as events:
        async for _ in events:
            break


async def test_thousands_of_connections_are_opened_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = most = 0
    backend: Any = httpcore2.AnyIOBackend
    connect: Any = backend.connect_tcp

    async def counted(*args: Any) -> Any:
        nonlocal opening, most
        opening += 1
        most = max(most, opening)
        try:
            return await connect(*args)
        finally:
            opening -= 1

    monkeypatch.setattr(backend, "connect_tcp", counted)
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                tasks.start_soon(client.post, "/x", EMPTY)
    assert most == 64
    assert len(server.requests) == 300


async def test_an_idle_connection_is_closed_before_the_server_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("httpcore2._async.http11.time", SimpleNamespace(monotonic=lambda: now))
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url) as client:
        await client.post("/x", {})
        now += 3.9
        await client.post("/x", {})
        now += 4.1
        await client.post("/x", {})
    assert server.connections == 2


async def test_connections_that_are_not_needed_any_more_are_closed() -> None:
    waiting, all_here = 0, anyio.Event()

    async def together(exchange: Exchange) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 20:
            all_here.set()
        await all_here.wait()
        await exchange.reply({})

    server = LoopbackServer(together)
    async with server.serve(), HttpClient(server.url) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(client.post, "/x", EMPTY)
        await advance(3.9)
        for _ in range(10):
            await client.post("/x", {})
        assert server.open == 20
        await advance(0.2)
        for _ in range(5):
            await client.post("/x", {})
        while server.open > 10:
            await anyio.lowlevel.checkpoint()
        assert server.open == 10
        for _ in range(5):
            await client.post("/x", {})
        while server.open > 1:
            await anyio.lowlevel.checkpoint()
        assert server.open == 1
    assert server.connections == 20


@pytest.mark.parametrize("said", [False, True])
async def test_a_connection_that_the_server_closed_is_not_used_again(said: bool) -> None:
    async def close(exchange: Exchange) -> None:
        await exchange.reply({})
        await exchange.drop()

    server = LoopbackServer(close, keep_alive=not said)
    async with server.serve(), HttpClient(server.url) as client:
        for _ in range(5):
            await client.post("/x", {})
            while server.open:
                await anyio.lowlevel.checkpoint()
    assert server.connections == 5


async def test_a_cancelled_request_closes_its_connection() -> None:
    began, left = anyio.Event(), anyio.Event()

    async def work(exchange: Exchange) -> None:
        began.set()
        await exchange.gone.wait()
        left.set()

    server = LoopbackServer(work)
    async with server.serve(), HttpClient(server.url) as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.post, "/x", EMPTY)
            await began.wait()
            tasks.cancel_scope.cancel()
        await left.wait()


async def test_a_client_that_is_left_closes_the_connections_of_requests_in_flight() -> None:
    began, gone = anyio.Event(), anyio.Event()
    errors: list[HttpError] = []

    async def work(exchange: Exchange) -> None:
        began.set()
        await exchange.gone.wait()
        gone.set()

    async def post(client: HttpClient) -> None:
        with pytest.raises(HttpError) as caught:
            await client.post("/x", {})
        errors.append(caught.value)

    server = LoopbackServer(work)
    async with server.serve(), anyio.create_task_group() as tasks:
        async with HttpClient(server.url) as client:
            tasks.start_soon(post, client)
            await began.wait()
        await gone.wait()
    assert len(errors) == 1
    assert server.connections == 1


# Streams


async def test_events_come_one_by_one_however_they_are_cut() -> None:
    text = b'data: {"a": 1}\n\n: a comment\n\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\n'

    async def cut(exchange: Exchange) -> None:
        await exchange.events()
        for i in range(len(text)):
            await exchange.send(text[i : i + 1])
        await exchange.end()

    server = LoopbackServer(cut)
    async with server.serve(), HttpClient(server.url) as client:
        async with client.stream("/x", {}) as events:
            assert [event async for event in events] == [b'{"a": 1}', b"two", b"[DONE]"]


async def test_a_stream_that_is_left_early_is_closed() -> None:
    left = anyio.Event()

    async def endless(exchange: Exchange) -> None:
        await exchange.events()
        await exchange.event(1)
        await exchange.gone.wait()
        left.set()

    server = LoopbackServer(endless)
    async with server.serve(), HttpClient(server.url) as client:
        async with client.stream("/x", {}) as events:
            async for _ in events:
                break
        await left.wait()


async def test_a_stream_that_breaks_keeps_what_came() -> None:
    async def broken(exchange: Exchange) -> None:
        await exchange.events()
        await exchange.event(1)
        await exchange.event(2)
        await exchange.drop()

    got: list[bytes] = []
    server = LoopbackServer(broken)
    async with server.serve(), HttpClient(server.url) as client:
        with pytest.raises(HttpError) as caught:
            async with client.stream("/x", {}) as events:
                async for event in events:
                    got.append(event)
    assert got == [b"1", b"2"]
    assert caught.value.retryable


@pytest.mark.parametrize("line", [b"data: " + b"x" * 99_994, b"x" * 100_000])
async def test_an_event_without_end_is_refused(line: bytes) -> None:
    async def long(exchange: Exchange) -> None:
        await exchange.events()
        while True:
            await exchange.send(line)

    server = LoopbackServer(long)
    async with server.serve(), HttpClient(server.url, max_response_bytes=1_000_000) as client:
        with pytest.raises(HttpError, match="max_response_bytes"):
            async with client.stream("/x", {}) as events:
                async for _ in events:
                    pass


async def test_what_is_no_stream_is_refused() -> None:
    server = LoopbackServer(echo)
    async with server.serve(), HttpClient(server.url) as client:
        with pytest.raises(HttpError, match="'application/json', not events"):
            async with client.stream("/x", {}) as events:
                async for _ in events:
                    pass


# Secrets and TLS


async def test_the_key_is_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    async def tell(exchange: Exchange) -> None:
        await exchange.reply(
            {"error": f"Incorrect API key: {exchange.request.headers['authorization']}"}, status=401
        )

    caplog.set_level(logging.DEBUG)
    server = LoopbackServer(tell)
    async with server.serve(), HttpClient(server.url, api_key=KEY) as client:
        with pytest.raises(HttpError, match=r"Bearer \*\*\*") as caught:
            await client.post("/x", {})
        shown = repr(client)
    seen: BaseException | None = caught.value
    while seen is not None:
        shown += repr(seen) + str(seen) + repr(vars(seen))
        seen = seen.__cause__ or seen.__context__
    assert KEY not in shown
    assert KEY not in caplog.text


async def test_a_certificate_is_verified() -> None:
    authority: Any = trustme.CA()
    mine = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(mine)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    server = LoopbackServer(echo, tls=mine)
    async with server.serve():
        async with HttpClient(server.url, tls=trusting) as client:
            assert await client.post("/x", 1) == b'{"got": 1}'
        async with HttpClient(server.url) as client:
            with pytest.raises(HttpError, match="CERTIFICATE_VERIFY_FAILED") as caught:
                await client.post("/x", {})
    assert not caught.value.retryable
    assert not caught.value.maybe_executed
    assert len(server.requests) == 1


# Bad input


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "must look like http://host:port"),
        ("localhost:8000", "must look like http://host:port"),
        ("ftp://host", "must look like http://host:port"),
        ("http://", "must look like http://host:port"),
        ("http://h:99999", "must look like http://host:port"),
        ("http://h:x", "no URL"),
        ("http://h?a=b", "no query"),
        ("http://h#a", "no fragment"),
        ("http://user:hunter2@h", "use api_key"),
        ("http://user:hunt er2@h:x", "use api_key"),
    ],
)
def test_base_url_is_checked(value: str, message: str) -> None:
    with pytest.raises(ValueError, match="base_url") as caught:
        HttpClient(value)
    assert message in str(caught.value)
    assert "hunt" not in str(caught.value)


def test_base_url_is_a_string() -> None:
    with pytest.raises(TypeError, match="base_url must be a str, got 8000"):
        check_base_url(8000)
    assert check_base_url("HTTPS://Host:8443/v1//") == "https://host:8443/v1"


@pytest.mark.parametrize("value", ["", "two words", "new\nline", "schlüssel"])
def test_a_bad_key_is_not_shown(value: str) -> None:
    with pytest.raises(ValueError, match="api_key must be printable ASCII") as caught:
        HttpClient("http://h", api_key=value)
    assert not value or value not in str(caught.value)


def test_a_key_is_a_string() -> None:
    with pytest.raises(TypeError, match="got a bytes") as caught:
        check_api_key(b"secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"silence": 0},
        {"silence": float("inf")},
        {"connect_timeout": -1},
        {"max_connections": 0},
        {"max_response_bytes": 0},
    ],
    ids=repr,
)
def test_limits_are_checked(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        HttpClient("http://h", **options)


def test_tls_is_a_context() -> None:
    tls: Any = False
    with pytest.raises(TypeError, match=r"tls must be an ssl\.SSLContext or None, got False"):
        HttpClient("http://h", tls=tls)
