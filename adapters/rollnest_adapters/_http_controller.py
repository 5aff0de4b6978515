"""A policy behind an HTTP server: what the controllers of all servers have in common.

Invariants:

- Every attempt is in `_open` from before its request is sent until its `generate` ends.
- Nothing reaches an attempt but what was checked: aligned logprobs, the prompt's length, a known reason, and versions.
- A request that ends without its answer (cancelled, broken, given up) is also aborted by its id, because servers have
  been seen to miss a connection that closes; that takes bounded time.
- Control calls have connections of their own. They may all be sent twice.
- After a connection broke the server may be another one, with other weights: its version is asked for before any
  further request is sent.

What a server calls its requests, fields and routes is in the subclasses, one module for each.
"""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from os import fspath
from types import TracebackType
from typing import Any, ClassVar, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from attrs import frozen

from rollnest.abc import (
    Attempt,
    Capabilities,
    FinishReason,
    Health,
    PauseMode,
    ReleaseTag,
    WeightSource,
)
from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed

from ._http import HttpClient, HttpError

__all__ = ["Answer", "HttpController", "Open", "Span", "decoded", "unusable"]

T = TypeVar("T")

_TELL = 1.0  # seconds for telling a server that nobody waits any more
_LEAVE = 3.0  # seconds for leaving it as it was found
_IN_A_THREAD = (
    512 * 1024
)  # bytes of an answer that take the loop more than about a millisecond to decode
_MOST_PATIENCE = 60.0  # seconds that a server may ask to be left alone


@frozen
class Span:
    """Tokens that weights of one version made.

    Attributes:
        label: What the server calls the version.
        start: The first of them.
        stop: The one after the last.
    """

    label: str
    start: int
    stop: int


