"""Notices that nothing ends any more although a batch is waited for.

No task of its own: the call that waits has a deadline, which moves on with every end of a turn, a tool, a judger or a
group, and with every token. Time with the gate closed is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from anyio import CancelScope

from ._gate import Gate

__all__ = ["StallWatch"]


class StallWatch:
    """Watches over one wait for a batch.

        while waiting:
            with watch.patience():
                await bell.wait()
            if (seconds := watch.stalled()) is not None:
                ...

    A stall is told once. Once something ends, the next one is. Tokens of answers that still grow are looked at when
    patience ends, not when they come: a stall in the middle of one may be told as late as after twice the time.

    Args:
        gate: Knows when something last ended, what is in flight, and whether turns may run at all.
        after: Seconds without an end that make a stall; `None` never does.
        wake: Ends the wait, as patience has to be measured anew.
    """

    def __init__(self, gate: Gate, after: float | None, *, wake: Callable[[], None]) -> None:
        self._gate = gate
        self._after = math.inf if after is None else after
        self._wake = wake
        self._since = gate.clock()  # before there was a wait, there was nothing to wait for
        self._seen = 0
        self._told = False

    def patience(self) -> CancelScope:
        """A scope that ends when it is time to look for a stall."""
        return CancelScope(deadline=math.inf if self._told or self._gate.closed else self._due)

    def stalled(self) -> float | None:
        """How long nothing has ended, if that is a stall, and was not told yet."""
        now = self._gate.clock()
        if self._told or self._gate.closed or now < self._due:
            return None
        tokens = sum(len(attempt.received) for attempt in self._gate.in_flight)
        if tokens != self._seen:
            self._seen, self._since = tokens, now
            return None
        self._told = True
        self._gate.on_end = self._go_on
        return now - max(self._since, self._gate.last_end)

    @property
    def _due(self) -> float:
        return max(self._since, self._gate.last_end) + self._after

    def _go_on(self) -> None:
        self._told = False
        self._wake()
