"""The actor's side: a controller that lives in an actor, and the methods by which it is used from elsewhere.

Invariants:

- The controller lives on one event loop, that of the generating calls, and in one call, `serve`: it is entered when
  that begins and left when it ends, by the caller's wish or by a cancellation.
- Control calls have a concurrency group of their own, so that no number of generating calls can keep them waiting. Ray
  gives each group a thread and an event loop; what a control call asks for is done on the controller's.
- An abort that overtakes its request is kept for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio

from rollnest.abc import Attempt, Health, InferenceController, PauseMode, ReleaseTag, WeightSource
from rollnest.errors import InferenceError
from rollnest_adapters._checks import check_whole

from ._bridge import RAY, check_initialized
from ._in_group import in_group
from ._options import RayOptions
from ._packing import naming_culprit
from ._wire import GenerateReply, GenerateRequest, PolicyDescription

__all__ = ["CONTROL", "GENERATE", "TAKEN_OVER", "PolicyHost", "policy_actor"]

T = TypeVar("T")

TAKEN_OVER = "another controller has taken the policy over"

GENERATE = "generate"
CONTROL = "control"
_CONTROL_CALLS = 64
_OTHER_CALLS = 8  # `serve` and `describe` are where the controller is
_STAYS = 100  # names of which one is served; the others are history
_EARLY_ABORTS = 10_000  # ids; those of requests that never come are forgotten in the end
_GRACE = 5.0  # seconds for calls to end that nobody waits for


def policy_actor(
    make: Callable[[], InferenceController],
    *,
    max_in_flight: int = 4096,
    options: RayOptions | None = None,
    host: type[PolicyHost] | None = None,
) -> Any:
    """Makes an actor that holds a controller; returns its handle, which is for `RayController`.

        actor = policy_actor(make_controller, options=RayOptions(num_gpus=1))
        async with Engine(RayController(actor), task) as engine: ...

    The actor lives as Ray's actors do: as long as there is a handle, or longer with `lifetime="detached"`. The
    controller in it is entered and left with each `RayController`.

    Args:
        make: Makes the controller, in the actor; called each time that the policy is served. A function of no
            arguments, which is pickled.
        max_in_flight: Most calls of `generate` that the actor runs at once; more wait at their caller. Ray itself would
            run a thousand.
        options: Where it is to run, and with what. Without `num_cpus` it holds no CPU.
        host: A class of your own over `PolicyHost`, with further methods.

    Raises:
        RuntimeError: Ray is not initialized.
        TypeError: `make` can't be called or pickled.
    """
    check_initialized()
    check_whole("max_in_flight", max_in_flight, 1)
    if not callable(make):
        raise TypeError(f"make must be a function that makes a controller, got {make!r}")
    groups = {CONTROL: _CONTROL_CALLS, GENERATE: max_in_flight + _OTHER_CALLS}
    actor: Any = RAY.remote(concurrency_groups=groups)(host or PolicyHost)
    given = (options or RayOptions()).given(num_cpus=0)
    with naming_culprit("make", make):
        return actor.options(**given).remote(make, max_in_flight)


class PolicyHost:
    """The class of the actors that `policy_actor` makes.

    `generate`, `abort`, `pause_generation` and `continue_generation` are what trainers call such actors' methods; they
    may be called by anybody who has the handle. A subclass adds methods of its own; those of the concurrency group
    `"control"` reach the controller by `at_home`.

    Args:
        make: Makes the controller.
        max_in_flight: Most calls of `generate` at once.
    """

    def __init__(self, make: Callable[[], InferenceController], max_in_flight: int) -> None:
        self._make = make
        self._max_in_flight = max_in_flight
        self._home: asyncio.AbstractEventLoop | None = None
        self._controller: InferenceController | None = None
        self._stay: _Stay | None = None
        self._stays: dict[str, _Stay] = {}
        self._turn = asyncio.Lock()
        self._calls: dict[str, _Call] = {}
        self._idle = asyncio.Event()
        self._early: dict[str, None] = {}

    @property
    def controller(self) -> InferenceController:
        """The controller; only on its own event loop.

        Raises:
            InferenceError: It is not entered.
        """
        if self._controller is None:
            raise InferenceError(
                "the policy is not served: its actor was restarted, or its controller was left",
                retryable=True,
                maybe_executed=False,
            )
        return self._controller

    async def at_home(self, function: Callable[[], Awaitable[T]]) -> T:
        """Runs something on the controller's event loop; for methods of other concurrency groups.

        While nobody serves it runs on the caller's own, where it finds no controller.

        Cancellation: cancels it.
        """
        home, stay = self._home, self._stay
        if home is None or self._controller is None or stay is None:
            return await function()
        if home is asyncio.get_running_loop():
            return await function()
        errand = _Errand(function)
        home.call_soon_threadsafe(stay.send, errand)
        try:
            answer: T = await asyncio.wrap_future(errand.answer)
            return answer
        finally:
            home.call_soon_threadsafe(errand.scope.cancel)

    # Where the controller is

    @in_group(GENERATE)
    async def serve(self, name: str) -> None:
        """Holds the controller open until it is cancelled, or somebody else serves it.

        Args:
            name: New for each call. The newest has the policy; those before it end, and their requests fail.
        """
        self._home = asyncio.get_running_loop()
        stay = self._stay_of(name)
        before, self._stay = self._stay, stay
        if before is not None:
            before.end()
        try:
            async with self._turn:  # those before have left it
                if not stay.over:
                    await self._hold(stay)
        finally:
            stay.settled.set()
            stay.end()

    async def _hold(self, stay: _Stay) -> None:
        controller = self._make()
        async with controller, anyio.create_task_group() as tasks:
            self._controller = controller
            stay.settled.set()
            try:
                async for errand in stay:
                    tasks.start_soon(errand.run)
            finally:
                self._controller = None
                tasks.cancel_scope.cancel()
                await self._end_calls()

    async def _end_calls(self) -> None:
        with anyio.move_on_after(_GRACE, shield=True):
            for call in self._calls.values():
                call.scope.cancel()
            while self._calls:
                self._idle.clear()
                await self._idle.wait()

    @in_group(GENERATE)
    async def describe(self, name: str) -> PolicyDescription:
        """Returns what the controller is, once the `serve` of that name has entered it."""
        await self._stay_of(name).settled.wait()
        controller = self.controller
        return PolicyDescription(
            name=repr(controller),
            capabilities=controller.capabilities,
            version=await controller.version(),
            max_in_flight=self._max_in_flight,
        )

    def _stay_of(self, name: str) -> _Stay:
        stay = self._stays.setdefault(name, _Stay())  # either call may come first
        while len(self._stays) > _STAYS:
            del self._stays[next(iter(self._stays))]
        return stay

    @in_group(GENERATE)
    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Has the controller continue a prompt."""
        controller = self.controller
        if request.serve and self._stays.get(request.serve) is not self._stay:
            raise InferenceError(TAKEN_OVER, maybe_executed=False)
        if request.id in self._calls:
            raise InferenceError(f"attempt {request.id} is in flight already", maybe_executed=False)
        if request.id in self._early:
            del self._early[request.id]
            return GenerateReply(ids=(), logprobs=(), finish_reason="abort")
        self._calls[request.id] = call = _Call(request.attempt())
        try:
            with call.scope:
                await controller.generate(call.attempt)
        finally:
            del self._calls[request.id]
            if not self._calls:
                self._idle.set()
        if call.scope.cancelled_caught:
            raise InferenceError("the policy is not served any more", retryable=True)
        return GenerateReply.of(call.attempt)

    # Control calls

    @in_group(CONTROL)
    async def abort(self, ids: Collection[str] | None = None) -> None:
        """Ends attempts early; `None` is all of them."""
        await self.at_home(lambda: self._abort(ids))

    async def _abort(self, ids: Collection[str] | None) -> None:
        controller = self.controller
        wanted = list(self._calls) if ids is None else ids
        for id_ in wanted:
            if id_ not in self._calls:
                self._early[id_] = None
        while len(self._early) > _EARLY_ABORTS:
            del self._early[next(iter(self._early))]
        await controller.abort([self._calls[i].attempt.id for i in wanted if i in self._calls])

    @in_group(CONTROL)
    async def pause_generation(self, mode: str = "abort") -> None:
        """Returns once no forward pass can run; `mode` is that of a `PauseMode`."""
        await self.at_home(lambda: self.controller.pause(PauseMode(mode)))

    @in_group(CONTROL)
    async def continue_generation(self) -> None:
        """Lets forward passes run again."""
        await self.at_home(lambda: self.controller.resume())

    @in_group(CONTROL)
    async def update_weights(self, source: Mapping[str, Any] | str | None, version: int) -> None:
        """Loads new weights; `None` says that they have been moved already."""
        given: WeightSource = _moved if source is None else source
        await self.at_home(lambda: self.controller.update_weights(given, version))

    @in_group(CONTROL)
    async def version(self) -> int | None:
        """Returns the weight version that the controller reports."""
        return await self.at_home(lambda: self.controller.version())

    @in_group(CONTROL)
    async def health(self) -> Health:
        """Asks the controller whether it works."""
        return await self.at_home(lambda: self.controller.health())

    @in_group(CONTROL)
    async def release(self, tags: Collection[ReleaseTag]) -> None:
        """Gives memory back."""
        await self.at_home(lambda: self.controller.release(tags))

    @in_group(CONTROL)
    async def reload(self, tags: Collection[ReleaseTag]) -> None:
        """Takes memory again."""
        await self.at_home(lambda: self.controller.reload(tags))

    @in_group(CONTROL)
    async def in_flight(self) -> tuple[str, ...]:
        """Returns the ids of the attempts in flight, oldest first."""
        return tuple(self._calls)


