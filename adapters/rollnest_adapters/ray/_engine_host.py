"""An actor that hosts a whole engine, for trainers in other processes. It owns the engine, and every pause.

A trainer may die between any two of its calls, or in one. So a batch is handed over again until the next call says that
it has come; and a pause is a block in a task of this actor, which ends by itself if nobody names it for long enough.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar, cast

import anyio
from anyio import CancelScope, Event, create_task_group
from anyio.abc import TaskGroup
from attrs import frozen

from rollnest import Batch, Engine, EngineStatistics, EngineTree, EvalResult, Pause, PauseMode
from rollnest.errors import EngineBusy, EngineClosed

__all__ = ["EngineHost", "RayEngineState", "RayPauseInfo"]

_LOG = logging.getLogger("rollnest.ray")

T = TypeVar("T")


@frozen(kw_only=True)
class RayPauseInfo:
    """A pause of an engine in an actor, when its block began.

    Attributes:
        number: Which of the engine's pauses.
        quiet_seconds: From the call to the controller's confirmation.
        turns_in_flight: Turns that were at the server when the gate closed.
        lease: Seconds without a call that names it, after which it ends by itself.
    """

    number: int
    quiet_seconds: float
    turns_in_flight: int
    lease: float


@frozen(kw_only=True)
class RayEngineState:
    """What an engine's actor is at; asked inside it.

    Attributes:
        calls: Names of the trainer's calls that run.
        paused: The number of the pause that is on.
        tasks: Names of all of its asyncio tasks.
    """

    calls: tuple[str, ...]
    paused: int | None
    tasks: tuple[str, ...]


class EngineHost:
    """Hosts an engine.

    Args:
        make: A function that makes the engine, pickled.
    """

    def __init__(self, make: bytes) -> None:
        self._make: Callable[[], Engine] = pickle.loads(make)
        self._engine: Engine | None = None
        self._error: BaseException | None = None
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._tasks: TaskGroup | None = None
        self._last: Batch | None = None
        self._committed = 0
        self._taking: CancelScope | None = None
        self._taken = asyncio.Event()
        self._pauses = 0
        self._pause: _HeldPause | None = None
        self._calls: dict[int, str] = {}
        self._called = 0

    async def run(self) -> None:
        """Owns the engine, until it was closed or is cancelled."""
        try:
            async with self._make() as engine, create_task_group() as tasks:
                self._engine, self._tasks = engine, tasks
                self._opened.set()
                await self._closing.wait()
                if self._pause is not None:
                    self._pause.end()
        except Exception as error:
            self._error = error
            raise
        finally:
            self._tasks = None
            self._opened.set()

    async def ready(self) -> None:
        """Returns once the engine was entered; raises what that raised."""
        await self._opened.wait()
        if self._engine is None:
            raise self._error or EngineClosed("the engine was closed before it was open")

    async def close(self) -> None:
        """Has the engine left; `run` returns when that is done."""
        self._closing.set()

    async def next_batch(
        self, n: int | None, received: int | None, wait_in_pause: bool = False
    ) -> Batch:
        """Returns a batch; the last one again, if the trainer has not received it.

        Args:
            n: How many groups.
            received: Number of the last batch that has come; `None` is none.
            wait_in_pause: As for `Engine.next_batch`.

        Raises:
            EngineBusy: A later call took its place, of another trainer.
        """
        last = self._last
        if last is not None and max(received or 0, self._committed) < last.index:
            return last
        while self._taking is not None:  # an earlier trainer's, that may be dead
            self._taking.cancel()
            await self._taken.wait()
        with CancelScope() as self._taking:
            self._taken = asyncio.Event()
            try:
                # In the step in which it is taken: no cancellation comes between.
                self._last = await self._ask(
                    "next_batch", self._open.next_batch(n, wait_in_pause=wait_in_pause)
                )
                return self._last
            finally:
                self._taking = None
                self._taken.set()
        raise EngineBusy("another trainer asks for batches now")

    async def commit(self, index: int) -> None:
        """Says that a batch was trained."""
        self._open.commit(cast("Batch", _Index(index)))
        self._committed = max(self._committed, index)

    async def save(self, directory: str, keep_last: int) -> str:
        """Writes a checkpoint on this actor's node; returns its path."""
        saved = self._open.save(directory, keep_last=keep_last)
        return str(await self._ask("save", saved))

    async def evaluate(self, task: Any, options: dict[str, Any]) -> EvalResult:
        """Evaluates a task."""
        return await self._ask("evaluate", self._open.evaluate(task, **options))

    async def statistics(self) -> EngineStatistics:
        """Where everything is now."""
        return self._open.statistics()

    async def tree(self) -> EngineTree:
        """Who waits for what."""
        return self._open.tree()

    async def version(self) -> int:
        """The policy's weight version."""
        return self._open.version

    # Pauses

    async def pause(
        self, mode: PauseMode, grace: float, release: Collection[Any], lease: float
    ) -> RayPauseInfo:
        """Begins a pause; to be ended by `resume`.

        Cancellation: it does not begin.
        """
        if self._tasks is None:
            raise EngineClosed("the engine is not open")
        if self._pause is not None:
            raise EngineBusy("another trainer has paused the engine")
        self._pauses += 1
        context = self._open.paused(mode, grace=grace, release=release)
        held = self._pause = _HeldPause(self._pauses, lease)
        self._tasks.start_soon(self._hold, held, context, name=f"pause {held.number}")
        try:
            await self._ask("pause", held.entered.wait())
        except BaseException:
            held.scope.cancel()
            raise
        if held.error is not None:
            raise held.error
        pause = held.pause
        assert pause is not None
        return RayPauseInfo(
            number=held.number,
            quiet_seconds=pause.quiet_seconds,
            turns_in_flight=pause.turns_in_flight,
            lease=lease,
        )

    async def in_pause(self, number: int, what: str, args: tuple[Any, ...]) -> None:
        """Calls a method of the pause: `update_weights`, `published` or `reload`.

        Cancellation: the pause is left; an update that it cuts leaves unknown weights, which breaks the engine.
        """
        await self._ask(what, self._held(number).call(what, args))

    async def keep(self, number: int) -> None:
        """Says that the trainer of a pause is alive."""
        self._held(number).touch()

    async def resume(self, number: int) -> None:
        """Ends a pause; returns when production goes on. Raises what leaving it raised.

        Cancellation: it ends all the same.
        """
        held = self._held(number)
        held.end()
        await self._ask("resume", held.left.wait())
        if held.error is not None:
            raise held.error

    async def state(self) -> RayEngineState:
        """Returns what it is at."""
        own = asyncio.current_task()
        return RayEngineState(
            calls=tuple(self._calls.values()),
            paused=None if self._pause is None else self._pause.number,
            tasks=tuple(sorted(t.get_name() for t in asyncio.all_tasks() if t is not own)),
        )

    async def _hold(self, held: _HeldPause, context: Any) -> None:
        try:
            with held.scope:
                async with context as pause:
                    held.pause = pause
                    held.entered.set()
                    await held.serve(pause)
        except Exception as error:
            held.error = error
        finally:
            self._pause = None
            held.entered.set()
            held.left.set()

    def _held(self, number: int) -> _HeldPause:
        if self._pause is None or self._pause.number != number:
            raise EngineBusy(
                f"pause {number} is over: it was resumed, or nobody named it for its lease"
            )
        return self._pause

    @property
    def _open(self) -> Engine:
        if self._engine is None:
            raise self._error or EngineClosed("the engine was not entered yet")
        return self._engine

    async def _ask(self, name: str, answer: Awaitable[T]) -> T:
        self._called += 1
        number = self._called
        self._calls[number] = name
        try:
            return await answer
        finally:
            del self._calls[number]


