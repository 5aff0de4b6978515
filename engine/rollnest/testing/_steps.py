"""Does something to an operation before its k-th scheduler step, under virtual time: cancels it, most of all.

A step is one time that the event loop resumes something: a task on trio, a callback on asyncio. Run for every k until
the operation completes, this meets every await point in every state that the operation can be in.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from typing import Literal, TypeVarTuple

import anyio
from attrs import frozen

from ._clock import VirtualEventLoop, virtual_backends

__all__ = ["StepReport", "act_at_steps", "cancel_at_step"]

Ts = TypeVarTuple("Ts")


@frozen
class StepReport:
    """What one run did.

    Attributes:
        steps: Scheduler steps from the operation's beginning to its end.
        acted: How many of the actions were done while the operation ran.
        tasks_left: Tasks that were alive after the operation and not before.
        threads_left: Names of non-daemon threads that outlived the event loop.
    """

    steps: int
    acted: int
    tasks_left: int
    threads_left: tuple[str, ...]

    @property
    def cancelled(self) -> bool:
        """Whether the cancellation came while the operation ran."""
        return self.acted > 0


class _Counter:
    """Counts steps while the operation runs, and does something before some of them."""

    def __init__(self, actions: Mapping[int, Callable[[], object]]) -> None:
        self.actions = dict(actions)
        self.steps = 0
        self.running = False
        self.done = 0
        self.tasks_left = 0

    def step(self) -> None:
        if not self.running:
            return
        self.steps += 1
        action = self.actions.get(self.steps)
        if action is not None:
            self.done += 1
            action()


class _CountingLoop(VirtualEventLoop):
    counter: _Counter

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        def counted(*args: *Ts) -> None:
            self.counter.step()
            callback(*args)

        return super().call_soon(counted, *args, context=context)


def cancel_at_step(
    operation: Callable[[], Awaitable[object]],
    step: int,
    *,
    backend: Literal["asyncio", "trio"],
    native: bool = False,
) -> StepReport:
    """Runs an async function in an event loop of its own, and cancels it before its `step`-th step.

    Args:
        operation: The function. An error that it raises comes out, a cancellation does not.
        step: Counted from 1.
        backend: Which event loop.
        native: Cancel with asyncio's own `task.cancel()` instead of a cancel scope.

    Returns:
        What happened; `cancelled` is false once `step` is beyond the operation's end.
    """
    if native and backend != "asyncio":
        raise ValueError(f"native cancellation is asyncio's, got backend={backend!r}")
    cancel: Callable[[], object] | None = None

    async def cancellable() -> None:
        nonlocal cancel
        with anyio.CancelScope() as scope:
            task = asyncio.current_task() if native else None
            cancel = scope.cancel if task is None else task.cancel
            await operation()

    def act() -> None:
        assert cancel is not None
        cancel()

    return act_at_steps(cancellable, {step: act}, backend=backend)


def act_at_steps(
    operation: Callable[[], Awaitable[object]],
    actions: Mapping[int, Callable[[], object]],
    *,
    backend: Literal["asyncio", "trio"],
) -> StepReport:
    """Runs an async function in an event loop of its own, and does something before some of its steps.

    Args:
        operation: The function. An error that it raises comes out, a cancellation that an action caused does not.
        actions: What to call before which step, counted from 1: to set an event, to cancel a scope. It must be quick.
        backend: Which event loop.

    Returns:
        What happened; `acted` says how many actions were done before the operation ended.
    """
    counter = _Counter(actions)

    async def main() -> None:
        before = _living_tasks()
        counter.running = True
        try:
            await operation()
        finally:
            counter.running = False
            counter.tasks_left = _living_tasks() - before

    threads_before = set(threading.enumerate())
    try:
        _run(main, counter, backend)
    except asyncio.CancelledError:
        if not counter.done:
            raise
    threads = set(threading.enumerate()) - threads_before
    for thread in threads:
        if not thread.daemon:
            thread.join(5)
    left = tuple(t.name for t in threads if t.is_alive() and not t.daemon)
    return StepReport(counter.steps, counter.done, counter.tasks_left, left)


def _run(main: Callable[[], Awaitable[None]], counter: _Counter, backend: str) -> None:
    if backend == "asyncio":

        def make_loop() -> _CountingLoop:
            loop = _CountingLoop()
            loop.counter = counter
            return loop

        anyio.run(main, backend="asyncio", backend_options={"loop_factory": make_loop})
        return
    import trio

    class Instrument(trio.abc.Instrument):
        def before_task_step(self, task: object) -> None:
            counter.step()

    _, options = virtual_backends()[1]()
    options["instruments"] += [Instrument()]
    anyio.run(main, backend="trio", backend_options=options)


def _living_tasks() -> int:
    if "trio" in sys.modules:
        import trio

        try:
            return trio.lowlevel.current_statistics().tasks_living
        except RuntimeError:
            pass  # not in trio
    return len(asyncio.all_tasks())
