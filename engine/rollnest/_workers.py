"""Runs users' synchronous functions in worker threads, so that nothing they do can stall the event loop.

A thread can't be cancelled. One whose waiter was cancelled is abandoned: it keeps its slot until it ends, and
it is known by name until then. Threads that still run when the engine closes are waited for, then named.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from functools import partial
from inspect import isawaitable
from threading import Lock
from typing import Any, TypeVar, TypeVarTuple, cast

from anyio import CapacityLimiter, Event, move_on_after, to_thread
from anyio.lowlevel import current_token

from ._clock import clock_hold
from ._slots import Call
from .errors import describe

__all__ = ["Workers", "loop_poster"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Workers:
    """The worker threads of one engine.

    Attributes:
        abandoned: Calls whose waiter has gone and whose thread still runs.
    """

    def __init__(self) -> None:
        self.abandoned: set[Call] = set()
        self._all_ended = Event()
        # Our slots bound the threads; anyio's own default of 40 would be a second, hidden bound.
        self._threads = CapacityLimiter(math.inf)

    async def run(
        self,
        call: Call,
        limit: AbstractContextManager[None],
        function: Callable[[*Ts], T | Awaitable[T]],
        *args: *Ts,
        patience: float | None = None,
    ) -> T:
        """Calls a function in a worker thread, within a slot; an awaitable that it returns is awaited here.

        Args:
            call: Names it, and takes its slot; waiting for one is not counted.
            limit: Entered around the call.
            function: What is called.
            args: Its arguments.
            patience: Seconds to wait for a slot while abandoned threads hold all of them.

        Raises:
            SlotsLost: There was no slot for so long.

        Cancellation: returns at once; the thread runs on, keeps its slot and is counted in `abandoned`.
        """
        await call.begin(patience)
        thread = _Thread(call, self)
        try:
            with limit:
                with clock_hold():
                    (answer,) = await to_thread.run_sync(
                        partial(thread.work, function, args),
                        abandon_on_cancel=True,
                        limiter=self._threads,
                    )
                return cast("T", await answer if isawaitable(answer) else answer)
        finally:
            thread.leave()

    async def drain(self, grace: float) -> None:
        """Waits for abandoned threads, at most `grace` seconds; warns of those that still run.

        Warns:
            RuntimeWarning: Names each call whose thread still runs.
        """
        with clock_hold(), move_on_after(grace):
            while self.abandoned:
                self._all_ended = Event()
                await self._all_ended.wait()
        if self.abandoned:
            warnings.warn(
                f"{len(self.abandoned)} worker threads still run and can't be stopped: {self.names}",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def names(self) -> str:
        """The names of the abandoned calls."""
        return ", ".join(sorted(call.name for call in self.abandoned))

    def reap(self, call: Call) -> None:
        """Takes an abandoned call out whose thread has ended."""
        self.abandoned.discard(call)
        call.over()
        if not self.abandoned:
            self._all_ended.set()


class _Thread:
    """The thread of one call: its slot is given back once, by whichever of waiter and thread leaves last."""

    def __init__(self, call: Call, workers: Workers) -> None:
        self._call = call
        self._workers = workers
        self._lock = Lock()
        self._running = False
        self._left = False
        self._post = loop_poster()

    def work(self, function: Callable[..., T], args: tuple[Any, ...]) -> tuple[T]:
        """Runs in the thread. The answer comes in a tuple, since trio refuses a coroutine as one."""
        with self._lock:
            if self._left:
                raise RuntimeError("the waiter went before the thread began")  # nobody sees it
            self._running = True
        try:
            return (function(*args),)
        except Exception:
            raise
        except BaseException as error:
            # In a thread of ours neither exit() nor a cancellation means the whole run.
            raise RuntimeError(describe(error)) from error
        finally:
            with self._lock:
                self._running = False
                abandoned = self._left
            if abandoned:
                self._post(self._workers.reap, self._call)

    def leave(self) -> None:
        """Called by the waiter when it goes, with a result or without."""
        with self._lock:
            self._left = True
            running = self._running
        if running:
            self._workers.abandoned.add(self._call)
            self._call.abandon()
        else:
            self._call.end()


def loop_poster() -> Callable[..., None]:
    """Returns a function for any thread: it has the event loop call something soon, and does not wait."""
    token: Any = current_token().native_token
    post: Callable[..., object] = (
        token.run_sync_soon if hasattr(token, "run_sync_soon") else token.call_soon_threadsafe
    )

    def post_or_drop(function: Callable[..., object], *args: object) -> None:
        try:
            post(function, *args)
        except RuntimeError:
            pass  # the loop has ended, and with it the slots

    return post_or_drop
