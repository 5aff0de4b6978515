"""Clocks that only a test moves, for tests with real sockets: no jump while bytes are under way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

from rollnest.testing import VirtualEventLoop

__all__ = ["advance", "hand_backends"]


class _HandLoop(VirtualEventLoop):
    """An asyncio loop that never jumps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual.holds += 1

    def advance(self, seconds: float) -> None:
        self._virtual.now += seconds


def hand_backends() -> list[Callable[[], tuple[str, dict[str, Any]]]]:
    """Makers of `(backend, options)` for a fixture `anyio_backend`."""
    return [_asyncio, _trio]


def _asyncio() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": _HandLoop}


def _trio() -> tuple[str, dict[str, Any]]:
    from trio.testing import MockClock

    return "trio", {"clock": MockClock(autojump_threshold=math.inf)}


async def advance(seconds: float) -> None:
    """Moves the clock of the running loop, and lets what is due run."""
    native: Any = anyio.lowlevel.current_token().native_token
    if isinstance(native, _HandLoop):
        native.advance(seconds)
    else:
        import trio

        clock: Any = trio.lowlevel.current_clock()
        clock.jump(seconds)
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
