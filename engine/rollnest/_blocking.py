"""The engine for ordinary synchronous code: its event loop runs in a thread of its own.

A batch changes hands in one step: the loop's thread puts it into a one-place hand-over, the caller takes it out.
So a Ctrl-C between the two loses nothing; the next call returns that batch first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from threading import Event as ThreadEvent
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from anyio import CancelScope
from anyio.from_thread import BlockingPortal, start_blocking_portal

from ._options import Sampling
from ._pause import Pause
from ._records import Batch, EvalResult
from ._statistics import EngineStatistics
from ._task import TaskSpec
from ._tree import EngineTree
from .abc import PauseMode, ReleaseTag, WeightSource
from .errors import EndOfPrompts, EngineBusy, EngineClosed

if TYPE_CHECKING:
    from ._engine import Engine
    from ._evaluation import OnUpdate
    from ._restore import Restored

__all__ = ["BlockingEngine", "BlockingPause"]

T = TypeVar("T")


class BlockingEngine:
    """`Engine`'s calls without `await`; a context manager, made by `Engine.blocking`.

    One thread may use it. A Ctrl-C interrupts the call that waits, cancels it in the engine, and loses nothing.
    """

    def __init__(self, engine: Engine, backend: str) -> None:
        self._engine = engine
        self._backend = backend
        self._portal: BlockingPortal | None = None
        self._handed_over: deque[Batch] = deque()
        self._exits = ExitStack()
        self._pausing = False

    def __enter__(self) -> BlockingEngine:
        """Starts the event loop's thread and enters the engine; raises what `Engine.__aenter__` raises."""
        with ExitStack() as exits:
            self._portal = exits.enter_context(start_blocking_portal(self._backend))
            exits.enter_context(self._portal.wrap_async_context_manager(self._engine))
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """Leaves the engine and ends the thread."""
        try:
            return self._exits.__exit__(exc_type, exc, traceback)
        finally:
            self._portal = None

    @property
    def version(self) -> int:
        """The policy's weight version."""
        return self._engine.version

    def next_batch(self, n: int | None = None) -> Batch:
        """Waits for a batch; see `Engine.next_batch`. One that a Ctrl-C kept from being returned comes first."""
        if not self._handed_over:
            self.call(lambda: self._take(n))
        return self._handed_over.popleft()

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Iterates over batches until the prompts end."""
        while True:
            try:
                batch = self.next_batch(n)
            except EndOfPrompts:
                return
            yield batch

    def commit(self, batch: Batch) -> None:
        """See `Engine.commit`."""

        async def commit() -> None:
            self._engine.commit(batch)

        self.call(commit)

    def save(self, directory: str | PathLike[str], *, keep_last: int = 2) -> Path:
        """See `Engine.save`; this thread waits for it."""
        return self.call(lambda: self._engine.save(directory, keep_last=keep_last))

    def state_dict(self) -> dict[str, bytearray]:
        """See `Engine.state_dict`."""

        async def read() -> dict[str, bytearray]:
            return self._engine.state_dict()

        return self.call(read)

    @property
    def restored(self) -> Restored | None:
        """See `Engine.restored`."""
        return self._engine.restored

    def evaluate(
        self,
        task: TaskSpec | str,
        *,
        limit: int | None = None,
        sampling: Sampling | None = None,
        on_update: OnUpdate = "wait",
        patience: float = 600.0,
    ) -> EvalResult:
        """See `Engine.evaluate`; this thread waits for it, so it can't be called inside `paused()`."""
        if self._pausing:
            raise EngineBusy("evaluate() inside paused() would wait for itself; call it after")
        return self.call(
            lambda: self._engine.evaluate(
                task, limit=limit, sampling=sampling, on_update=on_update, patience=patience
            )
        )

    @contextmanager
    def paused(
        self,
        mode: PauseMode = PauseMode.ABORT,
        *,
        grace: float = 5.0,
        release: Collection[ReleaseTag] = (),
    ) -> Generator[BlockingPause]:
        """A block in which no forward pass of the policy runs; see `Engine.paused`."""
        context = self._running().call(
            partial(self._engine.paused, mode, grace=grace, release=release)
        )
        entered: list[Pause] = []
        leaving: BaseException | None = None

        async def enter() -> None:
            entered.append(await context.__aenter__())

        async def leave() -> None:
            error = leaving
            traceback = None if error is None else error.__traceback__
            await context.__aexit__(None if error is None else type(error), error, traceback)

        try:
            self.call(enter)
            self._pausing = True
            yield BlockingPause(self, entered[0])
        except BaseException as error:
            leaving = error
            raise
        finally:
            self._pausing = False
            if (
                entered
            ):  # a Ctrl-C may come right after the pause began: then it is left all the same
                self.call(leave)

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""

        async def read() -> EngineStatistics:
            return self._engine.statistics()

        return self.call(read)

    def tree(self) -> EngineTree:
        """See `Engine.tree`."""

        async def look() -> EngineTree:
            return self._engine.tree()

        return self.call(look)

    def _running(self) -> BlockingPortal:
        if self._portal is None:
            raise EngineClosed("the engine was not entered: use `with engine.blocking() as engine`")
        return self._portal

    async def _take(self, n: int | None) -> None:
        self._handed_over.append(await self._engine.next_batch(n))

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Runs an async function in the engine's loop and waits for it; a Ctrl-C cancels it there."""
        portal = self._running()
        call = _Call(function)  # made first: a start that was interrupted can be taken back
        try:
            return portal.start_task_soon(call.run).result()
        except BaseException:
            if not call.over.is_set() and portal.call(call.cancel):
                call.over.wait()  # it still has to leave what it was in
            raise

    def __repr__(self) -> str:
        return f"<blocking {self._engine!r}>"


class BlockingPause:
    """`Pause`'s calls without `await`."""

    def __init__(self, engine: BlockingEngine, pause: Pause) -> None:
        self._engine = engine
        self._pause = pause

    @property
    def quiet_seconds(self) -> float:
        """From entering `paused` to the controller's confirmation."""
        return self._pause.quiet_seconds

    @property
    def turns_in_flight(self) -> int:
        """Turns that were at the server when the gate closed."""
        return self._pause.turns_in_flight

    def update_weights(self, source: WeightSource, version: int | None = None) -> None:
        """See `Pause.update_weights`."""
        self._engine.call(lambda: self._pause.update_weights(source, version))

    def reload(self, *tags: ReleaseTag) -> None:
        """See `Pause.reload`."""
        self._engine.call(lambda: self._pause.reload(*tags))

    def published(self, version: int) -> None:
        """See `Pause.published`."""

        async def publish() -> None:
            self._pause.published(version)

        self._engine.call(publish)

    def __repr__(self) -> str:
        return f"<blocking {self._pause!r}>"


class _Call(Generic[T]):
    """One call in the engine's loop, which can be taken back from outside at any moment.

    Starting a task from another thread can itself be interrupted, and then nobody has its future.
    """

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.over = ThreadEvent()
        self._function = function
        self._taken_back = False
        self._scope: CancelScope | None = None

    async def run(self) -> T:
        """Runs it, in the loop's thread."""
        if self._taken_back:
            raise RuntimeError("taken back")  # nobody sees it
        try:
            with CancelScope() as self._scope:
                return await self._function()
            raise RuntimeError("taken back")
        finally:
            self.over.set()

    def cancel(self) -> bool:
        """Cancels it, in the loop's thread; false if it has not begun, and now never will."""
        self._taken_back = True
        if self._scope is None:
            return False
        self._scope.cancel()
        return True
