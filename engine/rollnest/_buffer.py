"""The rows that have ended a run and wait: for a batch, or to be drawn again. Order only; the table has the states.

Ready rows leave by their age: the oldest first, or the freshest. Rows that wait leave in this order: those that
expired, then those that were cut. With a tail batch, expired rows are held back until enough of them wait.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["ReplayBuffer"]

T = TypeVar("T")


class _Rows(Generic[T]):
    """Ready rows of one age, in the order in which they were drawn. Most end in that order, so most go to the end."""

    __slots__ = ("rows", "visits")

    def __init__(self) -> None:
        self.rows: list[T] = []
        self.visits: list[int] = []

    def put(self, row: T, visit: int) -> None:
        """Takes a row in."""
        visits = self.visits
        if not visits or visit > visits[-1]:
            visits.append(visit)
            self.rows.append(row)
        else:
            place = bisect(visits, visit)
            visits.insert(place, visit)
            self.rows.insert(place, row)

    def take(self, count: int) -> list[T]:
        """Takes out up to `count` rows, those that were drawn first."""
        rows = self.rows
        if count >= len(rows):  # none of them is touched
            self.rows, self.visits = [], []
            return rows
        del self.visits[:count]
        self.rows = rows[count:]
        del rows[count:]
        return rows


class ReplayBuffer(Generic[T]):
    """The rows of one task that wait.

    Attributes:
        ready: How many rows wait for a batch.
    """

    def __init__(self, *, tail_batch: int | None = None, freshest_first: bool = False) -> None:
        self.ready: int = 0
        self._tail_batch = tail_batch
        self._freshest_first = freshest_first
        self._by_version: dict[int, _Rows[T]] = {}  # versions are few
        self._held: deque[T] = deque()  # expired, until they are a tail batch
        self._expired: deque[T] = deque()
        self._cut: deque[T] = deque()

    @property
    def waiting(self) -> int:
        """How many rows wait to be drawn again."""
        return len(self._held) + len(self._expired) + len(self._cut)

    @property
    def expired(self) -> int:
        """How many of these have expired."""
        return len(self._held) + len(self._expired)

    def __iter__(self) -> Iterator[T]:
        for _, ready in sorted(self._by_version.items()):
            yield from ready.rows
        yield from self._held
        yield from self._expired
        yield from self._cut

    def waiting_rows(self) -> tuple[list[T], list[T], list[T]]:
        """Rows that wait to be drawn again: expired and held back, expired, and cut, each in order."""
        return list(self._held), list(self._expired), list(self._cut)

    def ready_rows(self) -> list[T]:
        """Ready rows."""
        rows: list[T] = []
        for ready in self._by_version.values():
            rows += ready.rows
        return rows

    def put(self, row: T, version: int, visit: int) -> None:
        """Takes in a ready row whose oldest trainable token is of `version`."""
        ready = self._by_version.get(version)
        if ready is None:
            ready = self._by_version[version] = _Rows()
        ready.put(row, visit)
        self.ready += 1

    def take(self, count: int) -> list[T]:
        """Takes out up to `count` ready rows; of one age those that were drawn first."""
        rows: list[T] = []
        while self._by_version and len(rows) < count:
            version = (max if self._freshest_first else min)(self._by_version)
            taken = self._take(version, count - len(rows))
            rows = [*rows, *taken] if rows else taken  # mostly all are of one version
        return rows

    def take_older(self, version: int) -> list[T]:
        """Takes out the ready rows that are older than `version`, oldest first."""
        rows: list[T] = []
        while self._by_version and (oldest := min(self._by_version)) < version:
            rows += self._take(oldest)
        return rows

    def wait_expired(self, row: T) -> None:
        """Takes in a row that expired; call `complete_tail` after the last one."""
        (self._expired if self._tail_batch is None else self._held).append(row)

    def wait_again(self, row: T) -> None:
        """Takes in a row that expired and is held back no more."""
        self._expired.append(row)

    def complete_tail(self) -> Sequence[T]:
        """Lets the rows go that are held back, if they are enough for a tail batch; returns them."""
        if self._tail_batch is None or len(self._held) < self._tail_batch:
            return ()
        return self._release()

    def wait_cut(self, row: T) -> None:
        """Takes in a row that was cut before it ended."""
        self._cut.append(row)

    def take_waiting(self, *, everything: bool = False) -> T | None:
        """Takes out the row that is to be drawn next.

        Args:
            everything: Whether rows that are held back for a tail batch are due too.
        """
        if everything and not self._expired:
            self._release()
        for rows in (self._expired, self._cut):
            if rows:
                return rows.popleft()
        return None

    def _release(self) -> list[T]:
        released = list(self._held)
        self._held.clear()
        self._expired.extend(released)
        return released

    def _take(self, version: int, count: int | None = None) -> list[T]:
        """Takes out up to `count` rows of one age, those that were drawn first; all without a `count`."""
        ready = self._by_version[version]
        rows = ready.rows if count is None else ready.take(count)
        if count is None or not ready.rows:
            del self._by_version[version]
        self.ready -= len(rows)
        return rows
