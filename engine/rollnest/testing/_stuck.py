"""Tells a test that waits for something that can't happen, and says where its tasks wait.

Under virtual time such a deadlock is no silence. With nothing to wait for, trio's clock has nowhere to jump, and the
loop turns; asyncio's would wait for ever. The stack of the thread says nothing then; those of the tasks do.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import NoReturn

__all__ = ["STUCK_AFTER", "TrioWatch", "VirtualTimeStuck", "stuck", "where_tasks_wait"]

_log = logging.getLogger("rollnest")

STUCK_AFTER = 3.0  # real seconds; a thread that works for the engine is waited for longer


class VirtualTimeStuck(RuntimeError):
    """Nothing can run, no deadline is set, and no thread works: the test waits for something that can't happen.

    It says where each task waits. On trio it is in the log, everything is cancelled, and `anyio.run` raises a
    `trio.TrioInternalError` with it as the cause; a test that anyio's pytest plugin runs fails with `trio.Cancelled`.
    """


def stuck() -> VirtualTimeStuck:
    """Returns the error, with where the tasks of the running loop wait."""
    return VirtualTimeStuck(
        "nothing can run and no deadline is set; no thread did anything for 3 real seconds:\n"
        + "\n".join(where_tasks_wait())
    )


class TrioWatch:
    """An instrument of trio: ends a run whose loop turns and has nothing to run, though time could jump."""

    def __init__(self) -> None:
        self._idle_since: float | None = None
        self._looked: float = 0.0

    def before_task_step(self, task: object) -> None:
        """Something runs."""
        self._idle_since = None

    def before_io_wait(self, timeout: float) -> None:
        """The loop turns; it may be that nothing ran since it did before."""
        before, self._looked = self._looked, perf_counter()
        if timeout > 0:  # time stands still, for a thread that works
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._looked
        elif before - self._idle_since >= STUCK_AFTER:  # and what a thread did until then has come
            self._idle_since = None
            trio = sys.modules["trio"].lowlevel
            if trio.current_statistics().seconds_to_next_deadline == math.inf:
                error = stuck()
                _log.error("%s", error)  # what becomes of it is up to whoever runs the loop
                trio.current_trio_token().run_sync_soon(_raise, error)


def _raise(error: Exception) -> NoReturn:
    raise error


def where_tasks_wait() -> list[str]:
    """Lists the tasks of the running loop, and for each the lines that it is in, outermost first."""
    return [*_trio_tasks(), *_asyncio_tasks()]


def _trio_tasks() -> Iterator[str]:
    trio = sys.modules.get("trio")
    if trio is None:
        return
    try:
        todo = [(trio.lowlevel.current_root_task(), 0)]
    except RuntimeError:  # no trio runs here
        return
    while todo:
        task, depth = todo.pop()
        if task is None:
            continue
        yield f"{'  ' * depth}{task.name}"
        for frame, line in task.iter_await_frames():
            yield f"{'  ' * depth}  {frame.f_code.co_filename}:{line} {frame.f_code.co_qualname}"
        todo += [
            (child, depth + 1) for group in task.child_nurseries for child in group.child_tasks
        ]


def _asyncio_tasks() -> Iterator[str]:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no asyncio runs here
        return
    for task in tasks:
        yield task.get_name()
        waits: object = task.get_coro()
        while waits is not None:
            frame = getattr(waits, "cr_frame", None)
            if frame is not None:
                yield f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_qualname}"
            waits = getattr(waits, "cr_await", None)
