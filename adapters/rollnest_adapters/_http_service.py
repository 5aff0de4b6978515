"""One HTTP service that answers JSON with JSON.

There is nothing to open and nothing to close. Connections are there while calls are, shared by those that overlap, and
closed by the last of them; so whatever holds a service may be made anywhere, and used in any event loop.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from anyio import CancelScope, current_time
from anyio.lowlevel import RunVar
from attrs import define

from ._checks import check_positive
from ._http import HttpClient, HttpError, check_api_key, check_base_url
from ._limiter import CallOptions, Limiter

__all__ = ["HttpService"]

_CLOSE = 5.0  # seconds to say good-bye to a server
_MAX_RESPONSE_BYTES = 16 * 1024 * 1024
_SHOWN = 200  # characters of an answer that can't be used


@define
class _Shared:
    """The connections of one event loop, and how many calls use them."""

    client: HttpClient
    users: int = 0


class HttpService:
    """One service.

    Args:
        url: Where calls are posted to.
        api_key: Sent as a bearer token; never shown.
        timeout: Seconds that the service may say nothing to a request.
        options: How it is called.
        tls: Trusts another authority than the system's.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        timeout: float,
        options: CallOptions,
        tls: ssl.SSLContext | None,
    ) -> None:
        check_positive("timeout", timeout)
        self.url: str = check_base_url(url, name="url")
        self._path = "" if self.url.count("/") > 2 else "/"  # a host alone is asked for its root
        self._new_client = partial(
            HttpClient,
            self.url,
            api_key=check_api_key(api_key),
            silence=timeout,
            max_response_bytes=_MAX_RESPONSE_BYTES,
            tls=tls,
        )
        self._new_client()  # what it refuses is refused now
        self._limiter = Limiter(options)
        self._shared: RunVar[_Shared | None] = RunVar("rollnest service", None)

    def __repr__(self) -> str:
        return f"<HttpService {self.url}>"

    async def call(self, body: Any) -> Any:
        """Posts JSON and returns the answer's, decoded.

        Raises:
            InferenceError: There was no answer, or none that is JSON.
            TypeError, MsgspecError, OverflowError: The body is nothing that JSON can hold.

        Cancellation: the request is dropped.
        """
        content = msgspec.json.encode(body)
        async with self._connections() as client:
            answer = await self._limiter.run(partial(client.post, self._path, content))
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            shown = answer[:_SHOWN].decode("utf-8", "replace")
            raise HttpError(
                f"POST {self.url}: the answer is no JSON: {shown!r} ({error})"
            ) from error

    @asynccontextmanager
    async def _connections(self) -> AsyncGenerator[HttpClient]:
        """Those that all calls of this event loop share; the last call closes them."""
        shared = self._shared.get()
        if shared is None:
            shared = _Shared(self._new_client())
            self._shared.set(shared)
            await shared.client.__aenter__()  # connects nowhere yet, so nobody comes in between
        shared.users += 1
        try:
            yield shared.client
        finally:
            shared.users -= 1
            if not shared.users:
                self._shared.set(None)
                with CancelScope(shield=True, deadline=current_time() + _CLOSE):
                    await shared.client.__aexit__(None, None, None)
