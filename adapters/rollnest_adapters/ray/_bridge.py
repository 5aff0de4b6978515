"""Between Ray's futures and a scope: the calls of actors can be awaited and cancelled, on asyncio and on trio.

Invariants:

- No thread waits: Ray's own thread hands over that something arrived, and the event loop looks at it.
- Whoever leaves a call before its end has asked Ray to cancel it, and has waited until it ended, under a deadline.
- What comes after that is dropped, wherever it comes to.

Ray's own `await` works on asyncio only, and cancelling it does not cancel the call.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
import ray
from anyio.lowlevel import checkpoint
from ray.exceptions import ObjectRefStreamEndOfStreamError, RayError

from rollnest_adapters._checks import check_positive
from rollnest_adapters._loop_bridge import loop_caller

from ._failures import RayCallFailed, what_failed

__all__ = ["RAY", "Arrival", "RayStream", "call", "check_initialized", "result", "send", "stream"]

_LOG = logging.getLogger("rollnest.ray")

_FIRST_AGAIN = 0.1  # seconds until a cancellation is asked again; doubled each time
_LONGEST_AGAIN = 2.0

RAY: Any = ray
"""Ray, for what its types don't say."""

T = TypeVar("T")


def check_initialized() -> None:
    """Raises unless this process is connected to Ray; Ray itself would start a cluster unasked.

    Raises:
        RuntimeError: It is not.
    """
    if not ray.is_initialized():
        raise RuntimeError(
            "Ray is not initialized: call ray.init() first, with address= of your cluster if you have one; "
            "rollnest starts none behind your back"
        )


async def call(method: Any, /, *args: Any, grace: float = 5.0) -> Any:
    """Calls an actor's method and returns what it returns.

        verdict = await call(actor.judge, sample)

    Args:
        method: A method of an actor's handle, as it is or with `options(...)`; not `.remote`.
        args: Its arguments; `ObjectRef`s among them arrive as their values.
        grace: Seconds that the call may take to end when the caller is cancelled.

    Raises:
        RayCallFailed: There is no answer; it says whether the call may have run.
        Exception: What the method raised.
        RuntimeError: Ray is not initialized.

    Cancellation: as `result`.
    """
    return await send(method, *args).outcome(grace)


def send(method: Any, /, *args: Any) -> Arrival[Any]:
    """Sends a call that its caller awaits or ends itself.

    Raises:
        RayCallFailed: It can't be sent.
        RuntimeError: Ray is not initialized.
    """
    check_initialized()
    try:
        return Arrival(method.remote(*args))
    except RayError as error:
        raise _unsent(error) from error


async def result(ref: ray.ObjectRef[T], *, grace: float = 5.0) -> T:
    """Waits for an `ObjectRef` and returns its value.

    Args:
        ref: What `.remote()` returned.
        grace: Seconds that the call may take to end when the caller is cancelled.

    Raises:
        RayCallFailed: There is no answer; it says whether the call may have run.
        Exception: What the actor's code raised, with the actor's traceback as its cause.

    Cancellation: the call is cancelled, and waited for until it has ended, for `grace` seconds at most; one that goes
    on is named in the log. In an async actor its task is cancelled; a synchronous method runs to its end.
    """
    check_positive("grace", grace)
    if not isinstance(ref, ray.ObjectRef):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"ref must be an ObjectRef, got {ref!r}")
    return await Arrival(ref).outcome(grace)


@asynccontextmanager
async def stream(generator: Any, *, grace: float = 5.0) -> AsyncGenerator[RayStream]:
    """The values of a streaming method, as they come.

        async with stream(actor.generate.options(num_returns="streaming").remote(prompt)) as values:
            async for value in values:
                ...

    Args:
        generator: The `ObjectRefGenerator` that `.remote()` returned.
        grace: Seconds that the call may take to end when the block is left before its end.

    Yields:
        The values, to be iterated by one task.

    Cancellation: leaving the block, also early or by an exception, cancels the call, as `result` does. Values that were
    received stay.
    """
    check_positive("grace", grace)
    if not hasattr(generator, "completed"):
        raise TypeError(
            "generator must be an ObjectRefGenerator, of a method with num_returns='streaming', "
            f"got {generator!r}"
        )
    arrival = Arrival[Any](generator.completed())
    try:
        yield RayStream(generator)
    finally:
        await arrival.end(grace)


class RayStream:
    """The values of one call, one after the other; made by `stream`."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._end: BaseException | None = None

    def __aiter__(self) -> RayStream:
        return self

    async def __anext__(self) -> Any:
        """Returns the next value.

        Raises:
            RayCallFailed: The call broke off. Asking again raises it again: it is not taken for the end.
            Exception: What the actor's code raised.

        Cancellation: nothing is lost; the next call returns what this one would have.
        """
        if self._end is not None:
            await checkpoint()
            raise self._end
        # Ray has no public way to wait for the next item but on asyncio.
        arrival = Arrival[Any](self._generator._get_next_ref_n(1)[0])
        await arrival.wait()
        error = arrival.error
        if isinstance(error, ObjectRefStreamEndOfStreamError):
            completed = Arrival[Any](self._generator.completed())
            await completed.wait()
            error = completed.error
        else:
            next(self._generator)  # it has arrived, so this takes it and doesn't wait
            if error is None:
                return arrival.value()
        self._end = StopAsyncIteration() if error is None else what_failed(error)
        raise self._end


class Arrival(Generic[T]):
    """The moment at which a ref has a value or an error; it holds the ref until then."""

    def __init__(self, ref: ray.ObjectRef[T]) -> None:
        self._ref = ref
        self._there = anyio.Event()
        call_soon = loop_caller()
        self._future: Future[T] = ref.future()
        # Ray's thread calls this, and must not wait there.
        self._future.add_done_callback(lambda _: call_soon(self._there.set))

    async def wait(self) -> None:
        """Returns once it is there."""
        await self._there.wait()

    async def outcome(self, grace: float) -> T:
        """Waits for it; the call ends if the waiting is cancelled. See `result`."""
        try:
            await self.wait()
        except BaseException:
            await self.end(grace)
            raise
        return self.value()

    @property
    def is_there(self) -> bool:
        """Whether it has come; the event loop may not know yet."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What came in place of a value; only once it is there."""
        return self._future.exception(timeout=0)

    def value(self) -> T:
        """What has come, or raises what came in its place; only once it is there."""
        if (error := self.error) is not None:
            raise what_failed(error)
        return self._future.result(timeout=0)

    async def end(self, grace: float) -> bool:
        """Cancels the call until it has ended, for `grace` seconds at most; a call that goes on is named in the log.

        Ray loses a cancellation that reaches the actor before the call has begun there, so it is asked again.

        Returns:
            Whether it has ended.
        """
        if self.is_there:
            return True
        again = _FIRST_AGAIN
        with anyio.CancelScope(shield=True), anyio.move_on_after(grace):
            while True:
                try:
                    RAY.cancel(self._ref)
                except RayError:
                    return True  # this process has left Ray; nobody is left to be told
                with anyio.move_on_after(again):
                    await self.wait()
                    return True
                again = min(2 * again, _LONGEST_AGAIN)
        _LOG.warning("%s did not end within %g s of its cancellation", self._ref, grace)
        return False


def _unsent(error: RayError) -> BaseException:
    failed = what_failed(error)
    if isinstance(failed, RayCallFailed):
        failed.maybe_executed = False
    return failed
