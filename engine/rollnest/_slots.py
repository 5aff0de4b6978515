"""Bounded concurrency: so many at once, first come first served."""

from __future__ import annotations

from types import TracebackType

from anyio import Semaphore

__all__ = ["Slots"]


class Slots:
    """A bound on how many bodies run at once; `None` is no bound.

    A slot is bound to the block, so no cancellation can lose it:

        async with slots:
            ...

    Cancellation: waiting is atomic.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.used: int = 0
        self._semaphore = None if size is None else Semaphore(size, fast_acquire=True)

    async def acquire(self) -> None:
        """Takes a slot that `release` gives back, where a block can't: an abandoned thread keeps its own."""
        if self._semaphore is not None:
            await self._semaphore.acquire()
        self.used += 1

    def release(self) -> None:
        """Gives a slot back."""
        self.used -= 1
        if self._semaphore is not None:
            self._semaphore.release()

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
