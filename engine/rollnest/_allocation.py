"""How a batch is shared among tasks: by weight, largest remainder, fractions carried over steps.

Over many steps each task gets its weight's share exactly, however small the batch (Hamilton's method with
carried remainders). The arithmetic is exact, so no rounding builds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import floor

from attrs import frozen

__all__ = ["Allocation", "Shares"]


@frozen
class Shares:
    """One step's shares, and the fractions left over if the step is taken."""

    groups: Mapping[str, int]
    carried: Mapping[str, Fraction]


class Allocation:
    """Plans steps by weight; a plan changes nothing until it is settled."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = {name: Fraction(weight) for name, weight in weights.items()}
        self._carried = dict.fromkeys(weights, Fraction(0))

    def fraction(self, task: str) -> float:
        """A task's share of any batch in the long run."""
        return float(self._weights[task] / sum(self._weights.values()))

    def plan(self, groups: int, tasks: set[str]) -> Shares:
        """Shares `groups` among some of the tasks; ties go to the task that was named first.

        A task of weight 0 gets nothing; if only such tasks are asked for, every share is 0.
        """
        weights = {n: w for n, w in self._weights.items() if n in tasks and w > 0}
        total = sum(weights.values())
        # What absent tasks are owed or owe is not theirs to claim now: the present ones share all of the batch.
        present = groups - sum((self._carried[n] for n in weights), Fraction(0))
        exact = {n: present * w / total + self._carried[n] for n, w in weights.items()}
        shares = {n: max(0, floor(x)) for n, x in exact.items()}
        while exact and (left := groups - sum(shares.values())):
            # Carried debts can push the floors' sum to either side of the total.
            if left > 0:
                shares[max(exact, key=lambda n: exact[n] - shares[n])] += 1
            else:
                holders = [n for n in exact if shares[n] > 0]
                shares[min(holders, key=lambda n: exact[n] - shares[n])] -= 1
        carried = self._carried | {n: x - shares[n] for n, x in exact.items()}
        return Shares({n: shares.get(n, 0) for n in self._weights}, carried)

    def settle(self, shares: Shares) -> None:
        """Records that a plan was carried out."""
        self._carried = dict(shares.carried)
