"""A policy behind an actor's handle.

Invariants:

- Every attempt is in `_open` from before its request is sent until its `generate` ends.
- The actor gets no more requests at once than it runs; the others wait here, where an abort ends them.
- A request that ends without its answer is cancelled in the actor, and waited for.
- After the actor was restarted or could not be reached, its version is asked for before any further request is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import fspath
from types import TracebackType
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint
from attrs import fields, frozen
from ray.actor import ActorHandle

from rollnest.abc import Attempt, Capabilities, Health, PauseMode, ReleaseTag, WeightSource
from rollnest.errors import InferenceError, WeightsState, WeightUpdateFailed
from rollnest_adapters._checks import check_positive, check_whole

from ._bridge import RAY, Arrival, call, check_initialized, send
from ._failures import RayCallFailed, inference_error, what_failed
from ._host import TAKEN_OVER
from ._wire import GenerateReply, GenerateRequest, PolicyDescription

__all__ = ["RayController", "RayMethods"]

T = TypeVar("T")

_TELL = 1.0  # seconds for telling an actor that nobody waits any more
_UNKNOWN_LIMIT = 960  # of the thousand calls that Ray runs at once; the rest is for control calls


@frozen(kw_only=True)
class RayMethods:
    """What the methods of an actor are called. `generate`, `abort`, `pause` and `resume` are needed.

    Of the others an actor may lack those that keep their names here: the controller then doesn't offer what they are
    for. What each gets and returns is said in `docs/topics/ray.md`.

    Attributes:
        generate: Gets a `GenerateRequest`, returns a `GenerateReply`.
        abort: Gets a list of ids; their calls of `generate` return what they have.
        pause: Gets nothing for `ABORT`, `"keep"` for `KEEP`; returns once no forward pass can run.
        resume: Lets forward passes run again; idempotent.
        update_weights: Gets a mapping, a path, or `None` for weights that have been moved already; and a version.
        version: Returns the version of its weights, or `None`.
        health: Returns a `Health`. Without it, it is asked whether it runs.
        release: Gets tags of memory to give back.
        reload: Gets tags of memory to take again.
        serve: Gets a name; holds the policy until it is cancelled.
        describe: Gets that name; returns a `PolicyDescription`.
    """

    generate: str = "generate"
    abort: str = "abort"
    pause: str = "pause_generation"
    resume: str = "continue_generation"
    update_weights: str = "update_weights"
    version: str = "version"
    health: str = "health"
    release: str = "release"
    reload: str = "reload"
    serve: str = "serve"
    describe: str = "describe"

    def found_at(self, handle: Any) -> dict[str, Any]:
        """Returns the methods that an actor has, by what they are for.

        Raises:
            TypeError: It lacks one that is needed, or one that was named.
        """
        found: dict[str, Any] = {}
        for attribute in fields(type(self)):
            name = getattr(self, attribute.name)
            method = getattr(handle, name, None)
            if method is not None:
                found[attribute.name] = method
            elif attribute.name in _NEEDED or name != attribute.default:
                raise TypeError(f"{handle!r} has no method {name!r}, which is to {attribute.name}")
        return found


_NEEDED = ("generate", "abort", "pause", "resume")


class RayController:
    """Has a policy in an actor answer: one of `policy_actor`, or one of your own.

        async with Engine(RayController(policy_actor(make_controller)), task, batch_size=64) as engine: ...

    An answer comes as a whole; what an actor has made when it dies is lost. An abort brings the partial. The actor is
    neither made nor killed here. If Ray restarts it, it is served again, once it has the latest weights.

    Args:
        handle: The actor's handle.
        methods: What its methods are called.
        capabilities: What the policy can do; needed for actors that don't `describe` it.
        max_in_flight: Most requests that the actor gets at once. `None` is what it says of itself; of an actor that
            doesn't say, 960: Ray runs a thousand calls of an async actor at once, and keeps control calls waiting like
            any others if they have no concurrency group of their own.
        version: Version of the weights that it starts with, if it doesn't say.
        start_timeout: Seconds until the actor has to have begun, which includes Ray's finding a place for it; `None` is
            no limit.
        grace: Seconds that a request may take to end in the actor when it is cancelled.

    Attributes:
        tokens_committed: Tokens that attempts recorded.
        tokens_late: Tokens that came for attempts that had been given up, or were beyond their cap.

    Raises:
        TypeError: The actor lacks a method, or nobody says what the policy can do.
    """

    def __init__(
        self,
        handle: Any,
        *,
        methods: RayMethods | None = None,
        capabilities: Capabilities | None = None,
        max_in_flight: int | None = None,
        version: int = 0,
        start_timeout: float | None = 300.0,
        grace: float = 3.0,
    ) -> None:
        if not isinstance(handle, ActorHandle):
            raise TypeError(f"handle must be an actor's handle, got {handle!r}")
        if max_in_flight is not None:
            check_whole("max_in_flight", max_in_flight, 1)
        check_whole("version", version, 0)
        if start_timeout is not None:
            check_positive("start_timeout", start_timeout)
        check_positive("grace", grace)
        self._methods = (methods or RayMethods()).found_at(handle)
        self._is_served = "serve" in self._methods and "describe" in self._methods
        if capabilities is None and not self._is_served:
            raise TypeError(
                f"capabilities are needed: {handle!r} has no methods that serve and describe its policy"
            )
        self._handle: Any = handle
        self._given = capabilities
        self._first_version = self._version = version
        self._given_limit = max_in_flight
        self._start_timeout = start_timeout
        self._grace = grace
        self._known: Capabilities | None = None
        self._slots = anyio.Semaphore(1)
        self._stay: Arrival[Any] | None = None
        self._name = ""
        self._entered = self._leaving = False
        self._verified = True
        self._verifying = anyio.Lock()
        self._open: dict[str, _Open] = {}
        self._idle = anyio.Event()
        self._paused = False
        self._released: set[ReleaseTag] = set()
        self.tokens_committed: int = 0
        self.tokens_late: int = 0

    def __repr__(self) -> str:
        state = "closed" if not self._entered else "paused" if self._paused else "running"
        return (
            f"<RayController of {self._handle!r} v{self._version}: {len(self._open)} open, "
            f"{self.tokens_committed} tokens committed, {self.tokens_late} late, {state}>"
        )

    # InferenceController

    @property
    def capabilities(self) -> Capabilities:
        """What the policy can do.

        Raises:
            InferenceError: It was not entered yet.
        """
        if self._known is None:
            raise InferenceError("the controller was not entered yet", maybe_executed=False)
        return self._known

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the attempts in flight, oldest first."""
        return tuple(self._open)

    async def __aenter__(self) -> RayController:
        """Has the actor serve the policy.

        Raises:
            RuntimeError: Ray is not initialized, or the controller is open already.
            InferenceError: The actor is dead, or did not begin within `start_timeout` seconds.
        """
        check_initialized()
        if self._entered:
            raise RuntimeError("the controller is open already")
        self._leaving, self._paused, self._verified = False, False, True
        self._released.clear()
        self._verifying, self._idle = anyio.Lock(), anyio.Event()
        try:
            with anyio.fail_after(self._start_timeout):
                known, reported, limit = await self._begin()
        except TimeoutError:
            raise InferenceError(
                f"{self._handle!r} did not begin within {self._start_timeout} s: Ray has found no place for it, or it "
                "loads a model",
                retryable=True,
            ) from None
        self._known = known
        self._version = self._first_version if reported is None else reported
        self._slots = anyio.Semaphore(limit, fast_acquire=True)
        self._entered = True
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None:
        """Ends attempts in flight and lets go of the policy. A pause is ended, and memory taken back, if possible."""
        self._entered, self._leaving = False, True
        stay, self._stay = self._stay, None
        try:
            with anyio.move_on_after(self._grace, shield=True):
                for request in list(self._open.values()):
                    request.scope.cancel()
                while self._open:
                    await self._idle.wait()
                if stay is None:
                    await self._put_in_order()
        finally:
            if stay is not None:
                await stay.end(self._grace)

    async def generate(self, attempt: Attempt) -> None:
        """Has the actor continue the attempt's prompt.

        Cancellation: the call is cancelled in the actor, and waited for, for `grace` seconds at most.

        Raises:
            InferenceError: The actor failed, or its answer can't be used. It is `retryable` if the actor died, was
                restarted, or can't be reached.
        """
        request = self._admit(attempt)
        try:
            with request.scope:
                await self._run(request)
        finally:
            del self._open[attempt.id]
            if not self._open:
                self._idle.set()
        if request.scope.cancelled_caught:
            raise InferenceError("the controller was left")

    async def abort(self, ids: Collection[str] | None) -> None:
        """Asks the actor to end attempts; those that wait here end at once.

        Raises:
            InferenceError: The actor could not be asked.
        """
        self._check_entered()
        wanted = [i for i in (self._open if ids is None else ids) if i in self._open]
        for id_ in wanted:
            self._open[id_].stopped = True
            self._open[id_].waiting.cancel()
        sent = [i for i in wanted if self._open[i].sent]
        if sent and self._serves:
            await self._ask("abort", sent)
        else:
            await checkpoint()

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        """Returns once the actor has said that no forward pass can run.

        Raises:
            InferenceError: It could not be asked, or refused.
        """
        self._check_entered()
        await anyio.lowlevel.checkpoint_if_cancelled()
        self._paused = True  # or else nobody knows; it is resumed in any case
        await self._control("pause", *([] if mode is PauseMode.ABORT else [mode.value]))

    async def resume(self) -> None:
        """Lets the actor go on. Idempotent.

        Raises:
            InferenceError: It could not be asked, or something is released: `reload` comes first.
        """
        self._check_entered()
        self._check_not_released("resume")
        await self._control("resume")
        self._paused = False

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Has the actor load weights.

        Args:
            source: A state dict, which travels through Ray's object store; a path that *the actor* can read; or an
                async callable, which is called here and moves the weights itself.
            version: What they are called from now on.

        Cancellation: nobody knows then what the actor holds.

        Raises:
            WeightUpdateFailed: Says which weights it holds now.
        """
        self._check_entered()
        refused = None
        if not self._paused:
            refused = "weights are only updated while paused"
        elif "weights" in self._released:
            refused = "the weights are released; they are reloaded before an update"
        elif "update_weights" not in self._methods and not callable(source):
            refused = "the actor has no method that updates weights; a callable may move them"
        if refused is not None:
            raise WeightUpdateFailed(refused, weights=WeightsState.OLD)
        given: Any
        if callable(source):
            await _move(source)
            given = None
        elif isinstance(source, Mapping):
            # Weights may be large, and packing them takes the time that it takes.
            given = await anyio.to_thread.run_sync(RAY.put, dict(source))
        else:
            given = fspath(source)
        await self._load(given, version)
        self._version = version
        self._verified = True

    async def version(self) -> int | None:
        """Returns the version that the actor reports; `None` if it keeps none.

        Raises:
            InferenceError: It could not be asked.
        """
        self._check_entered()
        if "version" not in self._methods:
            await checkpoint()
            return None
        version: int | None = await self._control("version")
        return version

    async def health(self) -> Health:
        """Asks the actor whether it works, and how much it has to do.

        Raises:
            InferenceError: It does not work, or can't be reached.
        """
        self._check_entered()
        if "health" in self._methods:
            health: Health = await self._control("health")
            return health
        await self._control("__ray_ready__")
        return Health()

    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Has the actor give memory back. Idempotent.

        Raises:
            InferenceError: It is not paused, something is in flight, or the actor could not be asked.
        """
        self._check_entered()
        if not self._paused or self._open:
            raise InferenceError(
                "memory is only released while paused, with nothing in flight", maybe_executed=False
            )
        self._released.update(tags)
        await self._control("release", list(tags))

    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Has the actor take memory again. Tags that are not released are ignored.

        Raises:
            InferenceError: It could not be asked.
        """
        self._check_entered()
        if wanted := set(tags) & self._released:
            await self._control("reload", sorted(wanted))
            self._released -= wanted
        else:
            await checkpoint()

    # The actor

    async def _begin(self) -> tuple[Capabilities, int | None, int]:
        """Has the actor serve the policy; returns what it can do, its version, and how much the actor runs at once."""
        if not self._is_served:
            assert self._given is not None
            await self._ask("__ray_ready__")
            return self._given, await self._reported(), self._given_limit or _UNKNOWN_LIMIT
        name = uuid4().hex
        stay = send(self._methods["serve"], name)
        try:
            try:
                said: PolicyDescription = await self._ask("describe", name)
            except InferenceError:
                with anyio.move_on_after(_TELL):
                    await stay.wait()
                    raise self._why_over(stay) from None
                raise
        except BaseException:
            await stay.end(self._grace)
            raise
        self._stay, self._name = stay, name
        known = self._given or said.capabilities
        return known, said.version, min(self._given_limit or said.max_in_flight, said.max_in_flight)

    async def _begin_again(self) -> int | None:
        """Has an actor serve that has lost the policy; returns the version that it has now."""
        self._verified = False
        try:
            _, reported, _ = await self._begin()
            self._released.clear()
            if self._paused:
                await self._ask("pause")
        except InferenceError:
            raise
        except Exception as error:
            raise InferenceError(
                f"{self._handle!r} can't serve the policy again: {error!r}", retryable=True
            ) from error
        return reported

    def _why_over(self, stay: Arrival[Any]) -> BaseException:
        error = stay.error
        if error is None:
            return InferenceError(f"{self._handle!r}: {TAKEN_OVER}")
        failed = what_failed(error)
        if isinstance(failed, RayCallFailed):
            return inference_error(failed, what=f"{self._handle!r}")
        return failed

    async def _verify(self) -> None:
        """Sees to it that the actor serves, and has the weights that it is believed to have."""
        async with self._verifying:
            if self._serves and self._verified:
                return
            reported = await (self._reported() if self._serves else self._begin_again())
            self._verified = reported is None or reported == self._version
            if not self._verified:
                raise self._outdated(reported, maybe_executed=False)

    def _outdated(self, held: int | None, *, maybe_executed: bool) -> InferenceError:
        return InferenceError(
            f"{self._handle!r} holds weights of version {held}, the policy is at {self._version}: it was restarted, or "
            "does not have the latest ones",
            retryable=True,
            maybe_executed=maybe_executed,
        )

    @property
    def _serves(self) -> bool:
        stay = self._stay
        if stay is None:
            return not self._is_served
        if not stay.is_there:
            return True
        if stay.error is None:
            raise self._why_over(stay)
        return False

    async def _reported(self) -> int | None:
        if "version" not in self._methods:
            return None
        version: int | None = await self._ask("version")
        return version

    async def _control(self, what: str, *args: Any) -> Any:
        """A control call; first an actor that was restarted is made to serve."""
        if not self._serves:
            async with self._verifying:
                if not self._serves:
                    await self._begin_again()
        return await self._ask(what, *args)

    async def _ask(self, what: str, *args: Any) -> Any:
        method = self._methods[what] if what in self._methods else getattr(self._handle, what)
        try:
            return await call(method, *args, grace=_TELL)
        except RayCallFailed as error:
            self._verified = False
            raise inference_error(error, what=f"{what} of {self._handle!r}") from error

    async def _put_in_order(self) -> None:
        try:
            if self._released:
                await self._ask("reload", sorted(self._released))
                self._released.clear()
            if self._paused:
                await self._ask("resume")
        except InferenceError:
            pass  # it is gone, and so is what was to be put in order

    async def _load(self, given: Any, version: int) -> None:
        if "update_weights" not in self._methods:
            return  # the callable has moved them
        try:
            await self._control("update_weights", given, version)
        except InferenceError as error:
            state = WeightsState.UNKNOWN if error.maybe_executed else WeightsState.OLD
            if given is None:
                state = WeightsState.UNKNOWN
            raise WeightUpdateFailed(
                f"{self._handle!r} did not load version {version}: {error}", weights=state
            ) from error

    # Requests

    def _admit(self, attempt: Attempt) -> _Open:
        self._check_entered()
        self._check_not_released("generate")
        if attempt.id in self._open:
            raise InferenceError(f"attempt {attempt.id} is in flight already", maybe_executed=False)
        self._open[attempt.id] = request = _Open(attempt)
        self._idle = anyio.Event() if self._idle.is_set() else self._idle
        return request

    async def _run(self, request: _Open) -> None:
        attempt, slots, got = request.attempt, self._slots, False
        with request.waiting:
            if not (self._serves and self._verified):
                await self._verify()
            await slots.acquire()
            got = True
        try:
            if request.stopped:
                attempt.finish("abort")
                return
            self._take(attempt, await self._exchange(request))
        finally:
            if got:
                slots.release()

    async def _exchange(self, request: _Open) -> Any:
        attempt = request.attempt
        request.sent = True
        try:
            sent = GenerateRequest.of(attempt, serve=self._name)
            return await call(self._methods["generate"], sent, grace=self._grace)
        except RayCallFailed as error:
            self._verified = False
            failed = inference_error(error, what=f"generate of {self._handle!r}")
            if failed.maybe_executed and not error.actor_gone and not self._leaving:
                # It may be at it still; who sends it again must not be answered twice.
                with anyio.move_on_after(_TELL):
                    await self._tell(attempt.id)
            raise failed from error

    async def _tell(self, id_: str) -> None:
        try:
            await self._ask("abort", [id_])
        except InferenceError:
            pass  # it is gone, or nobody serves there any more

    def _take(self, attempt: Attempt, reply: Any) -> None:
        if not isinstance(reply, GenerateReply):
            raise InferenceError(
                f"the actor's answer is unusable: it must be a GenerateReply, got {reply!r:.200}"
            )
        versions = reply.versions
        oldest = versions if isinstance(versions, int) else min(versions or (), default=None)
        if oldest is not None and oldest < attempt.version:
            self._verified = False
            raise self._outdated(oldest, maybe_executed=True)
        if len(reply.ids) or len(reply.logprobs):
            recorded = attempt.commit(reply.ids, reply.logprobs, versions)
            self.tokens_committed += recorded
            self.tokens_late += len(reply.ids) - recorded
        attempt.finish(reply.finish_reason, reply.detail)

    # State

    def _check_entered(self) -> None:
        if not self._entered:
            raise InferenceError("the controller is not open", maybe_executed=False)

    def _check_not_released(self, what: str) -> None:
        if self._released:
            raise InferenceError(
                f"{what}() while {', '.join(sorted(self._released))} released", maybe_executed=False
            )


class _Open:
    """An attempt in flight.

    Attributes:
        attempt: The attempt.
        scope: Cancelled when the controller is left.
        waiting: Cancelled when it is aborted before it is sent.
        stopped: Whether it was aborted.
        sent: Whether the actor has it.
    """

    __slots__ = ("attempt", "scope", "sent", "stopped", "waiting")

    def __init__(self, attempt: Attempt) -> None:
        self.attempt: Attempt = attempt
        self.scope: anyio.CancelScope = anyio.CancelScope()
        self.waiting: anyio.CancelScope = anyio.CancelScope()
        self.stopped = False
        self.sent = False


async def _move(source: Callable[[], Any]) -> None:
    try:
        await source()
    except WeightUpdateFailed:
        raise
    except Exception as error:
        raise WeightUpdateFailed(
            f"the callable that moves the weights raised {error!r}", weights=WeightsState.UNKNOWN
        ) from error
