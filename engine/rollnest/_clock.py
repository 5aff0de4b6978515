"""The event loop's clock: read as a plain function, and held still while something works that it can't see.

`anyio.current_time` looks up the backend at every call, which costs as much as the engine's whole part in a turn may,
and it fails once the loop has ended. The function that `loop_clock` returns does neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from anyio.lowlevel import current_token

__all__ = ["clock_hold", "loop_clock", "set_clock_hold"]

_ClockHold = Callable[[], AbstractContextManager[None]]
_clock_hold: _ClockHold = nullcontext


def set_clock_hold(hold: _ClockHold) -> None:
    """The test kit's seam: a virtual clock must not jump while a thread or a process works."""
    global _clock_hold
    _clock_hold = hold


def clock_hold() -> AbstractContextManager[None]:
    """Keeps a virtual clock from jumping; nothing happens to a real one."""
    return _clock_hold()


def loop_clock() -> Callable[[], float]:
    """Returns the clock of the running event loop, in seconds; it can be read after the loop has ended, too."""
    loop: Any = current_token().native_token
    is_asyncio = hasattr(loop, "time")
    clock: Callable[[], float] = (
        loop.time if is_asyncio else sys.modules["trio"].lowlevel.current_clock().current_time
    )
    return clock
