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

__all__ = ["clock_hold", "is_clock_virtual", "loop_clock", "set_virtual_clock"]

_ClockHold = Callable[[], AbstractContextManager[None]]
_clock_hold: _ClockHold = nullcontext
_is_virtual: Callable[[], bool] = bool


def set_virtual_clock(hold: _ClockHold, is_virtual: Callable[[], bool]) -> None:
    """The test kit's seam: a virtual clock must not jump while a thread or a process works.

    Args:
        hold: Keeps the running loop's clock from jumping, if it is a virtual one.
        is_virtual: Says whether it is.
    """
    global _clock_hold, _is_virtual
    _clock_hold, _is_virtual = hold, is_virtual


def is_clock_virtual() -> bool:
    """Whether the running loop's clock is a virtual one."""
    return _is_virtual()


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
