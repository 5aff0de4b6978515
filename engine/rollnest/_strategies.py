"""How many groups a task may start now: pure arithmetic on what is live.

Admission counts live groups, never totals since the start, so it can neither drift nor deadlock: what a waiting
`next_batch` lacks is always admitted. It only saves waste; the staleness bound is enforced when a batch is taken.
"""

from __future__ import annotations

from math import ceil
from typing import Literal, Protocol

from attrs import field, frozen
from attrs.validators import in_

from ._checks import real, whole

__all__ = ["AsyncStrategy", "Production", "ProduceStrategy", "SyncStrategy"]


@frozen
class Production:
    """What one task has going.

    Attributes:
        lacking: Groups that a waiting `next_batch` still lacks, of those not yet ready.
        flight: Groups in flight.
        ready: Groups that are ready.
        share: The task's share of a batch in the long run, in groups; a fraction is possible.
    """

    lacking: int
    flight: int
    ready: int
    share: float


class ProduceStrategy(Protocol):
    """Says how many groups may start."""

    @property
    def max_staleness(self) -> int:
        """Most versions between a delivered sample's oldest trainable token and the policy's."""
        ...

    @property
    def expired(self) -> Literal["retry", "drop"]:
        """What becomes of groups that are too old: drawn again, or let go."""
        ...

    @property
    def needs_batch_size(self) -> bool:
        """Whether it runs ahead of `next_batch`, and so has to know the batch's size beforehand."""
        ...

    def room(self, production: Production) -> int:
        """Returns how many groups may start now, >= 0."""
        ...


@frozen(kw_only=True)
class SyncStrategy:
    """Starts exactly what the waiting `next_batch` still lacks.

    Attributes:
        max_staleness: Most versions of lag in a delivered sample.
        expired: What becomes of groups that are too old, because new weights came before they were taken:
            `"retry"` draws them again, `"drop"` lets them go.
    """

    max_staleness: int = field(default=0, validator=whole(0))
    expired: Literal["retry", "drop"] = field(default="retry", validator=in_(("retry", "drop")))
    needs_batch_size: bool = field(default=False, init=False, repr=False)

    def room(self, production: Production) -> int:
        """See `ProduceStrategy.room`."""
        return max(0, production.lacking - production.flight)


@frozen(kw_only=True)
class AsyncStrategy:
    """Runs ahead while the trainer trains.

    Keeps `flight + ready` below `(1 + lead) * share + ceil(oversample * share)`.

    Attributes:
        max_staleness: Most versions of lag in a delivered sample; older groups expire and are drawn again.
        lead: How many batches to run ahead of the next one; `None` is `max_staleness - 1`, at least 0. While the
            trainer trains on a batch of version v, `1 + lead` batches become ready, and the last of them is taken at
            version v + 1 + lead: a larger lead makes groups that expire.
        oversample: Share of a batch that is started on top, so that the slowest groups need not be waited for.
        expired: What becomes of groups that are too old: `"retry"` draws them again before fresh prompts, and keeps
            their fresh members; `"drop"` lets them go.
    """

    max_staleness: int = field(default=1, validator=whole(0))
    lead: float | None = field(default=None, validator=real(0, optional=True))
    oversample: float = field(default=0.0, validator=real(0))
    expired: Literal["retry", "drop"] = field(default="retry", validator=in_(("retry", "drop")))
    needs_batch_size: bool = field(default=True, init=False, repr=False)

    def room(self, production: Production) -> int:
        """See `ProduceStrategy.room`."""
        lead = max(0, self.max_staleness - 1) if self.lead is None else self.lead
        bound = ceil((1 + lead) * production.share) + ceil(self.oversample * production.share)
        ahead = bound - production.flight - production.ready
        return max(0, ahead, production.lacking - production.flight)
