"""Bounded concurrency: so many at once, first come first served."""

from __future__ import annotations

import math
from types import TracebackType

from anyio import CancelScope, Semaphore, current_time

__all__ = ["Slots", "SlotsLost"]


class SlotsLost(Exception):
    """Every slot is held by a thread that nobody can stop, and none came free in time."""


class Slots:
    """A bound on how many bodies run at once; `None` is no bound.

    A slot is bound to the block, so no cancellation can lose it:

        async with slots:
            ...

    Cancellation: waiting is atomic.

    Attributes:
        size: The bound.
        used: Slots that are taken.
        lost: Of those, held by threads whose caller has gone.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.used: int = 0
        self.lost: int = 0
        self._semaphore = None if size is None else Semaphore(size, fast_acquire=True)
        self._waiting: dict[CancelScope, float] = {}

    async def acquire(self, patience: float | None = None) -> None:
        """Takes a slot that `release` gives back, where a block can't: an abandoned thread keeps its own.

        Args:
            patience: Seconds to wait for while every slot is lost; `None` is for ever.

        Raises:
            SlotsLost: Every slot was lost for that long.
        """
        if self._semaphore is not None:
            if self._semaphore.value > 0:
                await self._semaphore.acquire()
            else:
                await self._wait(self._semaphore, math.inf if patience is None else patience)
        self.used += 1

    def release(self) -> None:
        """Gives a slot back."""
        self.used -= 1
        if self._semaphore is not None:
            self._semaphore.release()

    def lose(self) -> None:
        """A slot stays with a thread that was abandoned."""
        self.lost += 1
        if self.lost == self.size:
            for scope, patience in self._waiting.items():
                scope.deadline = current_time() + patience

    def regain(self) -> None:
        """Such a thread has ended."""
        self.lost -= 1
        for scope in self._waiting:
            scope.deadline = math.inf
        self.release()

    async def _wait(self, semaphore: Semaphore, patience: float) -> None:
        with CancelScope() as scope:
            if self.lost == self.size:
                scope.deadline = current_time() + patience
            self._waiting[scope] = patience
            try:
                await semaphore.acquire()
            finally:
                del self._waiting[scope]
        if scope.cancelled_caught:
            raise SlotsLost

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Slots {self.used} of {'unbounded' if self.size is None else self.size} used>"
