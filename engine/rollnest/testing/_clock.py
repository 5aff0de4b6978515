"""Virtual time for both event loops: a test that waits an hour takes a millisecond.

Time stands still while anything can run, and jumps to the next deadline when nothing can. While a worker thread
works for the engine it does not jump, so a judger in a thread takes no time at all.

    @pytest.fixture(params=virtual_backends(), ids=backend_name)
    def anyio_backend(request): return request.param()
"""

from __future__ import annotations

import asyncio
import math
import selectors
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollnest._clock import set_virtual_clock

from . import _stuck  # pyright: ignore[reportPrivateUsage]
from ._stuck import TrioWatch, stuck

if TYPE_CHECKING:
    from trio.testing import MockClock

__all__ = ["VirtualEventLoop", "free_running_threads", "virtual_backends"]


class _VirtualSelector(selectors.DefaultSelector):
    """Turns waiting for a timeout into a jump of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.holds = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if timeout is not None and not self.holds:
            self.now += timeout
            return []
        # A thread works, or only a thread or a signal can go on.
        events = super().select(_stuck.STUCK_AFTER)
        if not events and not self.holds:
            raise stuck()
        return events


class VirtualEventLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose time jumps. Use it as a loop factory."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now

    @contextmanager
    def held(self) -> Generator[None]:
        """Keeps the time from jumping."""
        self._virtual.holds += 1
        try:
            yield
        finally:
            self._virtual.holds -= 1


def virtual_backends() -> list[Callable[[], tuple[str, dict[str, Any]]]]:
    """Returns makers of `(backend, options)` for anyio's pytest plugin and `anyio.run`: asyncio, then trio."""
    return [_asyncio, _trio]


def _asyncio() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": VirtualEventLoop}


def _trio() -> tuple[str, dict[str, Any]]:
    from trio.testing import MockClock

    return "trio", {"clock": MockClock(autojump_threshold=0), "instruments": [TrioWatch()]}


_free = 0


@contextmanager
def free_running_threads() -> Generator[None]:
    """Lets virtual time jump although a thread works: for what blocks longer than its limit."""
    global _free
    _free += 1
    try:
        yield
    finally:
        _free -= 1


@contextmanager
def _hold() -> Generator[None]:
    if _free:
        yield
        return
    if "trio" in sys.modules and (clock := _trio_clock()) is not None:
        holds = _trio_holds.get(clock, 0)
        _trio_holds[clock] = holds + 1
        clock.autojump_threshold = math.inf
        try:
            yield
        finally:
            _trio_holds[clock] -= 1
            if not _trio_holds[clock]:
                del _trio_holds[clock]
                clock.autojump_threshold = 0
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if isinstance(loop, VirtualEventLoop):
        with loop.held():
            yield
    else:
        yield


_trio_holds: dict[MockClock, int] = {}


def _trio_clock() -> MockClock | None:
    """The mock clock of the running trio loop, if it has one that jumps by itself."""
    import trio
    from trio.testing import MockClock

    try:
        clock = trio.lowlevel.current_clock()
    except RuntimeError:
        return None
    return clock if isinstance(clock, MockClock) else None


def _is_virtual() -> bool:
    if "trio" in sys.modules and _trio_clock() is not None:
        return True
    try:
        return isinstance(asyncio.get_running_loop(), VirtualEventLoop)
    except RuntimeError:
        return False


set_virtual_clock(_hold, _is_virtual)