@frozen
class _Index:
    """As much of a batch as `commit` looks at."""

    index: int


class _HeldPause:
    """A pause in a task of its own.

    Attributes:
        number: Which.
        scope: Around its block.
        pause: The engine's.
        entered: The block has begun, or will not.
        left: It has ended.
        error: Why it did not begin, or what leaving it raised.
    """

    def __init__(self, number: int, lease: float) -> None:
        self.number = number
        self.scope = CancelScope()
        self.pause: Pause | None = None
        self.entered = Event()
        self.left = Event()
        self.error: Exception | None = None
        self._lease = lease
        self._until = CancelScope()
        self._ending = False
        self._calling = False
        self._told = Event()
        self._asked: tuple[Callable[[], Awaitable[None]], _Answer] | None = None

    def touch(self) -> None:
        """Somebody has named it."""
        self._until.deadline = anyio.current_time() + self._lease

    def end(self) -> None:
        """The block is to be left."""
        self._ending = True
        self._told.set()

    async def call(self, what: str, args: tuple[Any, ...]) -> None:
        """Has the block's own task call a method of the pause."""
        if self._calling:
            raise EngineBusy(f"{what}() while another call of pause {self.number} runs")
        self.touch()
        pause, answer = self.pause, _Answer()

        async def ask() -> None:
            match what:
                case "update_weights":
                    await cast("Pause", pause).update_weights(*args)
                case "published":
                    cast("Pause", pause).published(*args)
                case "reload":
                    await cast("Pause", pause).reload(*args)
                case _:
                    raise ValueError(f"a pause has no {what!r}")

        self._calling = True
        self._asked = ask, answer
        self._told.set()
        try:
            await answer.there.wait()
        except BaseException:
            self.scope.cancel()
            raise
        finally:
            self._calling = False
        self.touch()
        if answer.error is not None:
            raise answer.error

    async def serve(self, pause: Pause) -> None:
        """The block: calls what is asked for, until it is ended, or the lease is over."""
        while True:
            with CancelScope() as self._until:
                self.touch()
                while self._asked is None and not self._ending:
                    self._told = Event()
                    await self._told.wait()
            if self._asked is not None:
                (ask, answer), self._asked = self._asked, None
                try:
                    await ask()
                except Exception as error:
                    answer.error = error
                finally:
                    answer.there.set()
            elif self._ending:
                return
            else:
                _LOG.warning(
                    "pause %d ends: nobody has named it for %g s", self.number, self._lease
                )
                return


class _Answer:
    def __init__(self) -> None:
        self.there = Event()
        self.error: Exception | None = None
