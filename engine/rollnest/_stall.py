"""Notices that nothing ends any more although a batch is waited for.

The time that is up moves on with every end of a turn, a tool, a judger or a group, and with every token. Time with the
gate closed is left out. The watch has a task of its own, which sleeps: a batch that is ready finds no deadline to undo.
"""

from __future__ import annotations

from collections.abc import Callable

from anyio import sleep_until

from ._bell import Bell
from ._gate import Gate

__all__ = ["StallWatch"]


class StallWatch:
    """Watches over the waits for batches, one at a time.

    A stall is told once in a wait. Once something ends, the next one is. Tokens of answers that still grow are looked
    at when the time is up, not when they come: a stall in the middle of one may be told as late as after twice the
    time.

    Args:
        gate: Knows when something last ended, what is in flight, and whether turns may run at all.
        after: Seconds without an end that make a stall; `None` never does.
        on_stall: Is told for how many seconds nothing has ended.
    """

    def __init__(self, gate: Gate, after: float | None, on_stall: Callable[[float], None]) -> None:
        self._gate = gate
        self._after = after
        self._on_stall = on_stall
        self._bell = Bell()
        self._waits = False
        self._since = 0.0
        self._seen: int = 0
        self._told = False

    def begin(self) -> None:
        """A wait has begun: before it, there was nothing to wait for."""
        self._since, self._seen = self._gate.clock(), 0
        self._waits, self._told = True, False
        self._bell.ring()

    def end(self) -> None:
        """The wait is over."""
        self._waits = False

    async def run(self) -> None:
        """Watches for ever, if there is something to watch for.

        Cancellation: at once.
        """
        with self._bell:
            while self._after is not None:
                due = max(self._since, self._gate.last_end) + self._after
                if not self._waits or self._told:
                    await self._bell.wait()
                elif self._gate.closed:
                    await self._gate.wait_unpaused()
                elif self._gate.clock() < due:
                    await sleep_until(due)
                else:
                    self._look()

    def _look(self) -> None:
        tokens = sum(len(attempt.received) for attempt in self._gate.in_flight)
        if tokens != self._seen:
            self._seen, self._since = tokens, self._gate.clock()
            return
        self._told = True
        self._gate.on_end = self._go_on
        self._on_stall(self._gate.clock() - max(self._since, self._gate.last_end))

    def _go_on(self) -> None:
        self._told = False
        self._bell.ring()
