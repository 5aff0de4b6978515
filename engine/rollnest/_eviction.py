"""Ends the groups in flight for `PauseMode.EVICT`, and knows when the last of them has settled.

A group that has judgers running is left alone until they have answered, or until their time is over. Who is cancelled
settles in the table by itself; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from anyio import CancelScope

from ._group import GroupRunner

__all__ = ["Eviction"]


class Eviction:
    """Ends the groups of all tasks."""

    def __init__(self, runners: Iterable[GroupRunner]) -> None:
        self._runners = list(runners)
        self._until_settled: CancelScope | None = None

    @property
    def live(self) -> int:
        """How many groups have not settled."""
        return sum(len(runner.live) for runner in self._runners)

    @contextmanager
    def begin(self) -> Generator[None]:
        """Cancels every group that no judger is busy with; each of the others as soon as its judgers have answered.

        Leaving the block spares those that still run.
        """
        try:
            self._evict(at_once=False)
            yield
        finally:
            for runner in self._runners:
                for group in runner.live:
                    group.spare()

    def hurry(self) -> None:
        """Cancels the others too."""
        self._evict(at_once=True)

    @contextmanager
    def until_settled(self) -> Generator[None]:
        """A scope that ends as soon as no group is live."""
        with CancelScope() as scope:
            self._until_settled = scope
            self.settled()
            try:
                yield
            finally:
                self._until_settled = None

    def settled(self) -> None:
        """A group has ended."""
        if self._until_settled is not None and not self.live:
            self._until_settled.cancel()

    def _evict(self, *, at_once: bool) -> None:
        for runner in self._runners:
            for group in list(runner.live):
                group.evict(at_once=at_once)

    def __repr__(self) -> str:
        return f"<Eviction of {self.live} groups>"
