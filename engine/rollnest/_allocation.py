"""How a batch is shared among tasks: by weight, or as the user says.

By weight it is Hamilton's method (largest remainder) with fractions carried over steps: in the long run each task
gets its weight's share exactly, however small the batch. The arithmetic is exact, so no rounding builds up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from math import floor
from typing import TypeAlias

from attrs import frozen

from ._checks import check_whole

__all__ = ["Allocate", "Allocation", "AllocationRequest", "Shares", "by_weight"]


@frozen
class AllocationRequest:
    """What an allocator is asked.

    Attributes:
        step: Number of the batch, counted from 1.
        groups: Groups to share.
        weights: Weight of each task that can still give groups, in the order of the tasks.
        owed: What each of these is owed from the steps before, in groups; negative if it had too many.
        delivered: Groups of each that were delivered so far.
    """

    step: int
    groups: int
    weights: Mapping[str, float]
    owed: Mapping[str, Fraction]
    delivered: Mapping[str, int]


Allocate: TypeAlias = "Callable[[AllocationRequest], Mapping[str, int]]"
"""Shares a batch: returns groups for each task; one that is left out gets none. They must sum up to `groups`."""


def by_weight(request: AllocationRequest) -> Mapping[str, int]:
    """Shares a batch by the tasks' weights; ties go to the task that was named first.

    A task of weight 0 gets nothing; if there are only such tasks, nobody gets anything.
    """
    weights = {name: Fraction(w) for name, w in request.weights.items() if w > 0}
    total = sum(weights.values())
    # What absent tasks are owed or owe is not theirs to claim now: the present ones share all of the batch.
    present = request.groups - sum((request.owed[n] for n in weights), Fraction(0))
    exact = {n: present * w / total + request.owed[n] for n, w in weights.items()}
    shares = {n: max(0, floor(x)) for n, x in exact.items()}
    while exact and (left := request.groups - sum(shares.values())):
        # Carried debts can push the floors' sum to either side of the total.
        if left > 0:
            shares[max(exact, key=lambda n: exact[n] - shares[n])] += 1
        else:
            holders = [n for n in exact if shares[n] > 0]
            shares[min(holders, key=lambda n: exact[n] - shares[n])] -= 1
    return shares


@frozen
class Shares:
    """One step's shares, and what tasks are owed if the step is taken."""

    groups: Mapping[str, int]
    owed: Mapping[str, Fraction]


class Allocation:
    """Plans steps; a plan changes nothing until it is settled.

    Attributes:
        by_weight: Whether the weights alone say what a task gets.
    """

    def __init__(self, weights: Mapping[str, float], allocate: Allocate = by_weight) -> None:
        self.by_weight: bool = allocate is by_weight
        self._weights = weights
        self._allocate = allocate
        self._owed = dict.fromkeys(weights, Fraction(0))

    @property
    def owed(self) -> Mapping[str, Fraction]:
        """What tasks are owed of the next batches."""
        return self._owed

    def restore(self, owed: Mapping[str, Fraction]) -> None:
        """Goes on from what tasks are owed."""
        self._owed.update(owed)

    def fraction(self, task: str, tasks: Collection[str]) -> float:
        """A task's share of any batch in the long run, if these are the tasks that can still give groups."""
        total = sum(weight for name, weight in self._weights.items() if name in tasks)
        return self._weights[task] / total if task in tasks and total else 0.0

    def plan(
        self,
        groups: int,
        tasks: set[str],
        step: int = 1,
        delivered: Mapping[str, int] | None = None,
    ) -> Shares:
        """Shares `groups` among some of the tasks.

        Raises:
            ValueError: The allocator names a task that can't give groups, or its shares don't sum up.
            TypeError: A share is no int.
        """
        weights = {name: w for name, w in self._weights.items() if name in tasks}
        owed = {name: self._owed[name] for name in weights}
        done = {name: (delivered or {}).get(name, 0) for name in weights}
        shares = self._allocate(AllocationRequest(step, groups, weights, owed, done))
        self._check(shares, groups, weights)
        total = sum(Fraction(w) for w in weights.values())
        present = groups - sum(owed.values(), Fraction(0))
        settled = {
            name: present * Fraction(w) / total + owed[name] - shares.get(name, 0)
            for name, w in weights.items()
            if w > 0
        }
        return Shares({n: shares.get(n, 0) for n in self._weights}, self._owed | settled)

    def settle(self, shares: Shares) -> None:
        """Records that a plan was carried out."""
        self._owed = dict(shares.owed)

    def _check(self, shares: Mapping[str, int], groups: int, weights: Mapping[str, float]) -> None:
        for name, share in shares.items():
            if name not in weights:
                raise ValueError(
                    f"allocate gave {share} groups to {name!r}; the tasks are {list(weights)}"
                )
            check_whole(f"allocate's share of {name!r}", share, 0)
        given = sum(shares.values())
        if given != groups and not (given == 0 and not any(weights.values())):
            raise ValueError(f"allocate gave {given} groups in all, of {groups}: {dict(shares)}")
