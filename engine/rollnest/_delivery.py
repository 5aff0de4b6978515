"""Takes batches out of the tables: shares, expiry, short ends, the ledger of what was handed over. Synchronous.

Taking is all or nothing: either every task's share is there and the batch is made, or nothing changes but that
groups which became too old have expired.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from operator import attrgetter

from ._allocation import Allocation, Shares
from ._making import make_batch
from ._records import Batch
from ._statistics import Described, Reading, share_of
from ._table import GroupTable, Row
from .errors import EndOfPrompts

__all__ = ["Delivery"]

_GROUP = attrgetter("group")  # a ready row has one


class Delivery:
    """Hands batches to the trainer.

    Attributes:
        batches: Batches handed over so far.
        uncommitted: Batches that the trainer has not committed yet, by index.
    """

    def __init__(
        self,
        tables: Mapping[str, GroupTable],
        allocation: Allocation,
        readings: Callable[[], Mapping[str, Reading]],
        is_exhausted: Callable[[str], bool],
        on_expired: Callable[[str, int], None],
        batch_size: int | None = None,
    ) -> None:
        self.batches = 0
        self.uncommitted: dict[int, Batch] = {}
        self._tables = tables
        self._allocation = allocation
        self._readings = readings
        self._before = readings()
        self._is_exhausted = is_exhausted
        self._on_expired = on_expired
        self._batch_size = batch_size
        self._taken = 0, 0  # a version, and the batches that were taken with it
        self._again: deque[Batch] = deque()
        self._last: tuple[int, Shares] | None = None
        self._plan: tuple[int, frozenset[str], Shares] | None = None

    @property
    def owed(self) -> Mapping[str, Fraction]:
        """What tasks are owed of the next batches."""
        return self._allocation.owed

    @property
    def taken_with(self) -> tuple[int, int]:
        """A version, and how many batches were taken with it."""
        return self._taken

    def restore(
        self,
        batches: int,
        taken: tuple[int, int],
        owed: Mapping[str, Fraction],
        again: Sequence[Batch],
    ) -> None:
        """Goes on from a checkpoint; figures of batches count from now on.

        Args:
            batches: Batches handed over before.
            taken: A version, and how many batches were taken with it.
            owed: What tasks are owed of the next batches.
            again: Batches that are handed over again, before all others.
        """
        self.batches, self._taken = batches, taken
        self._allocation.restore(owed)
        self._again.extend(again)
        self.uncommitted.update({batch.index: batch for batch in again})
        self._before = self._readings()

    def hand_over_again(self) -> Batch | None:
        """The next batch that an engine handed over from whose checkpoint this one was restored; `None` if none is
        left."""
        return self._again.popleft() if self._again else None

    def plan(self, groups: int) -> Shares:
        """The tasks' shares of the next batch: the same answer until the batch is taken or a task ends."""
        live = self._live
        if self._plan is None or self._plan[:2] != (groups, live):
            self._plan = groups, live, self._ask(groups, live)
            self._last = groups, self._plan[2]
        return self._plan[2]

    def _ask(self, groups: int, live: frozenset[str]) -> Shares:
        delivered = {name: table.delivered for name, table in self._tables.items()}
        return self._allocation.plan(groups, set(live), self.batches + 1, delivered)

    def share(self, task: str) -> float | None:
        """A task's part of a batch of `batch_size`, in groups, as far as it can be told; `None` without a `batch_size`.

        By weight that is its part in the long run. What a user's allocator will say next is not known: then it is what
        the task got of the last batch that was asked for.
        """
        if self._batch_size is None:
            return None
        if self._allocation.by_weight or self._last is None:
            return self._batch_size * self._allocation.fraction(task, self._live)
        groups, shares = self._last
        return self._batch_size * shares.groups[task] / groups

    @property
    def _live(self) -> frozenset[str]:
        """The tasks that can still give groups."""
        return frozenset(
            [n for n, t in self._tables.items() if t.ready or not self._is_exhausted(n)]
        )

    def taken(self, version: int) -> int:
        """How many batches were taken with the weights of `version`."""
        return self._taken[1] if self._taken[0] == version else 0

    def ready(self, groups: int) -> int:
        """How many groups of the next batch are ready."""
        shares = self.plan(groups).groups
        return sum(min(n, self._tables[name].ready) for name, n in shares.items())

    def take(self, groups: int, version: int) -> Batch | None:
        """Takes the next batch if it is complete, or as complete as it will ever be.

        Returns:
            The batch, or `None` if groups are missing that will still come.

        Raises:
            EndOfPrompts: Nothing is left, and nothing will come.
        """
        self.expire(version)
        shares = self.plan(groups)
        missing = [n for n, share in shares.groups.items() if self._tables[n].ready < share]
        if missing and not all(map(self._is_exhausted, missing)):
            return None
        rows = {name: self._tables[name].take(share) for name, share in shares.groups.items()}
        taken = sum(map(len, rows.values()))
        if not taken:
            delivered = sum(table.delivered for table in self._tables.values())
            dropped = sum((table.dropped for table in self._tables.values()), Counter[str]())
            reasons = "".join(f", {count} dropped ({why})" for why, count in dropped.items())
            raise EndOfPrompts(
                f"every task's prompts are used up: {delivered} groups delivered{reasons}"
            )
        self._allocation.settle(shares)
        self._plan = None
        self.batches += 1
        self._taken = version, self.taken(version) + 1
        batch = self._batch(rows, version, shares.groups, short=taken < groups)
        self.uncommitted[batch.index] = batch
        return batch

    def expire(self, version: int) -> None:
        """Moves what is too old for `version` to where it is drawn again. Versions only rise, so that is for good."""
        for name, table in self._tables.items():
            if count := table.expire(version):
                self._on_expired(name, count)

    def commit(self, index: int) -> None:
        """Forgets a batch that was trained; one that is still to be handed over again is not trained before that."""
        if not self._again or all(batch.index != index for batch in self._again):
            self.uncommitted.pop(index, None)

    def _batch(
        self,
        rows: Mapping[str, Sequence[Row]],
        version: int,
        shares: Mapping[str, int],
        *,
        short: bool,
    ) -> Batch:
        before, now = self._before, self._readings()
        self._before = now
        figures = Described(
            {
                name: share_of(self._tables[name], taken, shares[name], before[name], now[name])
                for name, taken in rows.items()
            },
            version,
        )
        groups = tuple(map(_GROUP, chain.from_iterable(rows.values())))
        return make_batch(self.batches, version, groups, figures, figures.total, short)
