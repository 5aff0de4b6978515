"""From threads to the event loop, without waiting on either side."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import anyio.lowlevel

__all__ = ["Inbox", "loop_caller"]

T = TypeVar("T")


def loop_caller() -> Callable[[Callable[[], Any]], None]:
    """Returns a function that lets the running event loop call something soon; for threads, never blocks.

    Once the loop is gone, what is handed over is dropped: nobody is left to wait for it.
    """
    # Not `anyio.from_thread`: it blocks the thread until the loop gets round to it.
    native: Any = anyio.lowlevel.current_token().native_token
    is_asyncio = isinstance(native, asyncio.AbstractEventLoop)
    call: Callable[[Callable[[], Any]], Any] = (
        native.call_soon_threadsafe if is_asyncio else native.run_sync_soon
    )

    def call_soon(function: Callable[[], Any]) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # asyncio's "loop is closed"; trio's RunFinishedError is one
            call(function)

    return call_soon


class Inbox(Generic[T]):
    """Items from threads to one function on the event loop, in order, many in one call.

    However many items come before the loop wakes up, it is woken once.
    """

    def __init__(self, take: Callable[[list[T]], None]) -> None:
        self._take = take
        self._call_soon = loop_caller()
        self._lock = threading.Lock()
        self._items: list[T] = []

    def put(self, items: list[T]) -> None:
        """Hands items over; from any thread."""
        with self._lock:
            first = not self._items
            self._items.extend(items)
        if first and items:
            self._call_soon(self.drain)

    def drain(self) -> None:
        """Takes what has come so far at once; only on the event loop."""
        with self._lock:
            items, self._items = self._items, []
        if items:
            self._take(items)
