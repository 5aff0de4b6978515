"""What a test that hangs is told by: its tasks, of whichever event loop, and where each of them waits."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

import pytest

from rollnest.testing._stuck import where_tasks_wait

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
    for line in where_tasks_wait():
        out.write(f"{line}\n")
