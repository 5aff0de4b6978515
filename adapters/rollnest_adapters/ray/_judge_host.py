"""The actor's side of judgers in actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from ._in_group import in_group

__all__ = ["CONTROL", "JudgeHost"]

CONTROL = "control"


class JudgeHost:
    """Holds a judger.

    A call ends when the judger has: one that was cancelled and goes on in a thread has not, and so its caller can tell.

    Args:
        function: What is called.
        concurrency: Most calls at once.
    """

    def __init__(self, function: Callable[[Any], Any], concurrency: int) -> None:
        self._function = function
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="judger")
        self._is_async = _is_async(function)
        self._running = 0

    async def judge(self, given: Any) -> Any:
        """Asks the judger."""
        self._running += 1
        try:
            if self._is_async:
                return await self._function(given)
            return await self._in_thread(given)
        finally:
            self._running -= 1

    async def _in_thread(self, given: Any) -> Any:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        work = self._threads.submit(self._function, given)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
        cancelled: asyncio.CancelledError | None = None
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError as error:  # may come many times; raised below
                work.cancel()
                cancelled = error
        if cancelled is not None:
            raise cancelled
        answer = work.result()
        return await answer if isawaitable(answer) else answer

    @in_group(CONTROL)
    async def ready(self) -> int:
        """Returns how many calls it has; on an event loop of its own, so also while the judger blocks."""
        return self._running


def _is_async(function: Callable[[Any], Any]) -> bool:
    """Whether calling it gives something to await."""
    return iscoroutinefunction(function) or iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
