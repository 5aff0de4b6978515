"""What a test that hangs is told by: its tasks, of whichever event loop, and where each of them waits.

A deadlock under virtual time is no silence: with nothing to wait for, the clock has nowhere to jump, and the loop
turns. The stack of the thread says nothing then; those of the tasks do.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

import pytest

__all__ = ["told_of_hanging"]


@contextmanager
def told_of_hanging(test: str, seconds: float) -> Generator[None]:
    """Fails the block if it takes so long, and prints what hangs; in the main thread, where signals exist."""

    def hangs(number: int, frame: FrameType | None) -> NoReturn:
        out = sys.__stderr__ or sys.stderr
        out.write(f"\n{test} has run for {seconds:g} s\n")
        _print_tasks(out)
        out.flush()
        pytest.fail(f"it has run for {seconds:g} s; its tasks are on stderr")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _print_tasks(out: TextIO) -> None:
    for line in (*_trio_tasks(), *_asyncio_tasks()):
        out.write(f"{line}\n")


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
