"""Calls of somebody else's service: so many at once, so many a second, and again where that may help."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from anyio import Semaphore, current_time, sleep
from anyio.lowlevel import RunVar
from attrs import field, frozen

from rollnest.errors import InferenceError

from ._checks import check_positive, positive, whole

__all__ = ["CallOptions", "Limiter", "Pace"]

T = TypeVar("T")

_FIRST_WAIT = 0.5  # seconds before a call is made again; doubled each time


@frozen(kw_only=True)
class CallOptions:
    """How a service is called; see `HttpJudger`."""

    concurrency: int = field(validator=whole(1))
    rate: float | None
    tries: int = field(validator=whole(1))
    max_wait: float = field(validator=positive())

    def __attrs_post_init__(self) -> None:
        if self.rate is not None:
            check_positive("rate", self.rate)


class Pace:
    """Lets callers go one after the other, so many a second. Synchronous: it says how long to wait.

    Args:
        rate: Callers a second; `None` is no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._every = 0.0 if rate is None else 1.0 / rate
        self._next = 0.0

    def wait(self, now: float) -> float:
        """Takes the next place; returns the seconds until then."""
        at = max(now, self._next)
        self._next = at + self._every
        return at - now


class Limiter:
    """Bounds calls, and makes them again. May be made anywhere; each event loop has slots and a pace of its own."""

    def __init__(self, options: CallOptions) -> None:
        self._options = options
        self._here: RunVar[tuple[Semaphore, Pace]] = RunVar("rollnest limiter")

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call, until it succeeds or it is known that it won't; its slot is free between two tries.

        Raises:
            InferenceError: What the last try failed with.

        Cancellation: the call is cancelled.
        """
        options = self._options
        slots, pace = self._limits()
        failed = 0
        while True:
            try:
                async with slots:
                    await sleep(pace.wait(current_time()))
                    return await call()
            except InferenceError as error:
                failed += 1
                if not error.retryable or failed >= options.tries:
                    raise
                asked = getattr(error, "retry_after", None) or 0.0
                if asked > options.max_wait:
                    raise InferenceError(
                        f"{error}; it asks to wait for {asked:g} s, max_wait is {options.max_wait:g} s"
                    ) from error
                wait = max(asked, min(options.max_wait, _FIRST_WAIT * 2.0 ** (failed - 1)))
            await sleep(wait)

    def _limits(self) -> tuple[Semaphore, Pace]:
        limits = self._here.get(None)
        if limits is None:
            limits = Semaphore(self._options.concurrency), Pace(self._options.rate)
            self._here.set(limits)
        return limits