@frozen(kw_only=True)
class Answer:
    """What a server says, in nobody's dialect: a whole answer, or a part of one.

    Attributes:
        ids: Token ids; those that are new, unless the stream is cumulative.
        logprobs: One for each.
        finish: Why it ended, in rollnest's words or the server's; `None` while it goes on.
        detail: What else it said about the end.
        spans: Versions of all tokens of the answer; `None` if it says none here.
        prompt_tokens: How long it thinks the prompt is; `None` if it doesn't say.
        total: How many tokens it thinks it has made so far; `None` if it doesn't say.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: str | None = None
    detail: str | None = None
    spans: Sequence[Span] | None = None
    prompt_tokens: int | None = None
    total: int | None = None


class Open:
    """An attempt in flight.

    Attributes:
        attempt: The attempt.
        scope: Cancelled when the controller is left.
        waiting: Cancelled when it is aborted before it is sent.
        sent: Cancelled when it is aborted afterwards, if the server knows no aborts.
        stopped: Whether it was aborted.
        taken: Tokens of it that came.
        assumed: How many of them were recorded before the server said what their version is.
        held: Tokens that came and whose version is not known yet.
        number: What the server calls it, if that is a number.
    """

    __slots__ = (
        "assumed",
        "attempt",
        "held",
        "number",
        "scope",
        "sent",
        "stopped",
        "taken",
        "waiting",
    )

    def __init__(self, attempt: Attempt) -> None:
        self.attempt: Attempt = attempt
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.waiting: anyio.CancelScope = anyio.CancelScope()
        self.sent: anyio.CancelScope = anyio.CancelScope()
        self.stopped: bool = False
        self.taken: int = 0
        self.assumed: int = 0
        self.held: list[tuple[Sequence[int], Sequence[float]]] = []
        self.number: int | None = None


class HttpController(ABC):
    """Base of the controllers of HTTP servers; see the subclasses.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that came for attempts that had been given up, or were beyond their cap.
    """

    server: ClassVar[str]
    """What the server is called in errors."""

    finish_reasons: ClassVar[Mapping[str, FinishReason]] = {r.value: r for r in FinishReason}
    """Reasons of the server for ending an answer."""

    gated: ClassVar[bool] = False
    """Whether the server can't be paused, so that requests wait here."""

    closes: ClassVar[bool] = False
    """Whether the server knows no aborts, so that its connection is closed instead."""

    cumulative: bool = False
    """Whether each part of a stream holds everything before it, too."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        version: int,
        stream_every: int | None,
        stop_token_ids: Collection[int],
        vocab_size: int | None,
        max_context: int | None,
        silence: float | None,
        control_timeout: float,
        update_timeout: float,
        max_connections: int | None,
        max_response_bytes: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        def client(silence: float | None) -> HttpClient:
            return HttpClient(
                base_url,
                api_key=api_key,
                silence=silence,
                max_response_bytes=max_response_bytes,
                tls=tls,
            )

        self._generation = client(silence)
        if self._generation.base_url.endswith("/v1"):
            raise ValueError(f"base_url must be the server's root, without /v1: {base_url!r}")
        self._controls = client(None)
        for name, seconds in (
            ("control_timeout", control_timeout),
            ("update_timeout", update_timeout),
        ):
            if not seconds > 0:
                raise ValueError(f"{name} must be > 0, got {seconds!r}")
        for name, number, least in (
            ("version", version, 0),
            ("stream_every", stream_every, 1),
            ("vocab_size", vocab_size, 1),
            ("max_context", max_context, 2),
            ("max_connections", max_connections, 1),
        ):
            if number is None and name != "version":
                continue
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an int, got {number!r}")
            if number < least:
                raise ValueError(f"{name} must be >= {least}, got {number!r}")
        self._first_version = self._version = version
        self._streams = stream_every is not None
        self._stream_every = stream_every
        self._stop_token_ids = frozenset(stop_token_ids)
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._control_timeout = control_timeout
        self._update_timeout = update_timeout
        self._max_connections = max_connections
        self._slots: anyio.Semaphore | None = None
        self._capabilities: Capabilities | None = None
        self._clients: AsyncExitStack | None = None
        self._leaving = False
        self._open: dict[str, Open] = {}
        self._idle = anyio.Event()
        self._resumed = anyio.Event()
        self._paused: PauseMode | None = None
        self._released: set[ReleaseTag] = set()
        self._verified = True  # that the server has the weights that it is believed to have
        self._verifying: anyio.Lock | None = None
        self._to_abort: set[str] = set()
        self._aborting: anyio.Lock | None = None
        self.tokens_committed: int = 0
        self.tokens_late: int = 0

    def __repr__(self) -> str:
        state = "closed" if self._clients is None else "paused" if self._paused else "running"
        if self._released:
            state = f"released: {', '.join(sorted(self._released))}"
        return (
            f"<{type(self).__name__} {self._generation.base_url} v{self._version}: {len(self._open)} open, "
            f"{self.tokens_committed} tokens committed, {self.tokens_late} late, {state}>"
        )

    # InferenceController

    @property
    def capabilities(self) -> Capabilities:
        """What it can do.

        Raises:
            InferenceError: It was not entered yet.
        """
        if self._capabilities is None:
            raise InferenceError("the controller was not entered yet", maybe_executed=False)
        return self._capabilities

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the attempts in flight, oldest first."""
        return tuple(self._open)

    async def __aenter__(self) -> Any:
        """Asks the server what it can do.

        Raises:
            InferenceError: It can't be reached, or lacks something; the message says which option it needs.
        """
        if self._clients is not None:
            raise RuntimeError("the controller is open already")
        self._leaving, self._paused = False, None
        self._released.clear()
        self._generation.silence.resume()
        self._verified = True
        self._verifying, self._aborting = anyio.Lock(fast_acquire=True), anyio.Lock()
        self._slots = None
        if self._max_connections is not None:
            self._slots = anyio.Semaphore(self._max_connections, fast_acquire=True)
        async with AsyncExitStack() as clients:
            await clients.enter_async_context(self._generation)
            await clients.enter_async_context(self._controls)
            self._capabilities = await self._probe()
            reported = await self._reported()
            self._version = self._first_version if reported is None else reported
            self._clients = clients.pop_all()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends attempts in flight and closes every connection. A pause is ended, and memory taken back, if possible."""
        clients, self._clients = self._clients, None
        self._leaving = True
        try:
            with anyio.move_on_after(_LEAVE, shield=True):
                ids = {i for i, request in self._open.items() if not request.scope.cancel_called}
                for request in list(self._open.values()):
                    request.scope.cancel()
                    request.waiting.cancel()
                try:
                    if ids:
                        await self._tell(ids)
                    if self._released:
                        await self._reload(set(self._released), set())
                    if self._paused is not None:
                        await self._resume()
                except InferenceError:
                    pass  # it is gone, and so is what was to be put in order
                while self._open:
                    await self._idle.wait()
        finally:
            if clients is not None:
                await clients.aclose()

    async def generate(self, attempt: Attempt) -> None:
        """Has the server continue the attempt's prompt.

        Cancellation: the connection is closed and the server is told to abort, for a second at most.

        Raises:
            InferenceError: The server failed, or its answer can't be used. If it is `retryable` the server was told
                to abort.
            UnsupportedSampling: The server would not honour a value, or change it silently.
        """
        request = self._admit(attempt)
        try:
            with request.scope:
                await self._run(request)
        except HttpError as error:
            await self._failed(request, error)
            raise
        except anyio.get_cancelled_exc_class():
            if not self._leaving:
                with anyio.move_on_after(_TELL, shield=True):
                    await self._tell_if_possible(attempt.id)
            raise
        finally:
            for ids, _ in request.held:
                self.tokens_late += len(ids)
            del self._open[attempt.id]
            if not self._open:
                self._idle.set()
        if request.scope.cancelled_caught:
            raise InferenceError("the controller was left")

    async def abort(self, ids: Collection[str] | None) -> None:
        """Asks the server to end attempts; those that wait for a connection end here.

        Only ids of attempts in flight are sent, also for `None`: others may use the server, too.

        Raises:
            InferenceError: The server could not be asked.
        """
        self._check_entered()
        wanted = list(self._open) if ids is None else [i for i in ids if i in self._open]
        for i in wanted:
            request = self._open[i]
            request.stopped = True
            request.waiting.cancel()
            if self.closes:
                request.sent.cancel()
        if wanted and not self.closes:
            await self._tell(set(wanted))
        else:
            await anyio.lowlevel.checkpoint()

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Returns once the server has said that no forward pass can run.

        Raises:
            InferenceError: It could not be asked, or refused.
        """
        self._check_entered()
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._generation.silence.suspend()
        if self._paused is None:
            self._resumed = anyio.Event()
        try:
            await self._pause(mode)
        except BaseException:
            # Whether it is paused is not known: the engine resumes it.
            self._paused = self._paused or mode
            raise
        self._paused = mode

    async def resume(self) -> None:
        """Lets the server go on. Idempotent.

        Raises:
            InferenceError: It could not be asked, or something is released: `reload` comes first.
        """
        self._check_entered()
        self._check_not_released("resume")
        await self._resume()
        self._paused = None
        self._resumed.set()
        self._generation.silence.resume()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Has the server load weights, labels them, and drops what it has cached of older ones.

        Args:
            source: A directory that *the server* can read, or an async callable that moves the weights itself.
            version: What they are called from now on; the server's own label becomes this number.

        Cancellation: nobody knows then what the server holds.

        Raises:
            WeightUpdateFailed: Says which weights it holds now.
        """
        self._check_entered()
        refused = None
        if self._paused is None:
            refused = "weights are only updated while paused"
        elif "weights" in self._released:
            refused = "the weights are released; they are reloaded before an update"
        elif version < self._version:
            refused = f"version must be >= the present {self._version}, got {version!r}"
        elif not callable(source) and isinstance(source, Mapping):
            refused = (
                f"{self.server} takes weights from a directory that it can read, or from a callable that moves them; "
                f"got a {type(source).__name__}"
            )
        if refused is not None:
            raise WeightUpdateFailed(refused, weights=WeightsState.OLD)
        assert not isinstance(source, Mapping)
        if callable(source):
            await self._moved(source)
        else:
            await self._loaded(fspath(source), version)
        try:
            await self._label(version)
        except InferenceError as error:
            raise WeightUpdateFailed(
                f"the new weights are in place, but {self.server} did not take version {version} for them: {error}",
                weights=WeightsState.UNKNOWN,
            ) from error
        self._version = version
        self._verified = True

    async def version(self) -> int | None:
        """Returns the version that the server reports; `None` if it keeps none.

        Raises:
            InferenceError: It could not be asked, or calls its weights something else than a number.
        """
        self._check_entered()
        return await self._reported()

    async def health(self) -> Health:
        """Asks the server whether it works, and how much it has to do.

        Raises:
            InferenceError: It does not work, or can't be reached.
        """
        self._check_entered()
        return await self._health()

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Has the server give memory back. Idempotent.

        Raises:
            InferenceError: It is not paused, something is in flight, it has no such memory, or it could not be asked.
        """
        self._check_entered()
        if self._paused is None:
            raise InferenceError("memory is only released while paused", maybe_executed=False)
        if self._open:
            raise InferenceError(
                f"memory is only released with nothing in flight; {len(self._open)} attempts are",
                maybe_executed=False,
            )
        if missing := set(tags) - self.capabilities.release_tags:
            raise InferenceError(
                f"this {self.server} can't release {', '.join(sorted(missing))}",
                maybe_executed=False,
            )
        new = set(tags) - self._released
        if new:
            await self._release(new)
            self._released |= new

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Has the server take memory again. Tags that are not released are ignored.

        Raises:
            InferenceError: It could not be asked.
        """
        self._check_entered()
        wanted = set(tags) & self._released
        if wanted:
            await self._reload(wanted, self._released - wanted)
            self._released -= wanted

    # What the subclasses say

    @abstractmethod
    async def _probe(self) -> Capabilities:
        """Finds out what the server can do; raises if it lacks what is needed."""

    @abstractmethod
    def _check_sampling(self, attempt: Attempt) -> None:
        """Raises `UnsupportedSampling` for values that the server would change silently."""

    @abstractmethod
    def _request(self, request: Open) -> tuple[str, Any, Mapping[str, str]]:
        """Path, body and headers of the request."""

    @abstractmethod
    def _answer(self, body: bytes) -> Answer:
        """Reads a whole answer; may run in a thread."""

    @abstractmethod
    def _part(self, data: bytes) -> Answer:
        """Reads one event of a stream."""

    @abstractmethod
    async def _abort(self, ids: set[str]) -> None:
        """Has the server abort attempts."""

    @abstractmethod
    async def _pause(self, mode: PauseMode) -> None:
        """Has the server pause."""

    @abstractmethod
    async def _resume(self) -> None:
        """Has the server go on."""

    @abstractmethod
    async def _load(self, path: str, version: int) -> None:
        """Has the server load weights."""

    @abstractmethod
    async def _label(self, version: int) -> None:
        """Has the server call its weights so, and forget what it has cached of others."""

    @abstractmethod
    async def _reported(self) -> int | None:
        """What the server calls its weights."""

    @abstractmethod
    async def _health(self) -> Health:
        """See `health`."""

    @abstractmethod
    async def _release(self, tags: set[ReleaseTag]) -> None:
        """Has the server give memory back."""

    @abstractmethod
    async def _reload(self, tags: set[ReleaseTag], rest: set[ReleaseTag]) -> None:
        """Has the server take memory; `rest` stays released."""

    # What they use

    async def _call(
        self,
        path: str,
        body: Any = None,
        *,
        method: str = "POST",
        params: Mapping[str, str] | None = None,
        within: float | None = None,
    ) -> bytes:
        """Sends a control call; once more if the connection broke, since all of them may be sent twice."""
        limit = self._control_timeout if within is None else within
        for again in (False, True):
            with anyio.move_on_after(limit):
                try:
                    if method == "GET":
                        return await self._controls.get(path, params=params)
                    return await self._controls.post(path, body, params=params)
                except HttpError as error:
                    if again or error.status is not None or not error.retryable:
                        raise
                    continue
            break
        raise HttpError(f"{self.server} did not answer {path} within {limit} s", retryable=True)

    def _context(self, served: int, option: str) -> int:
        """The context to use, which is at most the server's."""
        if self._max_context is not None and self._max_context > served:
            raise InferenceError(
                f"max_context is {self._max_context}, the server's {option} {served}"
            )
        return self._max_context or served

    def _version_of(self, label: str) -> int:
        """The version behind a server's label."""
        if label == "default":  # how servers call the weights that they were started with
            return self._first_version
        if label.isascii() and label.isdigit():
            return int(label)
        raise InferenceError(
            f"{self.server} calls its weights {self._controls.plain(label)!r}, which is no version of rollnest"
        )

    # Requests

    def _admit(self, attempt: Attempt) -> Open:
        self._check_entered()
        self._check_not_released("generate")
        if attempt.id in self._open:
            raise InferenceError(f"attempt {attempt.id} is in flight already", maybe_executed=False)
        prompt, known = len(attempt.prompt_ids), self.capabilities
        if not prompt:
            raise InferenceError("the prompt is empty", maybe_executed=False)
        if prompt + attempt.max_tokens > known.max_context:
            raise InferenceError(
                f"{prompt} prompt tokens and max_tokens {attempt.max_tokens} do not fit into the context of "
                f"{known.max_context}",
                maybe_executed=False,
            )
        self._check_sampling(attempt)
        self._open[attempt.id] = request = Open(attempt)
        self._idle = anyio.Event() if self._idle.is_set() else self._idle
        return request

    async def _run(self, request: Open) -> None:
        if not self._verified:
            await self._verify()
        got = False
        with request.waiting:
            if self._slots is not None:
                await self._slots.acquire()
                got = True
            while self.gated and self._paused is not None:
                await self._resumed.wait()
        try:
            if not request.stopped:
                with request.sent:
                    await self._exchange(request)
            if request.attempt.finish_reason is None:
                # Nobody has to be asked: it was not sent, or its connection is closed, and what came was taken.
                self._take(request, Answer(finish="abort"))
        finally:
            if got and self._slots is not None:
                self._slots.release()

    async def _exchange(self, request: Open) -> None:
        path, body, headers = self._request(request)
        if self._streams:
            async with self._generation.stream(path, body, headers=headers) as events:
                await self._follow(request, events)
            return
        content = await self._generation.post(path, body, headers=headers)
        if len(content) > _IN_A_THREAD:
            answer = await anyio.to_thread.run_sync(self._answer, content)
        else:
            answer = self._answer(content)
        self._take(request, answer)
        self._end(request, unusable("it has no finish reason"))

    async def _follow(self, request: Open, events: AsyncIterator[bytes]) -> None:
        ended = False
        async for data in events:
            if data == b"[DONE]":
                break
            part = self._part(data)
            self._take(request, part)
            ended = part.finish is not None
            if request.attempt.finish_reason is not None:
                break
        self._end(
            request, HttpError(f"{self.server} ended its stream without a reason", retryable=True)
        )
        if ended:
            with anyio.move_on_after(_TELL):  # so that the connection can be used again
                async for _ in events:
                    pass

    def _take(self, request: Open, answer: Answer) -> None:
        """Checks what the server said, and gives it to the attempt; synchronous."""
        attempt = request.attempt
        reason = None if answer.finish is None else self._reason(answer.finish)
        ids, logprobs = answer.ids, answer.logprobs
        if self._streams and self.cumulative:
            ids, logprobs = ids[request.taken :], logprobs[request.taken :]
        if answer.total is not None and not (self._streams and self.cumulative):
            # A server is known to say its last token again when it aborts.
            surplus = request.taken + len(ids) - answer.total
            if surplus > 0:
                ids, logprobs = ids[surplus:], logprobs[surplus:]
            elif surplus < 0 and reason is not FinishReason.ABORT:
                raise unusable(f"it made {answer.total} tokens and sent {answer.total + surplus}")
        if len(ids) != len(logprobs):
            if reason is not FinishReason.ABORT or len(logprobs) > len(ids):
                raise unusable(f"{len(ids)} tokens have {len(logprobs)} logprobs")
            ids = ids[: len(logprobs)]  # servers are known to drop the last ones when they abort
        if answer.prompt_tokens is not None and answer.prompt_tokens != len(attempt.prompt_ids):
            raise unusable(
                f"it continued a prompt of {answer.prompt_tokens} tokens, {len(attempt.prompt_ids)} were sent"
            )
        request.taken += len(ids)
        if answer.spans is not None:
            self._commit_by_spans(request, ids, logprobs, answer.spans)
        elif self._streams and self.capabilities.version_spans and self._version != attempt.version:
            # The weights have changed since it was sent; which of them made these the end will say.
            request.held.append((ids, logprobs))
        else:
            self._commit(request, ids, logprobs, None)
            request.assumed = request.taken
        if reason is not None:
            if request.held:
                raise unusable("the weights changed meanwhile, and it does not say which made what")
            attempt.finish(reason, answer.detail)

    def _end(self, request: Open, error: InferenceError) -> None:
        """Takes an end without a reason for an abort, if that was asked for, as servers are known to do."""
        attempt = request.attempt
        if attempt.finish_reason is None and not attempt.closed:
            if not request.stopped:
                raise error
            self._take(request, Answer(finish="abort"))

    def _commit_by_spans(
        self,
        request: Open,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[Span],
    ) -> None:
        """Commits what has a version now: these tokens, and those before that were held back for it."""
        if request.held:
            parts = [*request.held, (ids, logprobs)]
            request.held.clear()
            ids = [i for part, _ in parts for i in part]
            logprobs = [logprob for _, part in parts for logprob in part]
        versions: list[int] = []
        for span in spans:
            if span.start != len(versions) or span.stop < span.start:
                raise unusable(f"its version spans have a gap before token {span.start}")
            versions += [self._version_of(span.label)] * (span.stop - span.start)
        if len(versions) < request.taken:
            raise unusable(f"{request.taken} tokens have {len(versions)} versions")
        versions = versions[: request.taken]
        before, policy = request.taken - len(ids), request.attempt.version
        oldest = min(versions, default=policy)
        if oldest < policy:
            self._verified = False
            raise self._outdated(oldest, policy, retryable=not before)
        if any(version != policy for version in versions[: request.assumed]):
            raise unusable("tokens are of other weights than it had when they came")
        one = set(versions[before:])
        self._commit(
            request,
            ids,
            logprobs,
            one.pop() if len(one) == 1 else versions[before:],
        )

    def _commit(
        self,
        request: Open,
        ids: Sequence[int],
        logprobs: Sequence[float],
        versions: int | Sequence[int] | None,
    ) -> None:
        if not ids:
            return
        recorded = request.attempt.commit(ids, logprobs, versions)
        self.tokens_committed += recorded
        self.tokens_late += len(ids) - recorded

    def _reason(self, said: str) -> FinishReason:
        reason = self.finish_reasons.get(said)
        if reason is None:
            raise unusable(f"unknown finish reason {self._controls.plain(said)!r}")
        return reason

    # Failures

    async def _failed(self, request: Open, error: HttpError) -> None:
        """Sees to it that the server is done with a request, before anybody sends it again."""
        if not error.retryable:
            return
        if error.status is None:
            self._verified = False
            if error.maybe_executed and not self._leaving:
                with anyio.move_on_after(_TELL):
                    await self._tell_if_possible(request.attempt.id)
        if error.retry_after:
            with anyio.CancelScope() as request.waiting:
                await anyio.sleep(min(error.retry_after, _MOST_PATIENCE))

    async def _verify(self) -> None:
        """Asks which weights the server has, after a connection to it broke."""
        assert self._verifying is not None
        async with self._verifying:
            if self._verified:
                return
            reported = await self._reported()
            if reported is not None and reported != self._version:
                raise self._outdated(reported, self._version, retryable=True)
            self._verified = True

    def _outdated(self, held: int, wanted: int, *, retryable: bool) -> HttpError:
        return HttpError(
            f"{self.server} holds weights of version {held}, the policy is at {wanted}: it was restarted, or does not "
            "have the latest ones",
            retryable=retryable,
            status=200,
        )

    async def _tell(self, ids: set[str]) -> None:
        """Has the server abort; ids of many callers at once go in one call."""
        assert self._aborting is not None
        self._to_abort |= ids
        async with self._aborting:
            if self._to_abort & ids:
                now, self._to_abort = self._to_abort, set()
                await self._abort(now)

    async def _tell_if_possible(self, id_: str) -> None:
        try:
            await self._tell({id_})
        except InferenceError:
            pass  # the connection is closed as well, or the server is down

    # Weights

    async def _moved(self, source: Callable[[], Any]) -> None:
        try:
            await source()
        except WeightUpdateFailed:
            raise
        except Exception as error:
            raise WeightUpdateFailed(
                f"the callable that moves the weights raised {error!r}",
                weights=WeightsState.UNKNOWN,
            ) from error

    async def _loaded(self, path: str, version: int) -> None:
        try:
            await self._load(path, version)
        except HttpError as error:
            untouched = not error.maybe_executed
            raise WeightUpdateFailed(
                f"{self.server} did not load {path!r}: {error}",
                weights=WeightsState.OLD if untouched else WeightsState.UNKNOWN,
            ) from error

    # State

    def _check_entered(self) -> None:
        if self._clients is None:
            raise InferenceError("the controller is not open", maybe_executed=False)

    def _check_not_released(self, call: str) -> None:
        if self._released:
            raise InferenceError(
                f"{call}() while {', '.join(sorted(self._released))} released", maybe_executed=False
            )


def unusable(why: str) -> InferenceError:
    """The error for an answer that breaks a rule."""
    return InferenceError(f"the server's answer is unusable: {why}")


def decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    """Decodes JSON into a record; what is missing, null or of the wrong type is named."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unusable(str(error)) from None
