"""Measures how long the event loop does not run, and says what keeps it from running.

A thread asks the loop for a sign of life, ten times a second, while groups are in flight; otherwise it sleeps. It can
look at what the loop's thread is doing at that moment, which nothing on the loop itself could: so the report names the
line that blocks, also if it never ends.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, get_ident
from types import FrameType

from ._clock import is_clock_virtual
from ._workers import loop_poster
from .abc import Instrument

__all__ = ["LagWatch"]

_log = logging.getLogger("rollnest")

_LAG = 0.25  # seconds without a sign of life that are told
_EVERY = 0.1  # seconds between two questions


class LagWatch(Instrument):
    """Asks the event loop for signs of life while groups are in flight.

    Attributes:
        longest: Seconds of the longest silence so far.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        is_busy: Callable[[], bool],
        on_lag: Callable[[float, str], None],
    ) -> None:
        self.longest = 0.0
        self._in_flight = in_flight
        self._is_busy = is_busy
        self._on_lag = on_lag
        self._needed = Event()
        self._answered = Event()
        self._over = Event()
        self._loop_thread = get_ident()
        self._post = loop_poster()
        self._thread: Thread | None = None
        self._told = False
        # Virtual time jumps while nothing runs, and questions from outside would be something that runs.
        self._off = is_clock_virtual()

    @property
    def is_asking(self) -> bool:
        """Whether its thread asks, or sleeps."""
        return self._needed.is_set()

    def group_started(self, task: str, visit: int) -> None:
        """Wakes the thread."""
        self.wake()

    def wake(self) -> None:
        """Has the thread ask, until nothing is in flight any more."""
        if self._off or self._needed.is_set():
            return
        self._needed.set()
        if self._thread is None:
            self._thread = Thread(target=self._run, name="rollnest event-loop watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._off = True
        self._over.set()
        self._needed.set()
        self._answered.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._needed.wait()
            if self._over.is_set():
                return
            self._ask()
            if not self._is_busy():
                self._needed.clear()
                if self._is_busy():  # a group began in between, and saw it set
                    self._needed.set()
            if self._over.wait(
                _EVERY
            ):  # not left to `_needed`, which may have been cleared after `stop` set it
                return

    def _ask(self) -> None:
        asked = time.monotonic()
        self._answered.clear()
        if self._over.is_set():
            return
        self._post(self._answered.set)
        where = None
        if not self._answered.wait(_LAG):
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
            where = _where(frames.get(self._loop_thread))
            turns = self._in_flight()  # of now: none can begin or end while the loop is blocked
            if where is not None and turns and not self._told:
                self._told = True
                _log.warning(
                    "the event loop has not run for %s s, with %s turns in flight: it is in %s. Whatever blocks it "
                    "(training code, most often) stops every turn: run that in a thread "
                    "(anyio.to_thread.run_sync), or use Engine(...).blocking()",
                    _LAG,
                    turns,
                    where,
                )
            self._answered.wait()
        lag = time.monotonic() - asked
        self.longest = max(self.longest, lag)
        if where is not None and not self._over.is_set():
            self._post(self._on_lag, lag, where)


_LIBRARIES = tuple(
    str(Path(path))
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        Path(__file__).parent,
    )
)
_WAITING = ("selectors.py", "_io_epoll.py", "_io_kqueue.py", "_io_windows.py", "windows_events.py")


def _where(innermost: FrameType | None) -> str | None:
    """Names the line that a thread is in: the innermost of the user's own, if there is one.

    Returns:
        The line, or `None` if the event loop waits: then the machine was slow, not the code on the loop.
    """
    if innermost is None or Path(innermost.f_code.co_filename).name in _WAITING:
        return None
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}, line {frame.f_lineno})"
