"""Lets the event loop have the interpreter while a thread computes.

A thread that computes keeps the interpreter for 5 ms before another one gets it, and each time the event loop wakes up
it would wait for that long. Giving it up for a moment that is shorter than another thread needs to wake up does
nothing: whoever computes has it again by then. So this sleeps, seldom and long enough.
"""

from __future__ import annotations

from time import perf_counter, sleep

__all__ = ["Breath"]

_STRETCH = 0.5e-3  # seconds of computing
_PAUSE = 150e-6  # seconds; a thread needs some time to wake up


class Breath:
    """Called again and again by a thread that computes: sleeps for a moment when it has computed for a while."""

    def __init__(self) -> None:
        self._since = perf_counter()

    def __call__(self) -> None:
        """Sleeps, if it is time."""
        if perf_counter() - self._since >= _STRETCH:
            sleep(_PAUSE)
            self._since = perf_counter()
