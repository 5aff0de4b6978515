"""Actors that the tests talk to, and how they look into them.

Ray's own state API knows nothing of the coroutines of an async actor, so the actors are asked themselves.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import anyio
import ray

__all__ = ["HANG", "Worker", "method", "remote", "until"]

HANG = 60.0

_Method = TypeVar("_Method", bound=Callable[..., Any])


def remote(cls: type, **options: Any) -> Any:
    """`ray.remote`, whose types don't know all of its options."""
    make: Any = ray.remote
    return make(num_cpus=0, **options)(cls)


def method(**options: Any) -> Callable[[_Method], _Method]:
    """`ray.method`, for actors of `remote`."""

    def mark(function: _Method) -> _Method:
        make: Any = ray.method
        return cast("_Method", make(**options)(function))

    return mark


async def until(true: Callable[[], Awaitable[object]]) -> None:
    """Waits for a condition in another process, which can't ring: it is asked again and again, up to a deadline."""
    with anyio.fail_after(HANG):
        while not await true():  # noqa: ASYNC110
            await anyio.sleep(0.01)


class WorkerActor:
    """Does what tests ask for, and tells what it is at."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0
        self.ended = 0
        self.gate = asyncio.Event()

    async def echo(self, value: Any) -> Any:
        """Returns what it got."""
        return value

    async def fail(self, error: Exception) -> None:
        """Raises what it got."""
        raise error

    async def hang(self, linger: int = 0) -> str:
        """Never returns; needs so many rounds of its loop to end when it is cancelled."""
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            for _ in range(linger):
                await asyncio.sleep(0)
            raise
        finally:
            self.running -= 1
            self.ended += 1
        return "never"

    async def deny(self) -> str:
        """Catches its cancellation and returns something."""
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
        finally:
            self.running -= 1
        return "a value all the same"

    async def cancel_itself(self) -> None:
        """Ends by a cancellation that nobody asked for."""
        raise asyncio.CancelledError

    async def count(self, to: int, then: str = "end") -> AsyncIterator[int]:
        """Yields numbers, then ends, hangs, or raises."""
        self.running += 1
        try:
            for number in range(to):
                yield number
            if then == "hang":
                await asyncio.Event().wait()
            if then == "raise":
                raise ValueError("after the numbers")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def die(self) -> None:
        """Kills its own process."""
        os._exit(7)

    @method(concurrency_group="look")
    async def state(self) -> dict[str, int]:
        """What it is at: calls that run, and cancellations that reached them."""
        return {"running": self.running, "cancelled": self.cancelled, "ended": self.ended}

    @method(concurrency_group="look")
    async def threads(self) -> int:
        """How many threads it has."""
        return threading.active_count()


Worker = remote(WorkerActor, concurrency_groups={"look": 4})
