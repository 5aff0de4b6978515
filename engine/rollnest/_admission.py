"""A bound on the groups of all tasks together, and whose turn it is when one is free. Pure.

What a waiting `next_batch` lacks comes first: it can always become complete, however small the bound. Otherwise tasks
take turns by their weights (stride scheduling: each start moves a task on by 1 / weight, and the one that is
furthest behind is next), so none of them starves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

__all__ = ["Admission", "Applicant"]


class Applicant(Protocol):
    """A task that may want to start groups."""

    @property
    def in_flight(self) -> int:
        """Its groups that run."""
        ...

    @property
    def wanted(self) -> int:
        """How many groups it would start now if there were no bound; 0 if it has nothing to draw."""
        ...

    @property
    def lacking(self) -> int:
        """Groups that a waiting `next_batch` lacks, and that are not in flight."""
        ...

    def wake(self) -> None:
        """Tells it to look again for how many groups it may start."""
        ...


class Admission:
    """Says which task may start the next group.

    Attributes:
        bound: Groups at once, over all tasks; `None` is no bound.
    """

    def __init__(self, bound: int | None, weights: Mapping[str, float]) -> None:
        self.bound = bound
        least = min((w for w in weights.values() if w > 0), default=1.0)
        # A custom allocation may give groups to a task of weight 0 too: it counts as the lightest.
        self._strides = {name: 1 / (w or least) for name, w in weights.items()}
        self._passes = dict.fromkeys(weights, 0.0)
        self._now = 0.0
        self._applicants: dict[str, Applicant] = {}

    def join(self, name: str, applicant: Applicant) -> None:
        """Adds a task."""
        self._applicants[name] = applicant

    def room(self, name: str) -> int:
        """How many groups a task may start now: what it wants; with a bound, 1 if it is next."""
        wanted = self._applicants[name].wanted
        if self.bound is None or not wanted:
            return wanted
        if sum(a.in_flight for a in self._applicants.values()) >= self.bound:
            return 0
        return int(self._next() == name)

    def started(self, name: str) -> None:
        """Records that a task has started a group; another may be next."""
        if self.bound is not None:
            self._now = self._behind(name)
            self._passes[name] = self._now + self._strides[name]
            self.changed(name)

    def changed(self, name: str) -> None:
        """Says that a task may want more or less than before, or has a group less in flight."""
        if self.bound is None:
            self._applicants[name].wake()
        else:
            for applicant in self._applicants.values():
                applicant.wake()

    def _next(self) -> str:
        candidates = [n for n, a in self._applicants.items() if a.wanted]
        return min(candidates, key=lambda n: (not self._applicants[n].lacking, self._behind(n)))

    def _behind(self, name: str) -> float:
        # One that wanted nothing for a while must not make up for it at the expense of the others.
        return max(self._passes[name], self._now)

    def __repr__(self) -> str:
        flight = sum(a.in_flight for a in self._applicants.values())
        return f"<Admission: {flight} of {self.bound or 'unbounded'} groups in flight>"