class _Stay:
    """One call of `serve`, and what others have done by it: iterating gives errands, until it is over."""

    def __init__(self) -> None:
        self.settled = asyncio.Event()
        self.over = False
        self._errands: deque[_Errand] = deque()
        self._bell = asyncio.Event()

    def send(self, errand: _Errand) -> None:
        """Only on the controller's event loop."""
        if self.over:
            errand.drop()
        else:
            self._errands.append(errand)
            self._bell.set()

    def end(self) -> None:
        """Ends it; errands that have not begun fail."""
        self.over = True
        self._bell.set()
        while self._errands:
            self._errands.popleft().drop()

    async def __aiter__(self) -> AsyncIterator[_Errand]:
        while not self.over:
            await self._bell.wait()
            self._bell.clear()
            while self._errands:
                yield self._errands.popleft()


class _Errand:
    """What a control call has done on the controller's event loop, by a task of `serve`."""

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self.answer: Future[Any] = Future()
        self.scope = anyio.CancelScope()
        self._function = function

    async def run(self) -> None:
        """Does it."""
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            with self.scope:
                self.answer.set_result(await self._function())
        except Exception as error:
            self.answer.set_exception(error)
        finally:
            if not self.answer.done():
                self.drop()

    def drop(self) -> None:
        """Lets whoever waits for it know that it will not be done."""
        if not self.answer.cancelled():
            self.answer.set_exception(
                InferenceError(
                    "the policy is not served any more", retryable=True, maybe_executed=False
                )
            )


class _Call:
    """One call of `generate`."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.scope = anyio.CancelScope()


async def _moved() -> None:
    """Weights that somebody else has moved."""
